"""Folders of evidence that another user may have made or sent: no command writes there, and which files of this machine it reads.

The sources that evidence names are read only if this machine made the evidence and they are below the root of its tests, or if the
user requests them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pytest_nsa.evidence.load import with_sources
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import short_path


def is_ours(path: Path) -> bool:
    """Return whether a folder, or a process by its folder in /proc, is this user's; False if it does not exist."""
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def resolve_own(folder: Path) -> Path | None:
    """Return a folder's path without links, as short as possible; None for another user's, after a line that names the remedy."""
    folder = Path(short_path(folder.resolve()))
    if is_ours(folder):
        return folder
    print(visible(f"error: {folder}: is another user's; copy it (cp -r), and give the copy"), file=sys.stderr)
    return None


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
