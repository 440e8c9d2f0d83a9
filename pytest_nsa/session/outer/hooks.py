"""The session and hooks of a run under torchrun or SLURM, where each pytest process hosts one rank, or is one.

Tests without our ranks run in every process, as without the plugin. Rank 0's process (the leader) reports tests on ranks; the
others (followers) receive its verdict. A failure of another test in a follower is printed at once.
"""

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from _pytest.junitxml import xml_key

from pytest_nsa import marked
from pytest_nsa.rank.host_plugins import remove_hooks
from pytest_nsa.rank.outer_rank import LaunchedRank
from pytest_nsa.report.plain import visible
from pytest_nsa.session.items import Ranked
from pytest_nsa.session.needs import read_needs
from pytest_nsa.session.outer.attachment import Attachment
from pytest_nsa.session.outer.clock import Clock
from pytest_nsa.session.outer.session_log import SessionLog, merge_junit
from pytest_nsa.session.ranked_session import RankedSession, needs_ranks, only_lists
from pytest_nsa.settings import OuterLauncher, Settings
from pytest_nsa.system.disk_space import private_folder


def follower_folder(config: pytest.Config, artifacts: Path) -> Path:
    """Make the folder for a follower's evidence, which is sent to the leader; delete it at the session's end."""
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


class Screen:
    """The terminal of a process that may become a follower: output is held until that is known."""

    def __init__(self, config: pytest.Config) -> None:
        self._writer = getattr(config.pluginmanager.getplugin("terminalreporter"), "_tw", None)
        self._file = getattr(self._writer, "_file", None)
        self._kept = io.StringIO()

    @property
    def descriptor(self) -> int:
        """The file descriptor that the terminal writes to."""
        try:
            return self._file.fileno() if self._file is not None else 2
        except (OSError, ValueError):  # no file of the system
            return 2

    def keep_back(self) -> None:
        """Hold output from now on."""
        if self._writer is not None:
            self._writer._file = self._kept

    def release(self) -> None:
        """Print the held output, and print as usual from now on."""
        if self._writer is not None and self._writer._file is self._kept:
            self._writer._file = self._file
            self._write(self._kept.getvalue())

    def drop(self) -> None:
        """Discard the held and all further output: the leader reports the same."""
        if self._writer is not None:
            self._writer._file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the session

    def show(self, rank: int, text: str) -> None:
        """Print lines with the rank's number in front, even if output is dropped."""
        self._write("".join(f"[rank {rank}] {visible(line)}\n" for line in text.splitlines()))

    def _write(self, text: str) -> None:
        if self._file is not None:
            self._file.write(text)
            self._file.flush()


class LaunchedSession(RankedSession):
    """The session of a process of torchrun's or SLURM's, and the plugin with the hooks that only such a process needs."""

    def __init__(self, config: pytest.Config, settings: Settings, *, is_late: bool) -> None:
        assert settings.outer is not None
        self.outer: OuterLauncher = settings.outer
        self._clock: Clock | None = None
        self.follows = False
        self._reported_by_leader: set[str] = set()  # ids of tests that the leader reports
        self._failed = False
        super().__init__(config, settings)
        if is_late:
            self.pytest_sessionstart()

    def make_group(self) -> Attachment:
        """Return the part of this process among the others of the launcher."""
        self.attachment = Attachment(self.outer)
        return self.attachment

    def register(self) -> None:
        """Register the hooks of this mode."""
        self.register_hang_lines()
        self.screen = Screen(self.config)
        self.log = SessionLog(self.config, self.outer)
        rank, size = self.outer.rank, self.outer.world_size
        self.rank = LaunchedRank(self.log.run, rank, size) if self.log.run is not None else None
        self.config.pluginmanager.register(self, "nsa-outer")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Where tests on ranks are collected, one process shows the session's head."""
        self.screen = Screen(self.config)
        if self.outer.rank > 0:
            self.screen.keep_back()
        xml = self.config.stash.get(xml_key, None)
        if xml is not None and self.outer.world_size > 1:
            self._junit = Path(xml.logfile)
            xml.logfile = str(self._junit.with_name(f".{self._junit.name}.rank{self.outer.rank}.partial"))

    def finish_collection(self, session: pytest.Session) -> None:
        """Decide whether this process is a follower: only where a test runs on ranks."""
        super().finish_collection(session)
        self.follows = self.wants_ranks(session) and self.outer.rank > 0
        if self.follows:
            mine = (i for i in session.items if isinstance(i, Ranked) or marked.takes(i, "launch"))
            self._reported_by_leader = {item.nodeid for item in mine}  # rank 0's process alone reports them
            self._exclude_from_junit()
            remove_hooks(self.config, reports_only=True)  # other plugins write their reports in the leader
            self.runner.folder.root = follower_folder(self.config, self.runner.folder.root)
        if self.follows and not session.testsfailed:
            self.screen.drop()
        else:  # also where a module cannot be collected here
            self.screen.release()
        self.writes_reports = self.attachment.leads
        self.signals.defers = self.follows
        self.signals.take()

    def _exclude_from_junit(self) -> None:
        xml = self.config.stash.get(xml_key, None)
        if xml is None:
            return
        take = xml.pytest_runtest_logreport

        def take_own(report: pytest.TestReport) -> None:
            if report.nodeid not in self._reported_by_leader:
                take(report)

        self.config.pluginmanager.unregister(xml)
        xml.pytest_runtest_logreport = take_own  # type: ignore[method-assign]
        self.config.pluginmanager.register(xml)

    def start(self, session: pytest.Session) -> None:
        """Start the clock before this process has connections, then what tests on ranks need."""
        if self.outer.world_size > 1 and self.log.run is not None and not only_lists(self.config):
            self.log.note("not_ours", nodeids=sorted(self._reported_by_leader))
            path = self._junit if self.config.stash.get(xml_key, None) is not None else None
            self._clock = Clock(self.log, self.runner, self.outer.world_size, path, self.screen.descriptor)
            self._clock.start()
        super().start(session)
        if self.runner.folder.is_made and not self.follows:
            self.log.note("run", path=str(self.runner.folder.path))

    def start_ranks(self, session: pytest.Session) -> None:
        """Start the launcher, then meet the other processes, and agree on the tests."""
        super().start_ranks(session)
        self.attachment.meet([item.nodeid for item in session.items if needs_ranks(item)])

    def check_item(self, item: pytest.Item) -> None:
        """Skip a test that needs another number of ranks than the launcher has started."""
        if marked.is_ranked(item):
            wanted = read_needs(item, self.settings).world_size
            if wanted != self.outer.world_size:
                pytest.skip(f"needs {wanted} ranks, and the launcher has started {self.outer.world_size}")
        super().check_item(item)

    def begin_item(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Leave a test to the leader where it runs there alone."""
        super().begin_item(item, nextitem)
        is_left = self.follows and not isinstance(item, Ranked) and marked.takes(item, "launch")
        return True if is_left else None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note which test runs."""
        self.log.note("begin", nodeid=item.nodeid)
        try:
            return (yield)
        finally:
            self.log.note("end", nodeid=item.nodeid)

    def take_limit(self, item: pytest.Item, limit: Any) -> bool | None:
        """Note the time limit of a test, in seconds from now, for the clock."""
        if not isinstance(item, Ranked):
            self.log.note("limit", seconds=limit.timeout)
        return super().take_limit(item, limit)

    def complete_report(self, item: pytest.Item, call: pytest.CallInfo[None], report: Any) -> None:
        """Record what a test raised before its teardown can hang."""
        if not isinstance(item, Ranked) and self.rank is not None:
            self.rank.record(item.nodeid, call)
        super().complete_report(item, call, report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep each report, and print a failure of a follower, which prints nothing else."""
        self.log.report(report)
        if self.follows and report.failed and report.nodeid not in self._reported_by_leader:
            self._failed = True
            printed = [f"--- {title} ---\n{text}" for title, text in report.sections]
            self.screen.show(self.outer.rank, "\n".join([f"FAILED {report.nodeid}", report.longreprtext, *printed]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self) -> None:
        """Show the error."""
        self.screen.release()

    def _finish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the reports, and merge the JUnit file, which pytest has written, into that of the other processes."""
        super()._finish(session, exitstatus)
        self.screen.release()  # the session may have ended before any test
        if self.rank is not None:
            self.rank.end(passed=not exitstatus)
        xml = self.config.stash.get(xml_key, None)
        if xml is not None and self.outer.world_size > 1:
            merge_junit(self._junit, Path(xml.logfile), self.log.launch, self.outer.rank)
            xml.logfile = str(self._junit)
        if self.follows and self._failed:
            self.screen.show(self.outer.rank, f"{session.testsfailed} failed here, of {session.testscollected}")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Exit after all reports: torchrun ends all processes once one has failed."""
        self.screen.release()
        self.log.note("finish")
        if self._clock is not None:
            self._clock.close()
        self.log.close()
        self.attachment.close()
