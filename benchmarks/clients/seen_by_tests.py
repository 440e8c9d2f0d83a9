"""A plugin that notes what tests see of their process, for ../suites.py: two sessions are compared by it."""

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

IGNORED = ("PYTHONPATH", "PYTEST_CURRENT_TEST")
BY_TEST: dict[str, Any] = {}
OF_THE_SESSION: set[str] = set()  # its threads and children, which come and go in no order


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*", "N", text)


def _note(nodeid: str) -> None:
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    hooks = (sys.excepthook, sys.unraisablehook, threading.excepthook, os.fork)
    variables = frozenset((name, _without_numbers(os.environ[name])) for name in os.environ if name not in IGNORED)
    BY_TEST[nodeid] = [
        {number: getattr(h, "__qualname__", str(h)) for number, h in handlers.items() if h is not signal.SIG_DFL},
        [f"{hook.__module__}.{getattr(hook, '__qualname__', type(hook))}" for hook in hooks], hash(variables),
    ]  # fmt: skip
    OF_THE_SESSION.update(f"thread {_without_numbers(thread.name)}" for thread in threading.enumerate())
    for task in Path("/proc/self/task").glob("*/children"):
        for pid in task.read_text().split():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            except OSError:
                continue
            OF_THE_SESSION.add(f"child {_without_numbers(' '.join(words)[:100])}")


def pytest_runtest_call(item: pytest.Item) -> None:
    _note(item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Note the end of the session, and write all of it."""
    _note("at the end")
    Path(os.environ["SEEN"]).write_text(json.dumps({**BY_TEST, **dict.fromkeys(OF_THE_SESSION)}))
