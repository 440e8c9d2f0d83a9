"""What a test's body calls of plugins that run on the host only: without effect in a rank, or refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pytest_nsa.settings import named_plugins


def cut_off(config: pytest.Config) -> None:
    """Once per process, before a test: pytest-dependency's ``depends()`` fails, allure's steps and attachments are not kept."""
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
    """In the place of a check that skips the test, as no rank has results of other tests."""
    pytest.fail(
        "pytest_dependency.depends(): a rank does not know the outcomes of other tests, so it would skip this one: use the mark "
        "dependency(depends=[...]), which the host checks",
        pytrace=False,
    )
