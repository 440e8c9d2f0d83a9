"""Ranks in functions of their own (`drive` and `work`) that call one function at the same time: where their paths meet again."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.evidence.values import RankEvidence


def where_they_meet(
    one: RankEvidence, mine: list[Frame], other: RankEvidence, others: list[Frame], parted: int
) -> tuple[int, int] | None:
    """Return the depths of the outermost frame below ``parted`` of a function that both ranks are in, where calls that the two made
    together before came through it, called from the same lines as now; None where none shows it.

    ``mine`` and ``others`` are the frames of the two, outermost first.
    """
    depths = [
        (i, j)
        for i in range(parted + 1, len(mine))
        for j in range(parted + 1, len(others))
        if (mine[i].file, mine[i].function) == (others[j].file, others[j].function)
    ]
    if not depths:
        return None
    together = list(_made_together(one, other))
    for i, j in depths:
        callers = (_line(mine[i - 1]), _line(others[j - 1]))
        function = _line(mine[i]).rpartition(" in ")[2]
        for a, b in together:
            at, other_at = (_called_by(way, caller) for way, caller in zip((a.way, b.way), callers, strict=True))
            if at == other_at != "" and at.endswith(f" in {function}"):
                return i, j
    return None


def _made_together(one: RankEvidence, other: RankEvidence) -> Iterator[tuple[Collective, Collective]]:
    """Yield the calls that two ranks made at one place of a group's sequence, where both are the same and have completed."""
    theirs = {c.place: c for c in other.collectives if c.peer == -1 and not c.is_inside}
    for call in one.collectives:
        found = theirs.get(call.place)
        if found is not None and call.peer == -1 and not call.is_inside and found.shape == call.shape:
            yield call, found


def _called_by(way: tuple[str, ...], caller: str) -> str:
    """Return the line that a caller's line has led to, of the way to a call; '' where it is not on it."""
    inner = next((i for i, place in enumerate(way) if _short(place) == caller), 0)
    return _short(way[inner - 1]) if inner else ""


def _line(frame: Frame) -> str:
    return _short(frame.describe())


def _short(place: str) -> str:
    """Return a location by its file's name alone: the ways to calls have no more."""
    return place.rpartition("/")[2]
