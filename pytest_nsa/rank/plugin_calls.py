"""Calls from a test's body to plugins that run on the host only: no-ops in a rank, or refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pytest_nsa.settings import named_plugins


def disable_host_calls(config: pytest.Config) -> None:
    """Make pytest-dependency's ``depends()`` fail and drop allure's steps and attachments. Once per process, before a test."""
    _, in_ranks = named_plugins(config)
    dependency, allure = sys.modules.get("pytest_dependency"), sys.modules.get("allure_commons")
    if dependency is not None and not in_ranks & {"dependency", "pytest_dependency"}:
        dependency.DependencyManager.checkDepend = _refuse_dependency
    if allure is not None and "allure_pytest" not in in_ranks:
        # A body's calls reach these through allure's own plugin manager, and would write into the host's folder of results.
        for name, plugin in allure.plugin_manager.list_name_plugin():
            if type(plugin).__name__ in ("AllureListener", "AllureFileLogger"):
                allure.plugin_manager.unregister(name=name)


def _refuse_dependency(*_: Any) -> None:
    """Replace the check, which would skip the test: no rank has the results of other tests."""
    pytest.fail(
        "pytest_dependency.depends(): a rank does not know the outcomes of other tests, so it would skip this one: use the mark "
        "dependency(depends=[...]), which the host checks",
        pytrace=False,
    )


def unwritten_inline_snapshots() -> str:
    """Return, after a test's body, the error for snapshot() calls without the right value; '' without any.

    inline-snapshot writes values into the source at the end of the host's session, which does not know a rank's values. Its own
    message promises that they are written, so its counts are reset.
    """
    module = sys.modules.get("inline_snapshot._global_state")
    if module is None:
        return ""
    state = module.state()
    is_unwritten = state.missing_values or state.incorrect_values
    state.missing_values = state.incorrect_values = 0
    return (
        "inline-snapshot: a snapshot() has no value, or not the one of this rank, and ranks write none: write it by hand, or "
        "create it in a test without ranks"
        if is_unwritten
        else ""
    )
