"""Calls of one group that two threads of a rank make: which comes first is left to chance, and differs between ranks."""

from __future__ import annotations

from pytest_nsa.diagnosis.rules.locations import parts_of
from pytest_nsa.evidence.values import Evidence, RankEvidence


def raced(evidence: Evidence, culprits: tuple[int, ...]) -> bool:
    """Return whether a thread beside the main one makes the call of each culprit, and the others have that thread as well:
    they would have made the call later.
    """
    functions = {place for rank in culprits for place in _called_beside(evidence.ranks[rank])}
    others = [r for r in evidence.ranks if r.rank not in culprits and not r.finished]
    if not functions or not others or not all(_called_beside(evidence.ranks[r]) for r in culprits):
        return False
    return all(functions & _functions_beside(rank) for rank in others)


def _called_beside(rank: RankEvidence) -> set[tuple[str, str]]:
    """Return the functions, by file and name, in which threads beside the main one have made the calls that a rank is inside of."""
    calls = rank.board.inside if rank.board is not None else ()
    sites = {(file, function) for file, _, function in (parts_of(call.site) for call in calls)}
    return sites & _functions_beside(rank)


def _functions_beside(rank: RankEvidence) -> set[tuple[str, str]]:
    return {(f.file, f.function) for stack in rank.threads if not stack.is_main for f in stack.frames if f.is_user}
