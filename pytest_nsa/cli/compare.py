"""`pytest-nsa compare`: compare two runs."""

from __future__ import annotations

import sys
from pathlib import Path

from pytest_nsa.report import compare as comparing
from pytest_nsa.report.plain import visible
from pytest_nsa.report.summary import VERDICTS, read_entries


def compare(base: list[Path], new: list[Path]) -> int:
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
    return int(any(d.kind == "worse" for d in found))


def _name(folder: Path) -> str:
    return folder.resolve().name
