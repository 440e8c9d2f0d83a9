"""Give the lines that ranks ran to what measures them test by test: pytest-testmon, and pytest-cov with ``--cov-context=test``.

On the host a test on ranks runs none of its lines: pytest-testmon would deselect it for ever. Each rank measures as the host does
at that moment, and leaves a file in the test's folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.rank.coverage import settings_of_this_process

FILE = "lines"


def read_settings(item: pytest.Item, folder: Path) -> dict[str, Any]:
    """Return the settings by which the ranks of a test measure their lines; {} where nothing is measured test by test."""
    settings = settings_of_this_process() if _make_context(item) else None
    return {**settings, "data_file": str(folder / FILE)} if settings else {}


def add_lines_of_ranks(item: pytest.Item, folder: Path) -> None:
    """Add what the ranks of a test have measured to this process's measurement, in the context of the test."""
    context = _make_context(item)
    current: Any = sys.modules["coverage"].Coverage.current() if context and "coverage" in sys.modules else None
    if current is None:
        return
    data = current.get_data()
    data.set_context(context)
    for path in folder.glob(f"{FILE}.*"):
        of_rank = type(data)(basename=str(path))
        of_rank.read()
        data.update(_in_context(of_rank, data, context))
        of_rank.erase()


def _in_context(of_rank: Any, like: Any, context: str) -> Any:
    """Return what a rank has measured, as data in memory with the context of the test."""
    found = type(like)(no_disk=True)
    found.set_context(context)
    files = of_rank.measured_files()
    if of_rank.has_arcs():
        found.add_arcs({file: of_rank.arcs(file) or () for file in files})
    else:
        found.add_lines({file: of_rank.lines(file) or () for file in files})
    return found


def _make_context(item: pytest.Item) -> str:
    """Return the name by which the measurement knows a test's call; '' where it does not separate tests."""
    if item.config.pluginmanager.hasplugin("TestmonCollect"):
        return item.nodeid
    return f"{item.nodeid}|run" if item.config.getoption("cov_context", None) == "test" else ""
