"""Parse py-spy's dump of native frames."""

from __future__ import annotations

import re

# `    at::native::add (libtorch_cpu.so)`, `    forward (model.py:12)`
_FRAME = re.compile(r"^\s+(?P<symbol>\S.*?) \((?P<place>[^()]*)\)$")


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
