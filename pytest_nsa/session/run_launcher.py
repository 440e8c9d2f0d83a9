"""The launcher of a run: planned once, started when ranks are needed, replaced when it has failed."""

from __future__ import annotations

import pytest

from pytest_nsa.session import choose_launcher
from pytest_nsa.session.choose_launcher import LaunchPlan
from pytest_nsa.session.folders import RunFolder
from pytest_nsa.settings import Settings
from pytest_nsa.wire.protocols import Launcher, LaunchError, UnfitError


class RunLauncher:
    """The launcher of this process's tests."""

    def __init__(self, config: pytest.Config, settings: Settings, run: RunFolder) -> None:
        self.config, self.settings, self.run = config, settings, run
        self._launcher: Launcher | None = None
        self._plan: LaunchPlan | None = None
        self._cold: Launcher | None = None  # for tests that need new interpreters, where other tests do not
        self._unreachable = ""  # why the zygote of all workers cannot be reached

    @property
    def plan(self) -> LaunchPlan:
        """Where ranks come from; decided once, when collection has ended."""
        if self._plan is None:
            self._plan = choose_launcher.plan(self.config, self.settings)
        return self._plan

    def start(self, session: pytest.Session, *, between_tests: bool = False) -> Launcher:
        """Start the launcher, unless it runs, and return it. Raises LaunchError where it cannot be reached.

        This process may be forked only before the first test: inside a test, its state is no clean start for a rank.
        """
        if self._launcher is None:
            if self.plan.kind == "fork" and (not between_tests or choose_launcher.why_not_fork(self.config)):
                self._plan = LaunchPlan(kind="clean", description="forked from a clean child pytest")
            log = self.run.room / "zygote.log"
            if self._unreachable:  # no test waits for it again
                raise LaunchError(self._unreachable)
            try:
                self._launcher = choose_launcher.start(self.plan.kind, self.config, session, log)
            except LaunchError as error:
                self._unreachable = str(error)
                raise
        return self._launcher

    def ready(self, session: pytest.Session) -> Launcher:
        """Return the launcher once ranks can be started; that of cold ranks if collection leaves no process that may be forked."""
        if self._launcher is not None and self._launcher.has_ended:
            self.close()
            self.run.report("the process that starts the ranks was ended between two tests: another one serves since")
        launcher = self.start(session)
        try:
            launcher.wait_until_ready()
        except UnfitError as error:
            self.close()  # what has been leased for this test stays leased
            self._plan = LaunchPlan(kind="cold", description=f"cold: a new interpreter per rank ({error})")
            self.run.report(f"slow: every rank is a new interpreter, because {error}")
            launcher = self.start(session)
        return launcher

    def cold(self, session: pytest.Session) -> Launcher:
        """Return the launcher of new interpreters, and kill the ranks that stayed for another test."""
        self.kill_ranks()
        if self._cold is None:
            self._cold = choose_launcher.start("cold", self.config, session, self.run.room / "zygote.log")
        return self._cold

    def kill_ranks(self) -> None:
        """Kill the ranks that stayed for another test, if any."""
        if self._launcher is not None:
            self._launcher.kill()

    def close(self) -> None:
        """End the launcher and everything it started."""
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None
        if self._cold is not None:
            self._cold.close()
            self._cold = None
