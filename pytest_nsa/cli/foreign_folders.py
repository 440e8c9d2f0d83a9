"""Folders of evidence that another user may have made or sent: where a command writes, and which files of this machine it reads.

A folder of another user is copied into a folder of this user, and the copy is used. The sources that evidence names are read only
if this machine made the evidence and they are below the root of its tests, or if the user requests them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pytest_nsa.evidence.load import with_sources
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import short_path
from pytest_nsa.system.disk_space import private_folder
from pytest_nsa.wire.files import LARGEST, read_bytes, write_atomically

MOST = 1 << 30  # bytes of a folder that are copied
DEPTH = 4  # run, test, run of a bisection, rank


def is_ours(path: Path) -> bool:
    """Return whether a folder, or a process by its folder in /proc, is this user's; False if it does not exist."""
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def choose_output_folder(folder: Path) -> Path:
    """Return a folder's path without links, as short as possible; for another user's folder, the path of a copy."""
    folder = Path(short_path(folder.resolve()))
    if is_ours(folder):
        return folder
    copy = Path(tempfile.mkdtemp(prefix="copy-", dir=private_folder())) / folder.name
    not_copied = _copy(folder, copy)
    print(visible(f"{folder}: is another user's: what is written goes into a copy, {copy}"), file=sys.stderr)
    if not_copied:
        print(
            f"files that are not in the copy, or not whole: {not_copied} (links, special files, above {LARGEST >> 20} MiB, "
            f"or beyond {MOST >> 30} GiB in all)",
            file=sys.stderr,
        )
    return copy


def _copy(folder: Path, copy: Path) -> int:
    """Copy the regular files of a folder. Return how many entries were not copied whole."""
    left, not_copied = MOST, 0
    for path in _files(folder, DEPTH):
        try:
            data, size = read_bytes(path, min(left, LARGEST)), path.stat().st_size
        except OSError:
            not_copied += 1
            continue
        left -= len(data)
        target = copy / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if left > 0:
            write_atomically(target, data)
        not_copied += left <= 0 or size > len(data)
    copy.mkdir(parents=True, exist_ok=True)
    return not_copied


def _files(folder: Path, depth: int) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)
            elif depth > 1:
                yield from _files(Path(entry.path), depth - 1)


def with_allowed_sources(evidence: Evidence, *, requested: bool, is_own_job: bool = False) -> Evidence:
    """Return evidence with the sources that it names, as far as they may be read.

    ``is_own_job``: live processes of this user write it. ``requested``: the user requests the sources, wherever they are.
    """
    ours = is_ours(evidence.folder)
    if requested or (is_own_job and ours):
        return with_sources(evidence, keep=ours)
    below = sources_folder(evidence, requested=False)
    return evidence if below == NOWHERE else with_sources(evidence, below=below)


NOWHERE = Path(os.devnull)  # no file lies below it


def sources_folder(evidence: Evidence, *, requested: bool) -> Path | None:
    """Return the folder below which sources may be read: `NOWHERE` for a folder from elsewhere, None for any."""
    if requested:
        return None
    is_known = is_ours(evidence.folder) and _is_made_here(evidence)
    return Path(evidence.job.root).resolve() if is_known else NOWHERE


def _is_made_here(evidence: Evidence) -> bool:
    """Return whether evidence is where it was made, unlike evidence sent by others, and its tests' root is a project's folder."""
    root, made = evidence.job.root, evidence.job.folder
    if not (os.path.isabs(root) and os.path.isabs(made)):
        return False
    is_project_s = not Path.home().resolve().is_relative_to(Path(root).resolve())
    return is_project_s and Path(made).resolve() == evidence.folder.resolve()
