"""The hooks of a run under torchrun or SLURM: rank 0's process reports; the others run their ranks and keep silent."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from pytest_nsa import marks
from pytest_nsa.session.items import Ranked, runner_key
from pytest_nsa.session.needs import needs_of
from pytest_nsa.settings import settings_key
from pytest_nsa.system.room import private_folder


def become_follower(config: pytest.Config, artifacts: Path) -> Path:
    """Nothing of this process's is kept. Returns the folder for its evidence, which the leader is sent."""
    try:
        artifacts.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".follower-", dir=artifacts))
    except OSError:  # the leader reports it
        folder = Path(tempfile.mkdtemp(prefix=".follower-", dir=private_folder()))

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty where the leader shares it
            artifacts.rmdir()

    config.add_cleanup(remove)
    return folder


class AttachedHooks:
    """Registered only under an outer launcher."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """A follower's terminal goes nowhere."""
        config = session.config
        reporter = config.pluginmanager.getplugin("terminalreporter")
        outer = config.stash[settings_key].outer
        if outer is not None and outer.rank > 0 and reporter is not None:
            silence = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            config.add_cleanup(silence.close)
            reporter._tw._file = silence

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Exit after all reports: torchrun ends all processes once one has failed."""
        attachment = config.stash[runner_key].attachment
        if attachment is not None:
            attachment.close()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Tests that run on no ranks are the leader's alone."""
        runner = item.config.stash[runner_key]
        leads = runner.attachment is None or runner.attachment.leads
        return None if leads or isinstance(item, Ranked) else True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test for another number of ranks than the launcher has started."""
        settings = item.config.stash[settings_key]
        if settings.outer is None or not marks.is_ranked(item):
            return
        wanted = needs_of(item, settings).world_size
        if wanted != settings.outer.world_size:
            pytest.skip(f"needs {wanted} ranks, and the launcher has started {settings.outer.world_size}")
