"""What other plugins need: pytest-forked forks no test on ranks; xdist's controller names one run folder, and starts one zygote."""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.rank.host_plugins import remove_hook
from pytest_nsa.report.runs import ANNOUNCEMENTS
from pytest_nsa.session.interrupts import signals_key
from pytest_nsa.session.items import runner_key
from pytest_nsa.session.launcher import SharedZygote
from pytest_nsa.wire.files import read_lines

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


ANNOUNCE_S = 0.3


class XdistHooks:
    """Registered only where xdist is: its hooks are unknown elsewhere."""

    def __init__(self) -> None:
        self._zygote: SharedZygote | None = None
        self._announcer: threading.Thread | None = None
        self._done = threading.Event()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send a new worker the run's name and this run's arguments."""
        runner = node.config.stash[runner_key]
        name = runner.folder.name or time.strftime(f"{runner.folder.prefix}_%Y%m%d_%H%M%S_{os.getpid()}")
        runner.folder.name = name
        node.workerinput["nsa_run"] = name
        self._zygote = self._zygote or SharedZygote()
        if self._announcer is None:
            paths = runner.folder.places(ANNOUNCEMENTS)
            self._announcer = threading.Thread(
                target=self._announce, args=(paths,), name="nsa-announcements", daemon=True
            )
            self._announcer.start()
        node.workerinput["nsa_zygote"] = self._zygote.name
        node.workerinput["nsa_arguments"] = [str(a) for a in node.config.invocation_params.args]

    def _announce(self, paths: list[Path]) -> None:
        """Print what the workers announce, while they run: xdist itself calls no hook until a test has ended."""
        shown = dict.fromkeys(paths, 0)  # of each: the second if the first cannot be written to
        is_done = False
        while not is_done:
            is_done = self._done.wait(ANNOUNCE_S)  # after the last wait, the remaining announcements are printed too
            for path in paths:
                entries = list(read_lines(path))
                for entry in entries[shown[path] :]:
                    sys.stdout.write(f"\n{entry['text']}\n")
                    sys.stdout.flush()
                shown[path] = len(entries)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        """Start the zygote if a worker has requested one; a worker does so before it reports its collection."""
        if self._zygote is not None and self._zygote.is_wanted:
            node.config.stash[signals_key].take()
            self._zygote.start(node.config, node.config.stash[runner_key].folder.path / "zygote.log")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Print the last announcements and end the zygote: all workers have ended."""
        self._done.set()
        if self._announcer is not None:
            self._announcer.join()
        if self._zygote is not None:
            self._zygote.close()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Use the run's folder here too if a worker has made it, so that reports are written."""
        node.config.stash[runner_key].folder.find()
