"""Parse what native code leaves: py-spy's dump of its frames, and the message of an abort."""

from __future__ import annotations

import re

# `    at::native::add (libtorch_cpu.so)`, `    forward (model.py:12)`
_FRAME = re.compile(r"^\s+(?P<symbol>\S.*?) \((?P<place>[^()]*)\)$")
# What the runtime of C++ (libstdc++, libc++) prints of an exception that nothing catches, and assert() of C, before they abort.
_ABORT = re.compile(
    r"^(?:terminate called after throwing an instance of '(?P<type>[^'\n]+)'(?:\n +what\(\): +(?P<what>[^\n]+))?"
    r"|(?:libc\+\+abi: )?terminating due to uncaught exception of type (?P<kind>\S+?)(?:: (?P<why>[^\n]+))?$"
    r"|(?P<check>[^\n]{1,300}: Assertion [`'][^\n]{1,300}' failed\.)$)",
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


def abort_message(output: str) -> str:
    """Return the message of the abort that ended a process, from its output: 'gloo::EnforceNotMet: ...'; '' without one."""
    found = next(reversed(list(_ABORT.finditer(output))), None)
    if found is None:
        return ""
    kind, text = found["type"] or found["kind"] or "", found["what"] or found["why"] or found["check"] or ""
    return ": ".join(part.strip() for part in (kind, text) if part)
