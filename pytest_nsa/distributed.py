"""Under xdist: the controller names one run folder, all workers write into it, the controller writes the reports."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from pytest_nsa.items import runner_key


class XdistHooks:
    """Registered only where xdist is: its hooks are unknown elsewhere."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a new worker the run's name and this run's arguments."""
        runner = node.config.stash[runner_key]
        name = runner.folder.name or time.strftime(f"test_engineer_%Y%m%d_%H%M%S_{os.getpid()}")
        runner.folder.name = name
        node.workerinput["nsa_run"] = name
        node.workerinput["nsa_arguments"] = [str(a) for a in node.config.invocation_params.args]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker that wrote into the run has made it: the reports are due."""
        folder = node.config.stash[runner_key].folder
        if folder.name and (folder.root / folder.name).is_dir():
            _ = folder.path
