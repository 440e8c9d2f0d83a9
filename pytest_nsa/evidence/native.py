"""Parse what native code leaves: py-spy's dump of its frames, and the message of an abort."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from pytest_nsa.wire.files import read_end

END = 1 << 16  # bytes of an output
_FATAL = "Fatal Python error: "
_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV, "Aborted": signal.SIGABRT, "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL, "Floating point exception": signal.SIGFPE,
}  # fmt: skip

# `    at::native::add (libtorch_cpu.so)`, `    forward (model.py:12)`
_FRAME = re.compile(r"^\s+(?P<symbol>\S.*?) \((?P<place>[^()]*)\)$")
# What the runtime of C++ (libstdc++, libc++) prints of an exception that nothing catches, and assert() of C, before they abort.
_ABORT = re.compile(
    r"terminate called after throwing an instance of '(?P<type>[^'\n]+)'"
    r"(?:\n(?:terminate called recursively\n)?\s*what\(\): +(?P<what>[^\n]+))?"
    r"|terminating due to uncaught exception of type (?P<kind>\S+?)(?:: (?P<why>[^\n]+))?$"
    r"|^(?P<check>[^\n]{1,300}: Assertion [`'][^\n]{1,300}' failed\.)$",
    re.MULTILINE,
)


def innermost_symbol(text: str) -> str:
    """Return 'symbol in library' of the main thread's innermost frame; '' if that is no native frame."""
    in_main = False
    for line in text.splitlines():
        if line.startswith("Thread "):
            in_main = "MainThread" in line
        elif in_main and (match := _FRAME.match(line)):
            if ".py" in match["place"] or match["place"].startswith("<"):
                return ""
            return f"{match['symbol'][:120]} in {match['place']}"
    return ""


def fatal_signal(dump: str) -> int:
    """Return the signal that ended a process, by the first line of faulthandler's dump; 0 without one."""
    first = dump.partition("\n")[0].removeprefix(_FATAL)
    return _SIGNALS.get(first.replace("-", " ").strip(), 0) if dump.startswith(_FATAL) else 0


def read_abort_message(output: Path, ended_by: int) -> str:
    """Return `abort_message` of a file with a process's output; '' unless SIGABRT is the signal that ended it."""
    return abort_message(read_end(output, END)) if ended_by == signal.SIGABRT else ""


def abort_message(output: str) -> str:
    """Return the message of the abort that ended a process, from its output: 'gloo::EnforceNotMet: ...'; '' without one."""
    found = next(reversed(list(_ABORT.finditer(output.replace("\r\n", "\n")))), None)
    if found is None:
        return ""
    kind, text = found["type"] or found["kind"] or "", found["what"] or found["why"] or found["check"] or ""
    return ": ".join(part.strip() for part in (kind, text) if part)
