"""What ranks called next where neither side waited for the other: two calls in another order, one left out, one more."""

from __future__ import annotations

from collections import Counter

from pytest_nsa.diagnosis.facts import awaited
from pytest_nsa.diagnosis.rules.blame import of_group_before, rings
from pytest_nsa.diagnosis.rules.counters import lead
from pytest_nsa.diagnosis.verdict import describe_ranks
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence

REPEATED = 3  # calls in a row that are alike


def swapped(evidence: Evidence, entered: dict[int, Collective]) -> tuple[tuple[int, ...], str, str] | None:
    """Return the finding that ranks made the same two calls in another order; None where they did not.

    A second call is entered while the first waits where another thread makes it, or where calls are asynchronous.
    """
    votes = Counter(c.shape for c in entered.values()).most_common()
    if len(votes) != 2:
        return None
    calls = rings(evidence)
    following, third = (
        {
            rank: next((n for n in calls[rank] if n.place == (c.group, c.sequence + k)), None)
            for rank, c in entered.items()
        }
        for k in (1, 2)
    )
    meets_again = len({n.site for n in third.values() if n is not None}) < 2
    if not meets_again and not _have_made_as_many(evidence, entered):
        return None  # one call apart
    one, other = votes[0][0], votes[1][0]
    for rank, c in entered.items():
        after = following[rank]
        if after is None or after.shape != (other if c.shape == one else one):
            return None
    culprits = tuple(r for r, c in sorted(entered.items()) if c.shape == other or votes[0][1] == votes[1][1])
    mine, theirs = entered[culprits[0]], next(c for c in entered.values() if c.shape != entered[culprits[0]].shape)
    another = next(rank for rank, c in entered.items() if c is theirs)
    if _are_one_apart(evidence, culprits[0], another, mine):
        return None
    who = describe_ranks(culprits, evidence.job.world_size)
    why = f"{who} entered {mine.describe()} before {theirs.describe()}, the others after it: the two calls in another order"
    return culprits, "collective_mismatch", why


def aligned(evidence: Evidence, entered: dict[int, Collective]) -> tuple[tuple[int, ...], str, str] | None:
    """Return the finding by what ranks called next, where neither side waited: who then made the call that the others had made in
    its place has made one more; whose call is the others' next one has left one out. None where neither or both hold.

    It is a call more if no round before had it; else, of as many ranks, the others left it out.
    """
    kinds = Counter(c.shape for c in entered.values()).most_common()
    if len(kinds) != 2:
        return None
    few = tuple(r for r, c in sorted(entered.items()) if c.shape == kinds[1][0])
    others = tuple(r for r in entered if r not in few)
    has_more, has_less = _makes_next(evidence, entered, few, others), _makes_next(evidence, entered, others, few)
    if has_more == has_less:
        return None
    more, less = (few, others) if has_more else (others, few)
    call, missing = entered[more[0]], entered[less[0]]
    ways = [before.way for before in of_group_before(evidence, more[0], call)]
    is_new = call.way not in ways
    # Had the others left its call out, they would be as far as it is.
    is_ahead = lead(evidence.sources, evidence.ranks[more[0]], evidence.ranks[less[0]]) == 1
    if is_ahead and not is_new and len(more) <= len(less):
        who = describe_ranks(more, evidence.job.world_size)
        why = f"{who} went on without {missing.describe()} and is a round ahead of the others, which wait in it (call skipped)"
        return more, "skipped_collective", why
    if len(few) == len(others):
        if not is_new and ways[-1] == call.way:
            return None
        culprits = more if is_new else less
    elif more == few and not is_new:
        return None
    elif less == few and _is_a_round_behind(evidence, few[0], entered):
        return None  # their next call is one of a round that it has not come to
    else:
        culprits = few
    who = describe_ranks(culprits, evidence.job.world_size)
    if culprits == more:
        why = f"{who} entered {call.describe()}, and then {missing.op}, which the others entered in its place"
        return culprits, "extra_collective", why
    why = f"{who} went on without {call.describe()} and entered {missing.describe()}, which the others entered next (call skipped)"
    return culprits, "skipped_collective", why


def _is_a_round_behind(evidence: Evidence, rank: int, entered: dict[int, Collective]) -> bool:
    """Return whether a rank is in an earlier round of the common loops than a rank that has gone on from its call."""
    gone_on = [r for r, c in entered.items() if (now := awaited(evidence.ranks[r])) is not None and now.index > c.index]
    return any(lead(evidence.sources, evidence.ranks[rank], evidence.ranks[r]) == -1 for r in gone_on)


def _makes_next(
    evidence: Evidence, entered: dict[int, Collective], ranks: tuple[int, ...], others: tuple[int, ...]
) -> bool:
    """Return whether those of some ranks that have made another call of the group made the one that others entered in its place."""
    after = {
        (n.shape, n.way)
        for r in ranks
        for n in evidence.ranks[r].collectives
        if n.place == (entered[r].group, entered[r].sequence + 1)
    }
    return len(after) == 1 and after == {(entered[r].shape, entered[r].way) for r in others}


def _have_made_as_many(evidence: Evidence, entered: dict[int, Collective]) -> bool:
    """Return whether ranks have begun as many calls of each kind in one group, and are at the same lines in the same rounds of
    their loops: none has left a call out, or made one more.
    """
    first, *others = (evidence.ranks[rank] for rank in entered)
    group = next(iter(entered.values())).group
    made = [Counter(c.shape for c in rank.collectives if c.group == group) for rank in (first, *others)]
    are_together = bool(first.rounds) and all(rank.counters == first.counters for rank in others)
    return are_together and all(number == made[0] for number in made)


def _are_one_apart(evidence: Evidence, rank: int, other: int, since: Collective) -> bool:
    """Return whether what one of two ranks has called in a group since a call is what the other called after one more, of which it
    made fewer in all: two calls that alternate in another order look alike, but are as many.
    """
    one, two = (
        [c.shape for c in evidence.ranks[r].collectives if c.group == since.group and c.sequence >= since.sequence]
        for r in (rank, other)
    )
    return Counter(one) != Counter(two) and any(
        min(len(a), len(b) - 1) >= REPEATED and all(x == y for x, y in zip(a, b[1:], strict=False))
        for a, b in ((one, two), (two, one))
    )
