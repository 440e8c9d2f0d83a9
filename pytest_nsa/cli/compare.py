"""`pytest-nsa compare` and `history`: compare two runs, or list what changed over all kept runs."""

from __future__ import annotations

import sys
from pathlib import Path

from pytest_nsa.report import compare as comparing
from pytest_nsa.report.history import history
from pytest_nsa.report.plain import visible
from pytest_nsa.report.runs import in_short, runs_in
from pytest_nsa.report.summary import VERDICTS, read_entries
from pytest_nsa.wire.files import write_atomically


def compare(base: list[Path], new: list[Path], page: Path | None) -> int:
    """Print what differs between two runs, the first of each side; the others are repeats.

    Return 1 if something is worse, 2 if a folder is no run, else 0.
    """
    for folder in (*base, *new):
        if not (folder / VERDICTS).is_file():
            print(
                f"error: {str(folder)!r}: no run here (no {VERDICTS}); give a run's folder, as artifacts/latest",
                file=sys.stderr,
            )
            return 2
    sides = [[{e.name: e.verdict for e in read_entries(folder)} for folder in side] for side in (base, new)]
    for folder, entries in zip((*base, *new), (*sides[0], *sides[1]), strict=True):
        if not entries:
            print(f"error: {str(folder)!r}: its {VERDICTS} has no verdict that can be read", file=sys.stderr)
            return 2
    found = comparing.compare(*sides)
    names = (_name(base[0]), _name(new[0]))
    tests = len({*sides[0][0], *sides[1][0]})
    print(visible(comparing.as_markdown(found, names, tests)), end="")
    if page is not None:
        write_atomically(page, comparing.as_html(found, names, tests), follow=True)
    return int(any(d.kind == "worse" for d in found))


def _name(folder: Path) -> str:
    return folder.resolve().name


def print_history(root: Path) -> int:
    """Print the tests that are flaky, slower or failing over the runs of a folder. Return 2 without a finished run, else 0."""
    unread: list[str] = []
    runs = sorted((run for run in runs_in(root, unread) if run.finished), key=lambda run: run.time)
    if unread:
        print(visible(f"skipped: {in_short(unread)}"), file=sys.stderr)
    if not runs:
        print(f"error: {str(root)!r}: no finished run here; give the folder of runs, as artifacts", file=sys.stderr)
        return 2
    found = history([(run.path.name, {e.name: e.verdict for e in read_entries(run.path)}) for run in runs])
    first, last = visible(runs[0].path.name), visible(runs[-1].path.name)
    print(f"{len(runs)} run{'s' if len(runs) > 1 else ''}, from {first} to {last}; a letter per run, the newest last")
    width = max((len(past.test) for past in found), default=0)
    for past in found:
        print(visible(f"{past.test:<{width}}  {past.letters}  {past.text}"))
    if not found:
        print("no test is flaky, slower, or fails since one of them")
    return 0
