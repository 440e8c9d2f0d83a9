"""Calls of a side thread in the group in which the main thread calls: the order of the two is a race."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_nsa.diagnosis.explain.locations import parts_of
from pytest_nsa.diagnosis.verdict import describe_ranks
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence, RankEvidence


def race_of_threads(evidence: Evidence, entered: Mapping[int, Collective]) -> str:
    """Return in words that some ranks make their call of a group in a side thread and the others in their main thread; ''
    where all do the same. ``entered`` has the call of each rank.
    """
    functions = {rank: parts_of(call.site)[::2] for rank, call in entered.items()}
    in_threads = set().union(*(_functions_of_side_threads(evidence.ranks[rank]) for rank in entered))
    aside = tuple(sorted(rank for rank, function in functions.items() if function in in_threads))
    if not aside or len(aside) == len(entered) or len({c.process_group for c in entered.values()}) != 1:
        return ""
    who, does = describe_ranks(aside, evidence.job.world_size), "calls" if len(aside) == 1 else "call"
    names = " and ".join(sorted({functions[rank][1] for rank in aside}))
    return (
        f"; {who} {does} in a side thread ({names}), the others in their main thread: one group, so the order is a race"
    )


def _functions_of_side_threads(rank: RankEvidence) -> set[tuple[str, ...]]:
    """Return the user's functions, by file and name, that a rank's side threads are in, were in when the test raised, or
    raised in.
    """
    frames = [f for stack in (*rank.threads, *rank.fatal) if not stack.is_main for f in stack.frames if f.is_user]
    places = [*(place for e in rank.exceptions for place in e.side_threads), *(e.where for e in rank.thread_errors)]
    return {(f.file, f.function) for f in frames} | {parts_of(place)[::2] for place in places}
