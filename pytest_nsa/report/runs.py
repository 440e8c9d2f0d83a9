"""The runs that lie in an artifacts folder: which are finished, which of them are kept, and the reports of one that was cut off.

A run is known by its env.json, finished by its run.json, and in use while a process of it holds its lock. Nothing else in the
folder is ever deleted, and no link is followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_nsa.report.summary import VERDICTS
from pytest_nsa.wire.files import parse, read_lines, read_text, write_json
from pytest_nsa.wire.messages import SCHEMA

FINISHED = "run.json"
LOCK = ".in_use"
KEPT, KEPT_FAILED = 20, 5
_RUNS = "test_engineer_*"


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder; ``failed`` is how many of its tests did."""

    path: Path
    time: float
    finished: bool
    failed: int


def is_in_use(run: Path) -> bool:
    """Return whether a process of a run lives still."""
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
    """Mark a run as in use until this process ends; returns the descriptor that does."""
    fd = os.open(run / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def finish(run: Path, failed: int, *, interrupted: bool) -> None:
    """run.json, when all else is written."""
    facts = {"schema": SCHEMA, "time": time.time(), "failed": failed, "interrupted": interrupted}
    write_json(run / FINISHED, facts)


def runs_in(root: Path) -> list[Run]:
    """Return the runs in an artifacts folder, the newest first. What is no run of ours is left out."""
    found = []
    for path in root.glob(_RUNS):
        if path.is_symlink() or not path.is_dir():
            continue
        env = parse(read_text(path / "env.json"))
        if not isinstance(env, dict) or "schema" not in env:
            continue
        end = parse(read_text(path / FINISHED))
        end = end if isinstance(end, dict) else {}
        failed, at = end.get("failed"), end.get("time")
        at = float(at) if isinstance(at, int | float) else path.stat().st_mtime
        found.append(Run(path, at, bool(end), failed if isinstance(failed, int) else 0))
    return sorted(found, key=lambda run: (run.time, run.path.name), reverse=True)


def surplus(runs: list[Run], keep: int, keep_failed: int = KEPT_FAILED) -> list[Run]:
    """Return the finished runs beyond the ``keep`` newest, and beyond the ``keep_failed`` newest of those that failed."""
    finished = [run for run in runs if run.finished]
    kept = {run.path for run in finished[:keep]} | {run.path for run in [r for r in finished if r.failed][:keep_failed]}
    return [run for run in finished if run.path not in kept]


def delete(runs: list[Run]) -> Iterator[Path]:
    """Delete runs that are not in use; yields those that went. First renamed, so that no reader meets half of one."""
    for run in runs:
        if is_in_use(run.path):
            continue
        doomed = run.path.with_name(f".{run.path.name}.{os.getpid()}.deleted")
        with contextlib.suppress(OSError):
            run.path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            yield run.path


def cut_off(runs: list[Run]) -> list[Path]:
    """Return runs that have verdicts and no end, and that no process writes any more."""
    return [
        run.path for run in runs
        if not run.finished and not is_in_use(run.path) and any(read_lines(run.path / VERDICTS))
        and not (run.path / "SUMMARY.md").exists()
    ]  # fmt: skip
