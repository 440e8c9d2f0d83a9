"""What pytest sessions of one launch write: each its log, as it happens, for the clock (`clock`), and all one JUnit file."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.observe import host_log
from pytest_nsa.report.runs import LOCK, hold, is_in_use
from pytest_nsa.settings import OuterLauncher
from pytest_nsa.system.clock import wall_clock
from pytest_nsa.system.disk_space import private_folder
from pytest_nsa.system.procfs import began, is_alive
from pytest_nsa.wire.files import write_atomically

LOG = "session.jsonl"
_PREFIX = "launch-"


def launch_key(outer: OuterLauncher) -> str:
    """Return a key that is equal in the processes of one launch on this machine, and differs in any other launch."""
    parent = os.getppid()
    text = f"{parent} {began(parent)} {outer.address}:{outer.port} {outer.world_size} {outer.attempt}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class SessionLog:
    """``FOLDER/rankR/session.jsonl``: one line per event: which test runs, its time limit, each report.

    Nothing is kept where no folder can be made for it: ``run`` stays None.
    """

    def __init__(self, config: pytest.Config, outer: OuterLauncher) -> None:
        self.config, self.launch = config, launch_key(outer)
        self.run: Path | None = None
        try:
            self._open(private_folder(), outer.rank)
        except OSError as error:
            self.run = None
            reason = f"no evidence of tests that run in this process, and no clock for them: {error}"
            config.issue_config_time_warning(pytest.PytestWarning(reason), stacklevel=2)

    def _open(self, root: Path, rank: int) -> None:
        sweep(*root.glob(f"{_PREFIX}*"))
        self.run = root / f"{_PREFIX}{self.launch}"
        self.folder = self.run / f"rank{rank}"
        shutil.rmtree(self.folder, ignore_errors=True)  # of a process with this number before this one
        self.folder.mkdir(mode=0o700, parents=True)
        self._lock = hold(self.run)
        self.note("session", pid=os.getpid(), began=began(os.getpid()))

    def note(self, event: str, **facts: Any) -> None:
        """Append a line."""
        if self.run is not None:
            host_log.note(self.folder / LOG, event, **facts)

    def report(self, report: Any) -> None:
        """Append a report of a test."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        if data is not None:
            self.note("report", text=str(report.longreprtext), report=data)

    def close(self) -> None:
        """Close the log. The last process of the launch deletes the folder."""
        if self.run is not None:
            os.close(self._lock)
            sweep(self.run)


@dataclass
class LoggedSession:
    """What the log of a rank's session has so far."""

    folder: Path
    pid: int = 0
    process_began: int = 0
    nodeid: str = ""  # of the test that runs
    began: float = 0.0
    limit: float = 0.0  # seconds since `began`; 0: none
    is_finished: bool = False
    run: str = ""  # the folder of the run's evidence, where there is one already
    not_ours: tuple[str, ...] = ()  # tests that the leader reports
    reports: list[dict[str, Any]] = field(default_factory=list)
    _at: int = 0

    @property
    def rank(self) -> int:
        """The rank of the process."""
        return int(self.folder.name.removeprefix("rank"))

    @property
    def is_alive(self) -> bool:
        """Whether its process lives: the kernel reuses pids."""
        return is_alive(self.pid, self.process_began)

    def read(self) -> None:
        """Read what has been added."""
        try:
            with (self.folder / LOG).open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        match line["event"]:
            case "session":
                self.pid, self.process_began = line["pid"], line["began"]
            case "begin":
                self.nodeid, self.began, self.limit = line["nodeid"], line["time"], 0.0
            case "limit" if self.nodeid:
                self.began, self.limit = line["time"], line["seconds"]
            case "end":
                self.nodeid, self.limit = "", 0.0
            case "report":
                self.reports.append(line)
            case "run":
                self.run = line["path"]
            case "not_ours":
                self.not_ours = tuple(line["nodeids"])
            case "finish":
                self.is_finished = True

    def left(self) -> float:
        """Seconds until the limit of the test that runs; infinite without one."""
        return self.began + self.limit - wall_clock() if self.nodeid and self.limit else float("inf")


def sweep(*runs: Path) -> None:
    """Delete the folders of launches that have no live process."""
    for run in runs:
        if (run / LOCK).exists() and not is_in_use(run):
            shutil.rmtree(run, ignore_errors=True)


_LAUNCH, _RANK = "nsa.launch", "nsa.rank"  # properties of a testsuite


def merge_junit(target: Path, own: Path, launch: str, rank: int) -> None:
    """Put the testsuite of ``own`` into ``target``, next to those of other ranks of the same launch.

    A file of another launch is replaced. ``own`` is removed. Raises OSError; ``ET.ParseError`` if ``own`` is no XML.
    """
    tree = ET.parse(own)
    suites = [*tree.getroot().iter("testsuite")]
    for suite in suites:
        _mark(suite, launch, rank)
    with _locked(target):
        others = (suite for suite in _read_suites(target) if _property(suite, _LAUNCH) == launch)
        suites += [suite for suite in others if _property(suite, _RANK) != str(rank)]
        suites.sort(key=lambda suite: int(_property(suite, _RANK) or 0))
        root = ET.Element("testsuites", tree.getroot().attrib)
        root.extend(suites)
        write_atomically(target, ET.tostring(root, encoding="utf-8", xml_declaration=True), follow=True)
    own.unlink()


def _mark(suite: ET.Element, launch: str, rank: int) -> None:
    properties = suite.find("properties")
    if properties is None:
        properties = ET.Element("properties")
        suite.insert(0, properties)
    for name, value in ((_LAUNCH, launch), (_RANK, str(rank))):
        ET.SubElement(properties, "property", name=name, value=value)
    if rank:
        suite.set("name", f"{suite.get('name', 'pytest')} rank {rank}")


def _property(suite: ET.Element, name: str) -> str:
    found = suite.find(f"properties/property[@name='{name}']")
    return found.get("value", "") if found is not None else ""


def _read_suites(target: Path) -> list[ET.Element]:
    try:
        return [*ET.parse(target).getroot().iter("testsuite")]
    except (OSError, ET.ParseError):  # none yet, or a file that is about to be replaced
        return []


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold a lock on the folder of ``target``, which the kernel frees when its holder ends."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(target.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
