"""Exceptions that follow from a call that their rank skipped: the rank passed the call's line, and the others wait in it."""

from __future__ import annotations

import ast
import enum
from collections.abc import Mapping
from dataclasses import replace

from pytest_nsa.diagnosis.explain.messages import ended, list_halves
from pytest_nsa.diagnosis.explain.program import Order, compare, find_position
from pytest_nsa.diagnosis.facts import awaited, exception_fact
from pytest_nsa.diagnosis.rules.absence import find_absence
from pytest_nsa.diagnosis.rules.exits import first_exceptions, rank_raised
from pytest_nsa.diagnosis.verdict import Finding, stated
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.source import Sources
from pytest_nsa.evidence.values import Evidence, RaisedException, RankEvidence

LIKELY, POSSIBLE = 0.9, 0.6  # the exception may have another reason


def raised_after_a_skip(evidence: Evidence) -> Finding | None:
    """Find the call that ranks skipped before they raised: each lacks the call that the others wait in, and passed its line.

    Where a loop has no counter, it may have raised in the round before: then the exception is the cause, and not certain.
    """
    raised = {rank.rank: error for rank, error in first_exceptions(evidence)}
    done = [r for r in evidence.ranks if r.rank not in raised and r.finished and r.passed]
    waits = {r.rank: c for r in evidence.ranks if r.rank not in raised and r not in done and (c := awaited(r))}
    if not raised or not waits or len(raised) + len(done) + len(waits) < len(evidence.ranks):
        return None
    passed = {_skipped_one(evidence, rank, error, waits) for rank, error in raised.items()}
    if _Passed.NO in passed:
        return None
    # An edit of the ranks that wait would not explain the exceptions.
    ends = {rank: replace(ended(evidence.ranks[rank]), site=error.where) for rank, error in raised.items()}
    entered = waits | {r.rank: ended(r) for r in done} | ends
    found = find_absence(evidence, entered, (*raised, *(r.rank for r in done)))
    first = rank_raised(evidence)
    if found is None or first is None:
        return None
    if passed != {_Passed.YES}:
        return replace(
            first, certain=False, confidence=POSSIBLE, reason=f"{first.reason}; or it follows: {found.reason}"
        )
    n = evidence.job.world_size
    texts = {e.where: f"{e.type}: {e.headline[:200]}" for e in reversed(raised.values())}
    follows = "; ".join(
        stated(
            tuple(sorted(r for r, e in raised.items() if e.where == where)), f"raised {text} at {where} after that", n
        )
        for where, text in texts.items()
    )
    facts = tuple(exception_fact(evidence.ranks[rank], error) for rank, error in raised.items())
    reason = f"{found.reason}; {follows}"
    return replace(
        found, reason=reason, certain=False, confidence=min(found.confidence, LIKELY), facts=facts + found.facts
    )


class _Passed(enum.Enum):
    """Whether a rank passed the line of a call that it lacks."""

    NO = enum.auto()
    YES = enum.auto()
    IN_SOME_ROUND = enum.auto()  # of a loop without a counter


def _skipped_one(evidence: Evidence, rank: int, error: RaisedException, waits: Mapping[int, Collective]) -> _Passed:
    """Return whether a rank passed the line of a call that another one waits in, and has not entered it."""
    if error.chain:  # the line that raised first is not known: it may be above the call
        return _Passed.NO
    lacked = {waiter: call for waiter, call in waits.items() if _lacks(evidence, rank, call)}
    found = {_passed(evidence, evidence.ranks[rank], error, evidence.ranks[w], call) for w, call in lacked.items()}
    return next((state for state in (_Passed.YES, _Passed.IN_SOME_ROUND) if state in found), _Passed.NO)


def _lacks(evidence: Evidence, rank: int, call: Collective) -> bool:
    if call.peer != -1:
        return call.peer == rank
    made = (c.sequence for c in evidence.ranks[rank].collectives if c.group == call.group)
    return rank in evidence.members(call.process_group) and max(made, default=0) < call.sequence


def _passed(
    evidence: Evidence, rank: RankEvidence, error: RaisedException, waiter: RankEvidence, call: Collective
) -> _Passed:
    """Return whether a rank that raised had passed the statement from which a waiting rank came to its call."""
    if error.when == "teardown":  # the body ended without an exception
        is_in_body = call.way[-1].rpartition(" in ")[2] == _get_function(evidence.job.nodeid)
        return _Passed.YES if is_in_body else _Passed.NO
    line, is_of_this_round = find_position(waiter, call), True
    if call.peer != -1:  # where the rank made the other half in an earlier round, by this round's counters
        halves = list_halves(rank.collectives, call, waiter.rank)
        if not halves:
            return _Passed.NO
        line = find_position(rank, replace(halves[-1], left=0.0))
        # If it is the latest call, the rank may have made it in this round, and the others wait for the next one.
        is_of_this_round = halves[-1] is not rank.collectives[-1]
    found = compare(evidence.sources, find_position(rank, replace(ended(rank), site=error.where)), line, None)
    if found.order is Order.SAME and error.type == "AssertionError":
        return _Passed.IN_SOME_ROUND  # an assert evaluates its line's calls first
    if found.order is not Order.AFTER or not found.parted:
        return _Passed.NO
    if _is_with_head(evidence.sources, found.parted[1].place, found.parted[0].line):
        return _Passed.NO
    if found.is_counted and is_of_this_round:
        return _Passed.YES
    return _Passed.NO if ended(rank).step < call.step else _Passed.IN_SOME_ROUND


def _get_function(nodeid: str) -> str:
    return nodeid.rpartition("::")[2].partition("[")[0]


def _is_with_head(sources: Sources, place: str, line: int) -> bool:
    """Return whether ``place`` is the head of a ``with`` around ``line``: its exit may make the call, after the body."""
    found = sources.around(place)
    return bool(found) and isinstance(found[-1], ast.With | ast.AsyncWith) and line <= (found[-1].end_lineno or 0)
