"""The runs in an artifacts folder: which are finished, and which of them are kept.

A run is a folder with an env.json; it is finished if it has a run.json, and in use while a process of it holds its lock. Nothing
else in the folder is ever deleted; no link is followed.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_nsa.evidence.shapes import Check, has, is_count, is_flag, is_map, is_number, is_schema, is_text
from pytest_nsa.report.summary import VERDICTS
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
    """A run's folder; ``failed`` is how many of its tests failed."""

    path: Path
    time: float
    finished: bool
    failed: int


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


def list_runs(root: Path) -> list[Run]:
    """Return the runs in an artifacts folder, the newest first. Other folders, and runs with damaged files, are skipped."""
    paths = (path for name in _RUNS for path in root.glob(name) if path.is_dir() and not path.is_symlink())
    return sorted(filter(None, map(_read, paths)), key=lambda run: (run.time, run.path.name), reverse=True)


def _read(path: Path) -> Run | None:
    """Return a run; None where the files of a folder are not as this version writes them."""
    if not has(read_object(path / "env.json"), _ENV):
        return None
    if not os.path.lexists(path / FINISHED):
        return Run(path, path.lstat().st_mtime, finished=False, failed=0)
    end = read_object(path / FINISHED)
    if not has(end, _END) or not 0 <= end["time"] <= time.time() + DAY_S:
        return None
    return Run(path, end["time"], finished=True, failed=end["failed"])


def surplus(runs: list[Run], keep: int, keep_failed: int = KEPT_FAILED) -> list[Run]:
    """Return the finished runs beyond the ``keep`` newest, and beyond the ``keep_failed`` newest of those that failed."""
    finished = [run for run in runs if run.finished]
    kept = {run.path for run in finished[:keep]} | {run.path for run in [r for r in finished if r.failed][:keep_failed]}
    return [run for run in finished if run.path not in kept]


def delete(runs: list[Run]) -> Iterator[Path]:
    """Delete runs that are not in use; yield those that were deleted.

    A run is first renamed, so that no reader finds half of one; renamed runs that an earlier process left are deleted, too.
    """
    for run in runs:
        if not is_in_use(run.path):
            with contextlib.suppress(OSError):
                run.path.rename(run.path.with_name(f".{run.path.name}.{os.urandom(8).hex()}.deleted"))
                yield run.path
    for doomed in {path for run in runs for name in _RUNS for path in run.path.parent.glob(f".{name}.deleted")}:
        shutil.rmtree(doomed, ignore_errors=True)


def cut_off(runs: list[Run]) -> list[Path]:
    """Return runs that have verdicts and did not finish, and in which no process writes."""
    return [
        run.path for run in runs
        if not run.finished and not is_in_use(run.path) and any(read_lines(run.path / VERDICTS))
        and not (run.path / "SUMMARY.md").exists()
    ]  # fmt: skip
