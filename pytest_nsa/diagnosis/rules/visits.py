"""The rounds in a rank's own calls: how many calls each had, whether one leaves a line out, where the latest one is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pytest_nsa.diagnosis.rules.locations import Parting, line_in, parts_of
from pytest_nsa.diagnosis.rules.source import have_a_common_loop
from pytest_nsa.evidence.board import Collective, Shape


def ends_a_visit(calls: list[Collective], place: str, following: Collective, *, below: bool) -> bool:
    """Return whether the latest call ended a visit to the statement ``place`` that it came from, if ``following`` is the next from
    there. ``below``: what the statement calls has loops.

    Without a loop it comes to each line once; but for hooks, which a backward calls as often as there are. With one, the visit's
    calls must be other than one round of that loop again and again.
    """
    latest = calls[-1]
    is_plain = bool(latest.callers) and "backward" not in (latest.phase, following.phase)
    if is_plain and not below and (latest.way, latest.op) == (following.way, following.op):
        return True
    line = parts_of(place)[1]
    visits = [
        [(c.shape, c.way) for c in run]
        for at_it, run in itertools.groupby(calls, key=lambda c: line_in(c, place) == line)
        if at_it
    ]
    if len(visits) < 2 or visits[-1] != visits[-2] or (following.shape, following.way) != visits[-1][0]:
        return False
    visit = [token for i, token in enumerate(visits[-1]) if not (i and _is_payload(token, visits[-1][i - 1]))]
    return len(visit) > 1 and all(visit[k:] != visit[:-k] for k in range(1, len(visit)) if len(visit) % k == 0)


def _is_payload(token: tuple[Shape, tuple[str, ...]], before: tuple[Shape, tuple[str, ...]]) -> bool:
    """Return whether a call has the bytes whose number the one before had: the two are one call of an object's."""
    (shape, way), (sizes, sizes_way) = token, before
    return way == sizes_way and shape[1] == sizes[1] and (sizes[2], shape[2]) == ("int64", "uint8")


def rounds_between(parted: Parting, calls: Sequence[Collective], other: Collective) -> int | None:
    """Return how many rounds after the latest of its ``calls`` the one rank is, 0 or 1, where one loop has all three lines and
    leads from there to this rank's line before that of the other's call ``other``; else None.

    Nothing is known where the latest call is of this rank's statement: that may come round again; or of the other's, while that
    may be under way.
    """
    (file, line, function), (_, other_line, _) = parts_of(parted.here), parts_of(parted.there)
    at = line_in(calls[-1], parted.here)
    if at in (0, line):
        return None
    if at == other_line and not ends_a_visit(list(calls), parted.there, other, below=parted.other_below):
        return None
    whole = f"{file}:{at} in {function}"
    pairs = ((whole, parted.here), (whole, parted.there), (parted.here, parted.there))
    if not all(have_a_common_loop(parted.sources, a, b) for a, b in pairs):
        return None
    # An earlier line comes in the next round.
    mine, others = (int(line < at), line), (int(other_line <= at), other_line)
    return mine[0] if mine < others else None
