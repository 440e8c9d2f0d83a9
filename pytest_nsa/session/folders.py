"""Folders: one per run, in it one per test, in that one per rank. Names from test ids are sanitised; nothing foreign is deleted."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from pathlib import Path

from pytest_nsa.report.runs import hold
from pytest_nsa.wire.files import append_line, read_lines

MAX_NAME = 100


def safe_name(nodeid: str) -> str:
    """Return a folder name from a test id: letters, digits, '_', '-', '.'; a hash keeps ids apart that would collide."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", nodeid).strip("-.") or "test"
    if plain == nodeid and len(plain) <= MAX_NAME:
        return plain
    digest = hashlib.sha256(nodeid.encode()).hexdigest()[:8]
    return f"{plain[-MAX_NAME:].strip('-.')}-{digest}"


ANNOUNCEMENTS = "announcements.jsonl"


class RunFolder:
    """``ROOT/test_engineer_TIME``, made when first needed; ``ROOT/latest`` points to the newest."""

    def __init__(self, root: Path, name: str | None = None) -> None:
        self.root = root
        self.name = name
        self._path: Path | None = None
        self._taken: dict[str, int] = {}
        self._lock = -1  # held as long as this process writes

    @property
    def is_made(self) -> bool:
        """Whether anything has been written."""
        return self._path is not None

    @property
    def path(self) -> Path:
        """The folder; made on first use."""
        if self._path is None:
            self._path = self._make()
            with contextlib.suppress(OSError):  # a file system without locks
                self._lock = hold(self._path)
            self._point_latest(self._path)
        return self._path

    def _make(self) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        ignore = self.root / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        if self.name:  # xdist workers write into the run that the controller named
            path = self.root / self.name
            path.mkdir(exist_ok=True)
            return path
        stamp = time.strftime("test_engineer_%Y%m%d_%H%M%S")
        for attempt in range(1000):
            path = self.root / (stamp if not attempt else f"{stamp}_{attempt}")
            try:
                path.mkdir()
                return path
            except FileExistsError:
                continue
        raise OSError(f"no free name for a run in {self.root}")

    def _point_latest(self, path: Path) -> None:
        link = self.root / "latest"
        if link.exists() and not link.is_symlink():
            return  # a folder that is not ours
        partial = self.root / f".latest.{os.getpid()}"
        partial.unlink(missing_ok=True)
        partial.symlink_to(path.name)
        partial.replace(link)

    def test_folder(self, name: str) -> Path:
        """Return a new folder for a test; a second one of the same name gets a number."""
        while True:
            count = self._taken.get(name, 0)
            self._taken[name] = count + 1
            path = self.path / (name if not count else f"{name}-{count + 1}")
            try:
                path.mkdir()
                return path
            except FileExistsError:
                continue

    def note(self, text: str) -> None:
        """A line with the time in the run's ``test_execution.log``."""
        with (self.path / "test_execution.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def tell(self, text: str) -> None:
        """Report something that concerns the whole run: in its closing lines, once, whichever worker reports it."""
        self.note(text)
        append_line(self.path / "notices.jsonl", {"text": text})

    def announce(self, text: str) -> None:
        """Something to be read while the test runs."""
        self.note(text)
        append_line(self.path / ANNOUNCEMENTS, {"time": time.time(), "text": text})

    def notices(self) -> list[str]:
        """Return what `tell` reported, by any worker."""
        return list(dict.fromkeys(entry["text"] for entry in read_lines(self.path / "notices.jsonl")))


def discard(folder: Path) -> None:
    """Delete a test's folder that this run made."""
    shutil.rmtree(folder, ignore_errors=True)
