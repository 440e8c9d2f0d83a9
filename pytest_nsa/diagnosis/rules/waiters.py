"""Ranks that wait for a message or a key where the others wait for something else: which of the two sides went on, and whether
the waiter is wrong or the rank that it waits for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from pytest_nsa.diagnosis.explain.locations import parts_of
from pytest_nsa.diagnosis.explain.program import Order, compare_ranks
from pytest_nsa.diagnosis.explain.rhythm import expected_next
from pytest_nsa.diagnosis.explain.source import have_a_common_loop, loops_of
from pytest_nsa.diagnosis.facts import calls_before, rings
from pytest_nsa.diagnosis.rules.alone import extra, skipped
from pytest_nsa.diagnosis.rules.circles import completed, has_forgotten
from pytest_nsa.diagnosis.rules.shifts import token
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.board import ANY, Collective
from pytest_nsa.evidence.collectives import lacking
from pytest_nsa.evidence.source import Sources
from pytest_nsa.evidence.values import Evidence, RankEvidence


def turned_to_a_stranger(evidence: Evidence, outside: set[int], halves: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks that wait for one which has exchanged with others alone, never with them, or never so that it would answer
    this, where their line has had another partner, while another rank waits for them in the other half: they take it for theirs.
    """
    found = []
    for rank, call in halves.items():
        partners = {c.peer for c in completed(evidence, call.peer) if c.peer != -1} if call.peer in outside else set()
        sends = call.is_send
        waiters = {r for r, c in halves.items() if c.peer == rank and c.is_send != sends}
        usual = {c.peer for c in completed(evidence, rank) if (c.site, c.is_send) == (call.site, sends)}
        answers = [c for c in completed(evidence, call.peer) if c.is_send != sends] if call.peer in outside else []
        is_another_s = call.peer not in usual and waiters & usual and all(c.peer not in (rank, ANY) for c in answers)
        if waiters and ((partners and not partners & {rank, ANY}) or (call.peer in outside and is_another_s)):
            found.append(rank)
    return tuple(sorted(found))


def first_at_a_line(evidence: Evidence, waits: Mapping[int, Collective]) -> tuple[int, Collective] | None:
    """Return the one rank that has sent or received at a line from which no rank had before, in a loop in which it has done so
    from another line in earlier rounds; and that call. None where there are several, or none of them.

    The call does not end, or has taken what the rank waits for now.
    """
    made: dict[tuple[bool, str], Counter[int]] = defaultdict(Counter)  # by line, how many calls of each rank
    for rank in evidence.ranks:
        for call in rank.collectives:
            if call.peer != -1:
                made[call.is_send, call.site][rank.rank] += 1
    found = {r: first for r, mine in waits.items() if (first := _first_of_its_line(evidence, r, mine, made))}
    return next(iter(found.items())) if len(found) == 1 else None


def _first_of_its_line(
    evidence: Evidence, rank: int, mine: Collective, made: Mapping[tuple[bool, str], Counter[int]]
) -> Collective | None:
    if has_forgotten(evidence.ranks[rank]):
        return None
    calls = [c for c in evidence.ranks[rank].collectives if c.peer != -1]
    for call in calls:
        holds_up = call.is_inside or (call.is_send, call.peer) == (mine.is_send, mine.peer)
        if not holds_up or len(made[call.is_send, call.site]) > 1:
            continue
        before = [c for c in calls if c.index < call.index and c.is_send == call.is_send]
        if any(c.site == call.site for c in before):
            continue
        # A line of rounds: this rank or all together have come to it more than once.
        usual = {c.site for c in before if not c.is_inside and c.way[1:] == call.way[1:]}
        rounds = (site for site in usual if made[call.is_send, site].total() > 1)
        sooner = Counter(c.site for c in before)
        later = Counter(c.site for c in calls if c.index > call.index and c.is_send == call.is_send)
        if any(
            # Where the first round has had both, and each since, it was new in that one alone.
            (sooner[site] > 1 or not later[site] or later[site] > later[call.site])
            and _are_of_one_round(evidence.sources, site, call.site)
            for site in rounds
        ):
            return call
    return None


def _are_of_one_round(sources: Sources, one: str, other: str) -> bool:
    """Return whether two lines are in one loop of a function, or in a function that has none around the first."""
    (file, _, function), (other_file, _, other_function) = parts_of(one), parts_of(other)
    if (file, function) != (other_file, other_function):
        return False
    return have_a_common_loop(sources, one, other) or not loops_of(sources, one)


def once_more(evidence: Evidence, outside: set[int], halves: dict[int, Collective]) -> tuple[int, ...]:
    """Return the one rank that is in its half once more than it and the others have completed theirs at that line, where the rank
    that it waits for has made the other half as often as the others have, at theirs: a stage that expects a batch more. Or that
    waits where all pairs of ranks have sent each other as many.
    """
    waiters = [rank for rank, c in halves.items() if c.peer in outside]
    if len(waiters) != 1 or any(has_forgotten(r) for r in evidence.ranks):
        return ()
    (waiter,) = waiters
    call = halves[waiter]
    if _is_balanced(evidence) or _took_it_from_any(evidence, waiter, call):
        return (waiter,)
    way_out = call.is_send
    answers = [c.site for c in completed(evidence, call.peer) if c.peer == waiter and c.is_send != way_out]
    if not answers:
        return ()
    numbers = set()
    for site in {call.site, answers[-1]}:
        made = Counter(
            r.rank for r in evidence.ranks for c in completed(evidence, r.rank) if c.peer != -1 and c.site == site
        )
        if len(made) < 2:
            return ()
        numbers |= set(made.values())
    return (waiter,) if len(numbers) == 1 else ()


def _took_it_from_any(evidence: Evidence, rank: int, call: Collective) -> bool:
    """Return whether a rank has received from anybody before, and the one that it waits for has sent to it at its line as often
    as each other sender: that message was taken already.
    """
    has_taken = any(c.peer == ANY for c in completed(evidence, rank))
    sent = Counter((c.site, r.rank) for r in evidence.ranks for c in r.collectives if c.is_send and c.peer == rank)
    mine = {site: number for (site, sender), number in sent.items() if sender == call.peer}
    if not has_taken or call.is_send or len(mine) != 1:
        return False
    ((line, number),) = mine.items()
    others = {n for (site, sender), n in sent.items() if site == line and sender != call.peer}
    return others == {number}


def _is_balanced(evidence: Evidence) -> bool:
    """Return whether two pairs of ranks or more have sent to each other, each as often, one way and the other."""
    made = [(r.rank, c) for r in evidence.ranks for c in completed(evidence, r.rank)]
    # What was received was sent, though its sender has not waited for it.
    sent = Counter((r, c.peer) for r, c in made if c.is_send) | Counter((c.peer, r) for r, c in made if c.is_receive)
    numbers = {(number, sent[peer, rank]) for (rank, peer), number in sent.items()}
    return len(sent) > 3 and len(numbers) == 1 and all(one == other for one, other in numbers)


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
