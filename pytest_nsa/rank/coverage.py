"""Coverage of code that ranks run, under pytest-cov: each rank measures by itself and leaves a file to be combined."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

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
