"""The runs in an artifacts folder: which are finished, and which of them are kept.

A run is a folder with an env.json; it is finished if it has a run.json, and in use while a process of it holds its lock. Nothing
else in the folder is ever deleted, nothing that another user has made, and nothing that is mounted there; no link is followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_nsa.evidence.shapes import Check, has, is_count, is_flag, is_map, is_number, is_schema, is_text
from pytest_nsa.report.summary import VERDICTS
from pytest_nsa.system.disk_space import find_owner
from pytest_nsa.system.folder_removal import has_mounts, remove_tree
from pytest_nsa.wire.files import read_lines, read_object, write_json
from pytest_nsa.wire.messages import SCHEMA

FINISHED = "run.json"
LOCK = ".in_use"
ANNOUNCEMENTS = "announcements.jsonl"
KEPT, KEPT_FAILED = 20, 5
DAY_S = 86400.0  # the most that clocks may differ by
_RUNS = ("run_*", "test_engineer_*")  # the latter where there is a diagnostic plan
# The fields of env.json and run.json that every run has, and by which a run is recognised.
_ENV: dict[str, Check] = {"schema": is_schema, "python": is_text, "system": is_text, "variables": is_map}
_END: dict[str, Check] = {"schema": is_schema, "time": is_number, "failed": is_count, "interrupted": is_flag}


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder; ``failed`` is how many of its tests failed, ``owner`` is the user id of its owner."""

    path: Path
    time: float
    finished: bool
    failed: int
    owner: int


def is_in_use(run: Path) -> bool:
    """Return whether a process of a run still lives."""
    try:
        fd = os.open(run / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def hold(run: Path) -> int:
    """Mark a run as in use until this process ends; return the descriptor that holds the lock."""
    fd = os.open(run / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def finish(run: Path, failed: int, *, interrupted: bool) -> None:
    """Write run.json, after all other files."""
    facts = {"schema": SCHEMA, "time": time.time(), "failed": failed, "interrupted": interrupted}
    write_json(run / FINISHED, facts)


def list_runs(root: Path, unread: list[str] | None = None) -> list[Run]:
    """Return the runs in an artifacts folder, the newest first; other folders are skipped.

    A run that cannot be read is skipped, too, and a sentence on it is added to ``unread``.
    """
    found = []
    for path in (path for name in _RUNS for path in root.glob(name)):
        try:
            run = None if path.is_symlink() or not path.is_dir() else _read(path)
        except (OSError, ValueError) as error:
            if unread is not None:
                unread.append(f"{path.name}: {error}")
            continue
        if run is not None:
            found.append(run)
    return sorted(found, key=lambda run: (run.time, run.path.name), reverse=True)


def _read(path: Path) -> Run | None:
    """Return a run; None if a folder is no run. Raises ValueError that describes what is wrong in its files."""
    status = path.lstat()
    env = read_object(path / "env.json")
    if "schema" not in env:
        return None
    if not has(env, _ENV):
        raise ValueError("its env.json is not as this version writes it")
    if not os.path.lexists(path / FINISHED):
        return Run(path, status.st_mtime, finished=False, failed=0, owner=status.st_uid)
    end = read_object(path / FINISHED)
    if not has(end, _END) or not 0 <= end["time"] <= time.time() + DAY_S:
        raise ValueError(f"its {FINISHED} is not as this version writes it")
    return Run(path, end["time"], finished=True, failed=end["failed"], owner=status.st_uid)


def in_short(unread: list[str]) -> str:
    """Return on one line what `list_runs` could not read."""
    return unread[0] + (f", and {len(unread) - 1} more" if len(unread) > 1 else "")


def surplus(runs: list[Run], keep: int, keep_failed: int = KEPT_FAILED) -> list[Run]:
    """Return the user's finished runs beyond the ``keep`` newest, and beyond the ``keep_failed`` newest of those that failed."""
    finished, ours = [run for run in runs if run.finished], {os.getuid()}
    if not ours.issuperset(run.owner for run in finished):
        ours.add(find_owner(finished[0].path.parent))
    finished = [run for run in finished if run.owner in ours]
    kept = {run.path for run in finished[:keep]} | {run.path for run in [r for r in finished if r.failed][:keep_failed]}
    return [run for run in finished if run.path not in kept]


def delete(runs: list[Run]) -> Iterator[Path]:
    """Delete runs that are not in use, and in which nothing is mounted; yield those that were deleted.

    A run is first renamed, so that no reader finds half of one; renamed runs that an earlier process left are deleted, too.
    """
    for run in runs:
        if is_in_use(run.path) or has_mounts(run.path):
            continue
        doomed = run.path.with_name(f".{run.path.name}.{os.urandom(8).hex()}.deleted")
        with contextlib.suppress(OSError):
            run.path.rename(doomed)
            yield run.path
    roots = {run.path.parent for run in runs}
    for doomed in (path for root in roots for name in _RUNS for path in root.glob(f".{name}.deleted")):
        with contextlib.suppress(OSError):
            if doomed.lstat().st_uid in {run.owner for run in runs}:
                remove_tree(doomed)


def cut_off(runs: list[Run]) -> list[Path]:
    """Return runs that have verdicts and did not finish, and in which no process writes."""
    return [
        run.path for run in runs
        if not run.finished and not is_in_use(run.path) and any(read_lines(run.path / VERDICTS))
        and not (run.path / "SUMMARY.md").exists()
    ]  # fmt: skip
