"""An entry point that torch loads when it is imported: NSA_TRACE_DIR alone makes a rank leave evidence."""

from __future__ import annotations

import os

VARIABLE = "NSA_TRACE_DIR"
_DONE = "_NSA_TRACED"


def autostart() -> None:
    """Follow this process where the environment requests it and it is a rank; else return at once.

    A rank's own children (data loaders' workers, compilers) inherit both variables, and are not ranks.
    """
    folder, rank = os.environ.get(VARIABLE), os.environ.get("RANK")
    if not folder or rank is None or os.environ.get(_DONE) == rank or "PYTEST_CURRENT_TEST" in os.environ:
        return
    os.environ[_DONE] = rank
    from nsa.trace.training import trace_training

    trace_training(folder)
