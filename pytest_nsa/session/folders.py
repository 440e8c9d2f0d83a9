"""Folders: one per run, in it one per test, in that one per rank. Names from test ids are sanitised; nothing foreign is deleted.

Where the artifacts folder cannot be written to (read-only, full, over a quota, not a folder), a run uses a temporary one. Where its
disk becomes full later, folders of further tests are in a temporary one; the run's lists and reports are written if they fit.
"""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_nsa.diagnosis.verdict import RULE_FAILED, Verdict
from pytest_nsa.report.run import write_verdict
from pytest_nsa.report.runs import ANNOUNCEMENTS, hold
from pytest_nsa.report.summary import VERDICTS
from pytest_nsa.report.terminal import short_path
from pytest_nsa.system.clock import wall_clock
from pytest_nsa.system.disk_space import (
    check_room,
    check_space,
    ignore_full_disk,
    largest_file,
    make_folder,
    private_folder,
    private_path,
    reserve,
)
from pytest_nsa.wire import masking
from pytest_nsa.wire.files import append, append_line, read_lines, write_atomically

MAX_NAME = 100


def safe_name(nodeid: str) -> str:
    """Return a folder name from a test id: letters, digits, '_', '-', '.'; a hash distinguishes ids that would collide."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", nodeid).strip("-.") or "test"
    if plain == nodeid and len(plain) <= MAX_NAME:
        return plain
    digest = hashlib.sha256(nodeid.encode()).hexdigest()[:8]
    return f"{plain[-MAX_NAME:].strip('-.')}-{digest}"


NOTICES = "notices.jsonl"
BOARD = 216 << 10  # bytes; a rank's board, and some more (tests_cpu/plugin/test_artifacts.py compares them)
LINES = 16 << 10  # of a rank's events, and of the host's: what a verdict cannot do without
SMALLEST_LIMIT = 48 << 10  # of `ulimit -f`: below it no evidence fits,
SMALL_LIMIT = 1 << 20  # and below this not all


class RunFolder:
    """``ROOT/run_TIME``, made when first needed, for this user alone; ``ROOT/latest`` points to the newest.

    ``prefix``: ``test_engineer`` in place of ``run`` where the repository has a diagnostic plan, which has fixed this name.
    """

    def __init__(self, root: Path, name: str | None = None) -> None:
        self.root = root
        self.name = name
        self.prefix = "run"
        self._path: Path | None = None
        self._spare: Path | None = None  # for the folders of tests, once the disk is full
        self._reported: list[str] = []
        self._taken: dict[str, int] = {}
        self._lock = -1  # held as long as this process writes

    @property
    def is_made(self) -> bool:
        """Whether anything has been written."""
        return self._path is not None

    @property
    def path(self) -> Path:
        """The folder; made on first use. Raises UsageError where no file that a verdict needs may be written."""
        if self._path is None:
            limit = largest_file()
            if limit < SMALLEST_LIMIT:
                raise pytest.UsageError(
                    f"ulimit -f limits files to {limit >> 10} KiB, and a rank's evidence needs {SMALLEST_LIMIT >> 10}: raise it"
                )
            try:
                self._open(self.root)
            except OSError as error:
                self._open(private_folder() / "artifacts")
                self.report(f"{short_path(self.root)}: {error.strerror}: evidence goes to {self._path}")
            if limit < SMALL_LIMIT:
                self.report(f"ulimit -f limits files to {limit >> 10} KiB: what ranks write beyond that is dropped")
        assert self._path is not None
        return self._path

    def _open(self, root: Path) -> None:
        path = self._make(root)
        try:
            check_room(path)
        except OSError:
            with contextlib.suppress(OSError):  # not the run's folder, in which a report would look for verdicts
                path.rmdir()
            raise
        self._use(path)
        self._point_latest(root, path)

    def _use(self, path: Path) -> None:
        self._path = path
        with contextlib.suppress(OSError):  # a file system without locks
            self._lock = hold(path)

    @property
    def room(self) -> Path:
        """The folder that has room for the folders of tests: the run's, or once its disk is full a temporary one."""
        return self._spare or self.path

    def spare(self, error: OSError) -> None:
        """Let `room` be a temporary folder from now on. Raises ``error`` if it is one already."""
        root = private_folder() / "artifacts"
        if self._spare is not None or self.path.parent == root:
            raise error
        make_folder(root)
        self._spare, self._taken = root / self.path.name, {}
        self._spare.mkdir(mode=0o700, exist_ok=True)
        self.report(f"{short_path(self.path)}: {error.strerror}: evidence of further tests goes to {self._spare}")

    def find(self) -> None:
        """Use the folder that a worker has made, if one has."""
        made = next((path for path in self.places("") if path.is_dir()), None) if self.name else None
        if self._path is None and made is not None:
            self._use(made)

    def places(self, file: str) -> list[Path]:
        """Return the paths at which a worker may have written a file of the run."""
        name, roots = self.name or "", [self.root]
        with contextlib.suppress(OSError):  # no place at all
            roots.append(private_path() / "artifacts")
        return [root / name / file for root in roots]

    def _make(self, root: Path) -> Path:
        make_folder(root)
        if not any(root.iterdir()):
            write_atomically(root / ".gitignore", "*\n", follow=True)
        path = self._make_run(root)
        if not os.path.lexists(root / ".gitignore"):  # a folder with files of the user's, which git is to see
            write_atomically(path / ".gitignore", "*\n")
        return path

    def _make_run(self, root: Path) -> Path:
        if self.name:  # xdist workers write into the run that the controller named
            path = root / self.name
            path.mkdir(mode=0o700, exist_ok=True)
            return path
        stamp = time.strftime(f"{self.prefix}_%Y%m%d_%H%M%S")
        for attempt in range(1000):
            path = root / (stamp if not attempt else f"{stamp}_{attempt}")
            try:
                path.mkdir(mode=0o700)
                return path
            except FileExistsError:
                continue
        raise OSError(f"no free name for a run in {root}")

    @staticmethod
    def _point_latest(root: Path, path: Path) -> None:
        link = root / "latest"
        if link.exists() and not link.is_symlink():
            return  # a folder that is not ours
        partial = root / f".latest.{os.urandom(8).hex()}"
        partial.symlink_to(path.name)
        try:
            partial.replace(link)
        except OSError:  # of another user, in a folder like /tmp
            partial.unlink()
            raise

    def test_folder(self, name: str, ranks: Sequence[int] = ()) -> Path:
        """Return a new folder for a test; a second one of the same name gets a number.

        What a verdict cannot do without has its space from now on, for ``ranks``, whatever else fills the disk.
        """
        try:
            return self._new_folder(name, ranks)
        except OSError as error:
            self.spare(error)
            return self._new_folder(name, ranks)

    def _new_folder(self, name: str, ranks: Sequence[int]) -> Path:
        while True:
            count = self._taken.get(name, 0)
            self._taken[name] = count + 1
            room = self.room
            path = room / (name if not count else f"{name}-{count + 1}")
            check_space(room)
            try:
                path.mkdir(parents=path.parent != room)
            except FileExistsError:
                continue
            if ranks:
                reserve(path / "host.jsonl", LINES, keep_size=True)
            for rank in ranks:
                (path / f"rank{rank}").mkdir()
                reserve(path / f"rank{rank}" / "board.bin", BOARD)
                reserve(path / f"rank{rank}" / "events.jsonl", LINES, keep_size=True)
            return path

    def note(self, text: str) -> None:
        """Append a line with the time to the run's ``test_execution.log``."""
        with ignore_full_disk():
            line = f"{time.strftime('%H:%M:%S')} {masking.text(text)}\n"
            append(self.path / "test_execution.log", line.encode(errors="backslashreplace"))

    def report(self, text: str) -> None:
        """Report something that concerns the whole run. The closing lines show it once, whichever workers report it."""
        self.note(text)
        self._reported.append(text)
        with ignore_full_disk():
            append_line(self.path / NOTICES, {"text": text})

    def announce(self, text: str) -> None:
        """Announce something that is to be read while the test runs."""
        self.note(text)
        with ignore_full_disk():
            append_line(self.path / ANNOUNCEMENTS, {"time": wall_clock(), "text": text})

    def notices(self) -> list[str]:
        """Return what was passed to `report`, by any worker if it could be written."""
        return list(dict.fromkeys((*(entry["text"] for entry in read_lines(self.path / NOTICES)), *self._reported)))


# Defaults of a verdict's fields: of a test that passes, the run's list has only fields that differ from them.
_DEFAULTS = {
    name: value
    for name, value in Verdict(nodeid="", outcome="PASS").to_json().items()
    if name not in ("schema", "outcome")
}


class Recorder:
    """Writes verdicts into the run's folder: its list, in which a test's last line counts, and its log."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def add(self, folder: Path, verdict: Verdict) -> None:
        """Record a verdict; report rules that failed to the run."""
        self._list(folder, verdict)
        for fact in verdict.evidence:
            if fact.kind == RULE_FAILED:
                self.run.report(f"{fact.text} ({folder.name}); the verdict is by the other rules")
        where = f" {verdict.cause} on {verdict.culprits()} at {verdict.where or '?'}" if verdict.failed else ""
        self.run.note(f"{verdict.outcome} {verdict.scenario or verdict.nodeid} {verdict.duration_s:.2f} s{where}")

    def expect_failure(self, folder: Path, verdict: Verdict) -> None:
        """Mark a failure as foreseen by xfail, in the test's folder and in the run's list."""
        self.replace(folder, replace(verdict, expected=True))

    def replace(self, folder: Path, verdict: Verdict) -> None:
        """Record another verdict on a test that has one."""
        with ignore_full_disk():
            folder.mkdir(exist_ok=True)  # that of a test which passed may be gone
            write_verdict(folder, verdict)
        self._list(folder, verdict)

    def _list(self, folder: Path, verdict: Verdict) -> None:
        fields = verdict.to_json()
        if not verdict.failed:  # most tests pass, and such lines are most of what a run leaves
            fields = {
                name: value for name, value in fields.items() if name not in _DEFAULTS or value != _DEFAULTS[name]
            }
        line = {"folder": folder.name, **fields}
        with ignore_full_disk():  # the terminal has the verdict
            append_line(self.run.path / VERDICTS, line)
