"""Calls of a second thread of a rank in the group in which its main thread calls: chance decides which of the two comes first."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_nsa.diagnosis.explain.locations import parts_of
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence, RankEvidence


def raced(evidence: Evidence, culprits: tuple[int, ...], entered: Mapping[int, Collective]) -> bool:
    """Return whether a thread beside the main one makes the call of each rank of one side, the culprits or the others, and those
    of the other side have that thread as well, in another call of one group: they would have made the call later. ``entered`` has
    the calls, where they are known; else they are those that ranks are inside of.
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
    """Return whether a thread beside the main one makes the call of each of ``ranks``, and the others have that thread as well
    and are in another call.
    """
    if not all(_functions_of(calls[r.rank]) & _functions_of_side_threads(r) for r in ranks):
        return False
    functions = _functions_of(calls[ranks[0].rank])
    return all(
        (theirs := functions & _functions_of_side_threads(r)) and not theirs & _functions_of(calls[r.rank])
        for r in others
    )


def _functions_of(calls: tuple[Collective, ...]) -> set[tuple[str, str]]:
    """Return the functions, by file and name, that have made calls."""
    return {(file, function) for file, _, function in (parts_of(call.site) for call in calls)}


def _functions_of_side_threads(rank: RankEvidence) -> set[tuple[str, str]]:
    """Return the user's functions, by file and name, that a rank's threads beside the main one are in, were in when the test
    raised, or raised in.
    """
    frames = [f for stack in (*rank.threads, *rank.fatal) if not stack.is_main for f in stack.frames if f.is_user]
    places = [
        *(place for e in rank.exceptions for place in e.side_threads),
        *(e.where for e in rank.thread_errors if e.where),
    ]
    return {(f.file, f.function) for f in frames} | {
        (file, function) for file, _, function in (parts_of(place) for place in places)
    }
