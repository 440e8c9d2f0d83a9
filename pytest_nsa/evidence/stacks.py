"""Parse faulthandler's dumps, and find the thread and the line that show what a rank does."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

CHILD_MARK = "# process "
_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)(?: \[(?P<name>[^\]]*)\])? \(most recent call first\):")
_ALONE = "Stack (most recent call first):"  # a dump of one thread, that which got the signal: in general the main one
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
# Not only the package's name: a checkout may be in a folder of this name.
_PARTS = (p for p in Path(__file__).parents[1].iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file())
_HEARTBEAT = ("/nsa/trace/stall/heartbeat.py", "/nsa/trace/heartbeat.py")  # the second in folders of 0.1
_OURS = ("/nsa/trace/", *(f"/pytest_nsa/{p.name}{'' if p.suffix else '/'}" for p in _PARTS))
# Files that torch's compiler has written, in whatever folder.
_GENERATED = re.compile(r"/[a-z2-7]{2}/c[a-z2-7]{51}\.py$")
_RUN = ("/pytest_nsa/rank/process.py", "_run")  # runs a rank's test
_JOINS = ("join", "_wait_for_tstate_lock", "result", "exception", "shutdown", "_shutdown", "__exit__")
_JOIN_FILES = ("/threading.py", "/concurrent/futures/_base.py", "/concurrent/futures/thread.py")
_POOL = ("/concurrent/futures/thread.py", "/multiprocessing/pool.py", "/multiprocessing/connection.py")
_OF_PROCESSES = ("/subprocess.py", "/multiprocessing/connection.py", "/multiprocessing/process.py")
_PROGRAMS = ("<module>", "_run_module_as_main")  # the outermost functions of programs
MOST_FRAMES = 100  # of a stack, in dumps by faulthandler and by the rank itself
_IDLE_FILES = ("/threading.py", "/queue.py", "/selectors.py")
# For evidence from another machine, where Python was installed elsewhere. nsa/trace/frames.py has the same rule for packages.
_LIBRARY = re.compile(r"/lib/python3\.\d+/|/(?:site|dist)-packages/")
_MODEL = re.compile(r"/(?:site|dist)-packages/nsa/(?!trace/)")  # the user's code, though installed
_PACKAGE = re.compile(r"/(site|dist)-packages/(?!torch/|_?pytest/|pluggy/|xdist/)")
# The commands of installed packages, such as pytest's, too.
_LIBRARIES = tuple({p + os.sep for k in ("stdlib", "purelib", "platlib", "scripts") if (p := sysconfig.get_path(k))})


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a Python stack. ``is_own``: it is in the test's file, wherever that is; ``is_library``: it is in a folder of
    libraries, by the rank that wrote it.
    """

    file: str
    line: int
    function: str
    is_own: bool = False
    is_library: bool = False

    def describe(self) -> str:
        """Return ``file:line in function``."""
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to the plugin or its tracers, and therefore is no evidence."""
        return _is_ours(self.file)

    @property
    def is_user(self) -> bool:
        """Whether it is user code: not Python's library, an installed package, a compiler's output or this plugin."""
        return self.is_own or (not self.is_library and _is_user_code(self.file))

    @property
    def is_in_package(self) -> bool:
        """Whether it belongs to an installed package that may call collectives for the user, as a trainer does; not to torch."""
        return not self.is_user and not self.is_ours and _PACKAGE.search(self.file) is not None


# Called a hundred times per rank, for thousands of ranks with stacks in the same few files.
@functools.lru_cache(maxsize=4096)
def _is_ours(file: str) -> bool:
    return any(part in file for part in _OURS)


@functools.lru_cache(maxsize=4096)
def _is_user_code(file: str) -> bool:
    is_library = (
        file.startswith(("<", *_LIBRARIES)) or _LIBRARY.search(file) or _is_ours(file) or _GENERATED.search(file)
    )
    return not is_library or _MODEL.search(file) is not None


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """A thread's frames, innermost first."""

    frames: tuple[Frame, ...]
    is_main: bool

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame of the user's code, below the frame that runs the rank's test."""
        for frame in self.frames:
            if frame.is_user:
                return frame
            if frame.function == _RUN[1] and frame.file.endswith(_RUN[0]):
                return None
        return None

    @property
    def test_frames(self) -> tuple[Frame, ...]:
        """The frames from the innermost to the outermost user frame: those outside of it called the test, and are no evidence."""
        last = max((i for i, frame in enumerate(self.frames) if frame.is_user), default=len(self.frames) - 1)
        return self.frames[: last + 1]

    @property
    def is_in_hook(self) -> bool:
        """Whether the user's code runs in a gradient hook: autograd called it, but not as a Function's backward or to recompute."""
        is_in_user_code = False
        for frame in self.frames:
            if frame.file.endswith(("torch/autograd/function.py", "torch/utils/checkpoint.py")):
                return False
            if frame.function == "_engine_run_backward":
                return is_in_user_code
            is_in_user_code = is_in_user_code or frame.is_user
        return False

    @property
    def waits_for_a_thread(self) -> bool:
        """Whether it joins a thread, or waits for a future's result. Locks and events do not count."""
        return any(f.function in _JOINS and f.file.endswith(_JOIN_FILES) for f in self._library_frames)

    @property
    def join_frame(self) -> Frame | None:
        """The line that joins a thread or waits for a future's result; None if it does not."""
        below = (f for f in self.frames if not f.file.endswith(_JOIN_FILES))
        return next(below, None) if self.waits_for_a_thread else None

    @property
    def is_in_a_collective_of_an_executor(self) -> bool:
        """Whether it is a thread of an executor that runs a call of torch.distributed."""
        return self.runs_a_call and any(f.file.endswith("torch/distributed/distributed_c10d.py") for f in self.frames)

    @property
    def runs_a_call(self) -> bool:
        """Whether it is a thread of an executor that runs a call, the user's or a library's."""
        return any(f.function == "run" and f.file.endswith("/concurrent/futures/thread.py") for f in self.frames)

    @property
    def is_a_timer(self) -> bool:
        """Whether it is a threading.Timer that waits for its time: it runs only that module's code."""
        return all(f.file.endswith("/threading.py") for f in self.frames) and any(
            f.function == "run" for f in self.frames
        )

    @property
    def waits_for_work(self) -> bool:
        """Whether it waits for an event, a condition or a queue, as a pool's worker does: it is idle, not stuck."""
        frames = self._library_frames
        return any(f.file.endswith(_IDLE_FILES) for f in frames[:3]) or frames[0].file.endswith(_POOL)

    @property
    def runs_a_loop(self) -> bool:
        """Whether it runs asyncio's loop, in which a timer or a file may be pending."""
        return any(f.function == "run_forever" and "/asyncio/" in f.file for f in self.frames)

    @property
    def is_at_exit(self) -> bool:
        """Whether the interpreter runs it after the program's end: to wait for threads, or in a handler of atexit."""
        return self.is_main and len(self.frames) < MOST_FRAMES and self.frames[-1].function not in _PROGRAMS

    @property
    def waits_in_python(self) -> bool:
        """Whether it waits for a lock, an event or a queue of Python's, which only a thread of its process ends."""
        return self.frames[0].file.endswith(("/threading.py", "/queue.py"))

    @property
    def waits_for_a_process(self) -> bool:
        """Whether it waits for a child process or its answer."""
        return any(f.file.endswith(_OF_PROCESSES) for f in self._library_frames)

    @property
    def _library_frames(self) -> tuple[Frame, ...]:
        """The frames that the user's innermost line has called."""
        return tuple(itertools.takewhile(lambda f: not f.is_user, self.frames)) or self.frames[:1]

    @property
    def is_ours(self) -> bool:
        """Whether it is the heartbeat or another thread of the tracers."""
        return any(f.file.endswith(_HEARTBEAT) for f in self.frames)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a rank knows of its files: the test's (``body``), and the folders that hold ``libraries``."""

    body: str = ""
    libraries: tuple[str, ...] = ()

    def frame(self, file: str, line: int, function: str) -> Frame:
        """Return a frame of the rank."""
        is_library = file.startswith(self.libraries) and not _MODEL.search(file)
        return Frame(file, line, function, is_own=file == self.body, is_library=is_library)


def parse_children(text: str) -> tuple[tuple[ThreadStack, ...], ...]:
    """Return the threads of each of the rank's children that were dumped."""
    return tuple(stacks for part in text.split(CHILD_MARK)[1:] if (stacks := parse_dump(part)))


def parse_dump(text: str, origin: Origin = Origin()) -> tuple[ThreadStack, ...]:
    """Return the threads of the rank's dump in a file."""
    text = text.partition(CHILD_MARK)[0]
    threads: list[list[Frame]] = []
    current: list[Frame] | None = None
    alone: list[Frame] | None = None
    for line in text.splitlines():
        if header := _THREAD.match(line):
            threads.append([])
            current = threads[-1] if header[1] == "Current thread" else current
        elif line == _ALONE:
            alone = []
            threads.append(alone)
        elif threads and (frame := _frame(line, origin)) is not None:
            threads[-1].append(frame)
    stacks = [frames for frames in threads if frames and (frames is not alone or current is None)]
    current = current or alone
    # faulthandler names no main thread before Python 3.14. It does not begin in threading's bootstrap; of several such threads
    # (others are C++ threads that call Python) it is the one that got the signal.
    outer = [f for f in stacks if f[-1].function != "_bootstrap"]
    main = next((f for f in outer if f is current), outer[-1] if outer else None)
    return tuple(ThreadStack(tuple(f), is_main=f is main) for f in stacks)


# Thousands of ranks are at the same few lines.
@functools.lru_cache(maxsize=4096)
def _frame(line: str, origin: Origin) -> Frame | None:
    match = _FRAME.match(line)
    if match is None:
        return None
    number = int(match["line"]) if match["line"].isdigit() else 0
    return origin.frame(match["file"], number, match["function"])


def thread_that_shows(threads: tuple[ThreadStack, ...]) -> ThreadStack | None:
    """Return the thread that shows what the rank does: the main one, unless it waits for another thread of the rank.

    It waits for one in autograd, which runs the user's backward in a thread; in a join, or for a future's result; in asyncio's
    loop, for a collective that an executor runs; and in RPC, while another thread serves a request of another rank.
    """
    main = next((t for t in threads if t.is_main), None)
    others = [t for t in threads if t is not main and not t.is_ours and t.user_frame is not None]
    if main is None:  # another thread does not show what the rank waits for
        return None
    if main.frames[0].function == "_engine_run_backward":
        engines = [t for t in others if t.frames[-1].function != "_bootstrap"]  # autograd's own threads, of C++
        return next(iter(engines), main)
    served = [t for t in others if any("torch/distributed/rpc/" in f.file for f in t.frames)]
    if served and any(
        f.file.endswith("torch/distributed/rpc/api.py") or "torch/futures" in f.file for f in main.frames
    ):
        return served[0]
    called = [t for t in threads if t is not main and t.is_in_a_collective_of_an_executor]
    if called and any("/asyncio/" in f.file for f in main.frames):  # the loop awaits it
        return called[0]
    if main.waits_for_a_thread:
        if main.user_frame is None and others:  # the test's function has returned, and left a thread
            return others[0]
        # A thread that a library has started for the user has none of the user's frames.
        threads = (*others, *(t for t in threads if t is not main and not t.is_ours and t not in others))
        at_work = next((t for t in threads if not t.waits_for_work), None)
        return at_work or next((t for t in others if t.runs_a_call and t.waits_for_a_thread), main)
    return main
