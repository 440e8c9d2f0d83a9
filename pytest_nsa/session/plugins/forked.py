"""Keep pytest-forked from tests on ranks: their ranks are processes already, and the launcher belongs to this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nsa.rank.host_plugins import remove_hook

_NAME = "pytest_forked"
Protocol = Callable[..., object]


class BoxedTests:
    """Replaces pytest-forked's protocol: it forks this process only for tests that need no ranks."""

    def __init__(self, protocol: Protocol, needs_ranks: Callable[[pytest.Item], bool]) -> None:
        self._protocol, self._needs_ranks = protocol, needs_ranks

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        """Leave tests on ranks to the other plugins' protocol."""
        return None if self._needs_ranks(item) else self._protocol(item=item, nextitem=nextitem)


def keep_from_forking(config: pytest.Config, needs_ranks: Callable[[pytest.Item], bool]) -> None:
    """Replace pytest-forked's protocol, where it is loaded."""
    plugin = config.pluginmanager.getplugin(_NAME)
    if plugin is not None:
        remove_hook(config, "pytest_runtest_protocol", plugin)
        config.pluginmanager.register(BoxedTests(plugin.pytest_runtest_protocol, needs_ranks), "nsa-boxed")
