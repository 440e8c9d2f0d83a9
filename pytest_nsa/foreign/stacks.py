"""Read a rank's Python stack from the text of py-spy, of pystack, or of faulthandler."""

import re
import sys
from collections.abc import Iterator

from pytest_nsa.evidence.stacks import Frame, ThreadStack, parse_dump, thread_that_shows

_PROCESS = re.compile(r"^(?:Process |Traceback for thread )(?P<number>\d+)")
_RANK = re.compile(r"\b(?:RANK|LOCAL_RANK|rank)[ =:]+(?P<rank>\d+)")
_THREAD = re.compile(r'^Thread (?P<id>\S+)(?: \((?P<state>[^)]*)\))?(?:: "(?P<name>[^"]*)")?')
_PY_SPY = re.compile(r"^ {4}(?P<function>.+) \((?P<file>[^()]+):(?P<line>\d+)\)$")
_PYSTACK = re.compile(r'^ *\(Python\) File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')
# The modules of Python, and packages with collectives or loops that a training calls.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "torch", "numpy", "accelerate", "transformers", "lightning", "pytorch_lightning", "deepspeed", "ray",
}  # fmt: skip
_MARKS = ("(most recent call first)", "Traceback for thread", "(Python) File")


def is_stack_text(text: str) -> bool:
    """Return whether a text is a dump of stacks by one of the three."""
    return any(mark in text for mark in _MARKS) or bool(re.search(r"^Process \d+: .*\nPython v", text, re.M))


def read_stacks(text: str) -> Iterator[tuple[int | None, tuple[Frame, ...]]]:
    """Yield, for each process in a text, the rank that its header names (None: none) and the frames that show what it does."""
    if "(most recent call first)" in text:
        yield None, _shown(parse_dump(text))
        return
    pystack = "(Python) File" in text
    for part in re.split(r"(?m)^(?=Process \d+: )", text) if not pystack else [text]:
        threads = _pystack_threads(part) if pystack else _py_spy_threads(part)
        rank = _RANK.search(part.partition("\n")[0])
        if threads:
            yield int(rank["rank"]) if rank else None, _shown(threads)


def _shown(threads: tuple[ThreadStack, ...]) -> tuple[Frame, ...]:
    shown = thread_that_shows(threads) or next(iter(threads), None)
    return shown.frames if shown is not None else ()


def _py_spy_threads(text: str) -> tuple[ThreadStack, ...]:
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if header := _THREAD.match(line):
            threads.append((header["name"] == "MainThread", []))
        elif threads and (frame := _PY_SPY.match(line)):
            threads[-1][1].append(_frame(frame["file"], int(frame["line"]), frame["function"]))
    return tuple(ThreadStack(tuple(frames), is_main=main) for main, frames in threads if frames)


def _frame(file: str, line: int, function: str) -> Frame:
    """Return a frame by py-spy's short name of its file, which is relative to the folder that Python imported it from."""
    top = file.partition("/")[0].removesuffix(".py")
    return Frame(file if file.startswith("/") else f"/{file}", line, function, is_library=top in _LIBRARIES)


def _pystack_threads(text: str) -> tuple[ThreadStack, ...]:
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _PROCESS.match(line):
            threads.append([])
        elif threads and (frame := _PYSTACK.match(line)):
            threads[-1].insert(0, Frame(frame["file"], int(frame["line"]), frame["function"]))  # outermost first
    return tuple(
        ThreadStack(tuple(frames), is_main=i == len(threads) - 1) for i, frames in enumerate(threads) if frames
    )
