"""Ranks that wait for a message or a key while the others wait in a collective, or the reverse: which of the two sides went on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pytest_nsa.diagnosis.explain.program import Order, compare_ranks
from pytest_nsa.diagnosis.explain.rhythm import expected_next
from pytest_nsa.diagnosis.facts import calls_before, rings
from pytest_nsa.diagnosis.rules.alone import extra, skipped
from pytest_nsa.diagnosis.rules.rounds import token
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.collectives import lacking
from pytest_nsa.evidence.values import Evidence, RankEvidence


def went_on_without(
    evidence: Evidence, ranks: Collection[int], waits: Mapping[int, Collective], told: str
) -> Finding | None:
    """Find that ``ranks``, fewer than the others, wait for a message or a key, and went on without the collective in which all the
    others wait. ``waits`` has the calls that ranks wait in; ``told`` what all ranks do, in words.

    It is theirs where their loops' counters, their own calls so far, or the lines say that it came before; or where it goes on
    a run of calls of one line that they have answered up to there.
    """
    others = [rank for rank in waits if rank not in ranks]
    if not ranks or len(ranks) > len(others) or len({waits[r].place for r in others}) != 1:
        return None
    missed = waits[others[0]]
    if missed.peer != -1 or not missed.sequence:
        return None
    if lacking([missed], ranks, rings(evidence), evidence.members)[missed.place] != set(ranks):
        return None
    one = evidence.ranks[others[0]]
    if not all(
        _is_past(evidence, evidence.ranks[r], waits.get(r), one, missed, len(others) > len(ranks)) for r in ranks
    ):
        return None
    who = describe_ranks(tuple(sorted(ranks)), evidence.job.world_size)
    why = f"{who} went on without {missed.describe()}, in which the others wait (call skipped){told}"
    return skipped(evidence, tuple(sorted(ranks)), missed, why)


def entered_alone(
    evidence: Evidence, waits: Mapping[int, Collective], told: str, for_keys: Collection[int] = ()
) -> Finding | None:
    """Find that few ranks wait in a collective, all others for messages or keys, and by the loops' counters these have gone past
    it. ``waits`` has the calls that ranks wait in; those of ``for_keys`` wait for keys.
    """
    few = [rank for rank, c in waits.items() if c.peer == -1 and rank not in for_keys]
    others = [*for_keys, *(rank for rank in waits if rank not in few and rank not in for_keys)]
    if not few or len(few) >= len(others) or len({waits[r].place for r in few}) != 1:
        return None
    call = waits[few[0]]
    if any(c.place == call.place for r in others for c in evidence.ranks[r].collectives):
        return None
    one = evidence.ranks[few[0]]
    seen = [compare_ranks(evidence.sources, one, evidence.ranks[r]) for r in others]
    if not all(c.order is Order.BEFORE and c.is_counted for c in seen):
        return None
    return extra(evidence, tuple(sorted(few)), call, f"which the others have gone past{told}")


def _is_past(
    evidence: Evidence, rank: RankEvidence, mine: Collective | None, other: RankEvidence, missed: Collective, are_few: bool
) -> bool:  # fmt: skip
    """Return whether a rank has gone past a call: by the counters of the loops, else by its own rounds."""
    compared = compare_ranks(evidence.sources, rank, other)
    if compared.is_counted and compared.order in (Order.BEFORE, Order.AFTER):
        return compared.order is Order.AFTER
    # Its calls do not show when it looks for keys; nor has one that waits for a call begun earlier made another instead.
    if mine is None or mine.index < rank.collectives[-1].index:
        return False
    calls = calls_before(evidence, rank.rank, mine)
    expected = expected_next([token(c) for c in calls])
    if expected is not None and any(token(c) == token(mine) for c in calls):
        return expected == token(missed)  # what it has never called may be one call more, before the others'
    return (
        are_few and _goes_on_a_run(other, missed) and any(c.place == (missed.group, missed.sequence - 1) for c in calls)
    )


def _goes_on_a_run(rank: RankEvidence, call: Collective) -> bool:
    """Return whether what a rank called just before ``call`` was of the same group and line."""
    before = next((c for c in reversed(rank.collectives) if c.index < call.index), None)
    return before is not None and (before.group, before.way) == (call.group, call.way)
