"""Ranks in functions of their own (`drive` and `work`) that call one function at the same time: where their paths meet again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pytest_nsa.evidence.source import file_name
from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.evidence.values import RankEvidence

LOOKED_AT = 32  # frames below the parting: a deep recursion has many of one function
Way = tuple[str, ...]  # the lines that led to a call, innermost first


def where_they_meet(
    one: RankEvidence, mine: list[Frame], other: RankEvidence, others: list[Frame], parted: int
) -> tuple[int, int] | None:
    """Return the depths of the outermost frame below ``parted`` of a function that both ranks are in, where calls that the two made
    together before came through it, called from the same lines as now; None where none shows it.

    ``mine`` and ``others`` are the frames of the two, outermost first.
    """
    depths: dict[tuple[str, str, str], tuple[int, int]] = {}  # by the two callers' lines and the function
    for i, frame in enumerate(mine[: parted + LOOKED_AT]):
        for j, another in enumerate(others[: parted + LOOKED_AT]):
            if min(i, j) > parted and (frame.file, frame.function) == (another.file, another.function):
                depths.setdefault((_line(mine[i - 1]), _line(others[j - 1]), frame.function), (i, j))
    if not depths:
        return None
    met = {
        (caller, other_caller, called.rpartition(" in ")[2])
        for way, other_way in _made_together(one, other)
        for (called, caller), (other_called, other_caller) in itertools.product(_steps(way), _steps(other_way))
        if called == other_called
    }
    return next((found for called, found in depths.items() if called in met), None)


def _made_together(one: RankEvidence, other: RankEvidence) -> set[tuple[Way, Way]]:
    """Return the ways to the calls that two ranks made at one place of a sequence, where both are the same and have completed."""
    theirs = {c.place: c for c in other.collectives if c.peer == -1 and not c.is_inside}
    pairs = ((c, theirs.get(c.place)) for c in one.collectives if c.peer == -1 and not c.is_inside)
    return {(c.way, found.way) for c, found in pairs if found is not None and found.shape == c.shape}


def _steps(way: Way) -> Iterator[tuple[str, str]]:
    """Return each call of a function on a way, innermost first: the line in it that led on, and the caller's line."""
    return itertools.pairwise(map(file_name, way))


def _line(frame: Frame) -> str:
    return file_name(frame.describe())
