"""Calls of a side thread in the group in which the main thread calls: the order of the two is a race."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_nsa.diagnosis.explain.locations import parts_of
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence, RankEvidence


def raced(evidence: Evidence, culprits: tuple[int, ...], entered: Mapping[int, Collective]) -> bool:
    """Return whether side threads make the calls of all ranks of one side, and the other side's ranks have the same
    threads in another call of one group, so that their side threads would have made the call later.

    ``entered`` has the calls where they are known; else the calls that ranks are inside are taken.
    """
    one = [evidence.ranks[rank] for rank in culprits]
    others = [r for r in evidence.ranks if r.rank not in culprits and (r.rank in entered or not r.finished)]
    calls = {
        r.rank: (entered[r.rank],) if r.rank in entered else r.board.inside if r.board is not None else ()
        for r in (*one, *others)
    }
    if not one or not others or not set.intersection(*({c.group for c in made} for made in calls.values())):
        return False
    return _come_later(one, others, calls) or _come_later(others, one, calls)


def _come_later(
    ranks: list[RankEvidence], others: list[RankEvidence], calls: Mapping[int, tuple[Collective, ...]]
) -> bool:
    """Return whether a side thread makes the call of each of ``ranks``, and the other ranks have that thread and are in
    another call.
    """
    if not all(_functions_of(calls[r.rank]) & _functions_of_side_threads(r) for r in ranks):
        return False
    functions = _functions_of(calls[ranks[0].rank])
    return all(
        (theirs := functions & _functions_of_side_threads(r)) and not theirs & _functions_of(calls[r.rank])
        for r in others
    )


def _functions_of(calls: tuple[Collective, ...]) -> set[tuple[str, str]]:
    """Return the functions that made the calls, by file and name."""
    return {(file, function) for file, _, function in (parts_of(call.site) for call in calls)}


def _functions_of_side_threads(rank: RankEvidence) -> set[tuple[str, str]]:
    """Return the user's functions, by file and name, that a rank's side threads are in, were in when the test raised,
    or raised in.
    """
    frames = [f for stack in (*rank.threads, *rank.fatal) if not stack.is_main for f in stack.frames if f.is_user]
    places = [
        *(place for e in rank.exceptions for place in e.side_threads),
        *(e.where for e in rank.thread_errors if e.where),
    ]
    return {(f.file, f.function) for f in frames} | {
        (file, function) for file, _, function in (parts_of(place) for place in places)
    }
