"""Coverage of code that ranks run, under pytest-cov: each rank measures by itself and leaves a file to be combined.

Where lines are measured test by test (pytest-testmon, and pytest-cov with ``--cov-context=test``), the host adds them in the
context of their test, in which it runs none of them itself: pytest-testmon would deselect it for ever.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.settings import COVERAGE, coverage_of_child


def settings_of_this_process() -> dict[str, Any] | None:
    """Return what is measured here, so that a rank can measure the same; None when nothing is."""
    module = sys.modules.get("coverage")
    current = module.Coverage.current() if module is not None else None
    if current is None:
        text = coverage_of_child()
        return json.loads(text) if text else None
    config = current.config
    lists = {
        "source": config.source,
        "source_pkgs": config.source_pkgs,
        "omit": config.run_omit,
        "include": config.run_include,
    }
    return {
        "data_file": os.path.abspath(config.data_file),
        "config_file": config.config_file or False,
        "branch": config.branch,
        **{name: given if given is None else list(given) for name, given in lists.items()},
    }


def for_child() -> dict[str, str]:
    """Return the environment variable that passes these settings to a child pytest."""
    settings = settings_of_this_process()
    return {COVERAGE: json.dumps(settings)} if settings is not None else {}


def start(settings: dict[str, Any] | None) -> Any:
    """Start to measure in place of the measurement that was inherited by the fork. Return what `save` takes."""
    if settings is None:
        return None
    import coverage

    inherited = coverage.Coverage.current()
    if inherited is not None:
        inherited.stop()
    measuring = coverage.Coverage(data_suffix=True, **settings)
    measuring.start()
    return measuring


def save(measuring: Any) -> None:
    """Write the file of this rank; pytest-cov combines it with the others."""
    if measuring is not None:
        measuring.stop()
        measuring.save()


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
