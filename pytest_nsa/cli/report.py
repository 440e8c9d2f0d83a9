"""`pytest-nsa report` and `clean`; which folders are this user's, and which files of this machine are read for others' evidence."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_nsa.diagnosis.decision import decide
from pytest_nsa.evidence.load import find_test_folders, load, with_sources
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.observe.conclude import conclude
from pytest_nsa.observe.finders import find_folder
from pytest_nsa.report import runs
from pytest_nsa.report.plain import visible
from pytest_nsa.report.run import DECISION, read_decision, read_verdict, write_reports
from pytest_nsa.report.summary import VERDICTS, read_entries
from pytest_nsa.report.terminal import short_path
from pytest_nsa.wire.files import append_line


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


def report(folders: Sequence[Path], *, sources: bool) -> int:
    """Write the reports of each run. Return 0 if nothing failed, 1 if a test failed, 2 if a folder is no run.

    ``sources``: read the sources that evidence names, wherever they are.
    """
    status = 0
    for given in folders:
        if not (given / VERDICTS).is_file() and not find_test_folders(given):
            print(f"error: {str(given)!r}: no run here (no {VERDICTS}, no test's folder)", file=sys.stderr)
            return 2
        if runs.is_in_use(given):
            print(f"error: {str(given)!r}: the run goes on still, and writes its reports at its end", file=sys.stderr)
            return 2
        run = resolve_own(given)
        if run is None:
            return 2
        _conclude(run, sources)
        was_finished = (run / runs.FINISHED).is_file()
        # The decision that the run left is by the repository's own rules, where it has any; else the verdicts decide.
        left = read_decision(run, read_entries(run)) if (run / DECISION).is_file() else None
        entries, decision = write_reports(run, 0, decide, interrupted=not was_finished, left=left)
        failed = sum(entry.verdict.failed for entry in entries)
        if not was_finished:
            runs.finish(run, failed, interrupted=True)
        print(visible(f"{decision.sentence}\n{run / 'SUMMARY.md'}\n{run / 'report.html'}"))
        status = status or int(failed > 0)
    return status


def _conclude(run: Path, sources: bool) -> None:
    """Give a verdict to each test during which the run was cut off."""
    known = {entry.folder for entry in read_entries(run)}
    for folder in find_test_folders(run):
        if folder.name in known:
            continue
        evidence = read(folder, sources=sources)
        if evidence is None or is_live(evidence):
            continue
        verdict = read_verdict(folder) or conclude(folder, given=evidence)[0]
        append_line(run / VERDICTS, {"folder": folder.name, **verdict.to_json()})


def is_live(evidence: Evidence) -> bool:
    """Return whether a rank of the evidence still runs on this machine, by the board that it maps."""
    folders = {rank.folder.parent.resolve(): rank.board.pid for rank in evidence.ranks if rank.board}
    return evidence.stop == "host_died" and any(find_folder(pid) == folder for folder, pid in folders.items())


def read(folder: Path, *others: Path, sources: bool) -> Evidence | None:
    """Return a folder's evidence, and print which parts cannot be read; None if nothing can.

    ``sources``: read the sources that it names, wherever they are.
    """
    try:
        evidence = load(folder, *others)
    except (OSError, ValueError) as error:
        print(visible(f"error: {error}"), file=sys.stderr)
        return None
    for what in evidence.unread:
        print(visible(f"{folder.name}: not read: {what}"), file=sys.stderr)
    # Without sources, the process that ran the ranks ended before it could keep them.
    has_sources = evidence.sources.snippets and not sources
    return evidence if has_sources else with_allowed_sources(evidence, requested=sources)


def clean(root: Path, keep: int, keep_failed: int, *, dry_run: bool) -> int:
    """Delete finished runs beyond those that are kept, and print each. Return 2 without an artifacts folder, else 0."""
    if not root.is_dir():
        print(f"error: {str(root)!r}: no such folder; give the one that has the runs, as in artifacts", file=sys.stderr)
        return 2
    beyond = runs.surplus(runs.list_runs(root), keep, keep_failed)
    for path in [run.path for run in beyond] if dry_run else runs.delete(beyond):
        print(visible(str(path)))
    return 0
