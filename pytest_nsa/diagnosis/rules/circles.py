"""Ranks that wait for each other in a circle of sends and receives: the one whose call is out of the order of the others'."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from heapq import nsmallest

from pytest_nsa.diagnosis.explain.program import Order, compare_ranks
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence, RankEvidence


def ends_of_chains(halves: dict[int, Collective], world_size: int) -> set[int]:
    """Return the ranks at which the chains of ranks that wait for each other end, and those of the circles that they run into."""
    ends: set[int] = set()
    seen: set[int] = set()
    for rank in halves:
        way: dict[int, int] = {}  # the place of each rank of this chain
        at = rank
        while at in halves and at not in seen:
            seen.add(at)
            way[at] = len(way)
            if not 0 <= halves[at].peer < world_size:  # from any rank
                ends.add(at)
                break
            at = halves[at].peer
        if at not in halves:
            ends.add(at)
        elif at in way:
            ends |= set(list(way)[way[at] :])
    return ends


def of_the_circle(evidence: Evidence, ranks: set[int], halves: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks of a circle that are likely to blame.

    Of two ranks with different tags: the one with an old tag, or with another tag than other ranks had at its line; else both. Else
    the one that came to its call from where no rank did before; the one in a later round; the one that made fewer of the calls that
    are waited for, or entered its line once more; the one that most wait for. All of them where nothing tells.
    """
    # How many calls were made, and who waits for one of the two, does not tell which tag is wrong.
    if _differ_by_tag(ranks, halves):
        old = tuple(r for r in ranks if _has_an_old_tag(evidence, r, halves))
        odd = tuple(r for r in ranks if _has_another_tag_than_others(evidence, r, halves[r]))
        return next((found for found in (old, odd) if len(found) == 1), tuple(sorted(ranks)))
    alone = next((found for found in _set_apart(evidence, ranks, halves) if len(found) == 1), None)
    if alone is not None:
        return alone
    counts = Counter(c.peer for c in halves.values() if c.peer in ranks).most_common()
    if len(counts) > 1 and counts[0][1] > counts[1][1]:
        return (counts[0][0],)
    return tuple(sorted(ranks))


def _set_apart(evidence: Evidence, ranks: set[int], halves: dict[int, Collective]) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of a circle that each rule of `of_the_circle` sets apart, the surest rule first."""
    yield _with_a_new_step(evidence, ranks, halves)
    yield _is_past(evidence, ranks, halves)
    yield _made_fewer(evidence, ranks, halves, ended=True)
    yield _made_fewer(evidence, ranks, halves, ended=False)
    yield tuple(r for r in ranks if _has_entered_more(evidence, r, halves[r]))


def _differ_by_tag(ranks: set[int], halves: dict[int, Collective]) -> bool:
    """Return whether two ranks are in the two halves of one message, but for the tag."""
    calls = [halves.get(rank) for rank in sorted(ranks)]
    if len(calls) != 2 or calls[0] is None or calls[1] is None:
        return False
    one, other = calls[0], calls[1]
    is_pair = {one.peer, other.peer} == ranks and one.is_send != other.is_send
    return is_pair and one.note != other.note


def _has_an_old_tag(evidence: Evidence, rank: int, halves: dict[int, Collective]) -> bool:
    """Return whether, of two that `_differ_by_tag`, the rank has completed a call with its tag before, and its peer none with its
    own.
    """
    mine, other = halves[rank], halves[halves[rank].peer]
    used, others = ({(c.op, c.peer, c.note) for c in completed(evidence, r)} for r in (rank, mine.peer))
    return (mine.op, mine.peer, mine.note) in used and (other.op, other.peer, other.note) not in others


def _has_another_tag_than_others(evidence: Evidence, rank: int, call: Collective) -> bool:
    """Return whether the other ranks that have come to a call's line as often all had one tag there, another than it has."""
    if any(map(has_forgotten, evidence.ranks)):
        return False
    at_line = {r.rank: [c for c in r.collectives if c.peer != -1 and c.site == call.site] for r in evidence.ranks}
    place = len(at_line[rank]) - 1
    tags = {calls[place].note for other, calls in at_line.items() if other != rank and len(calls) > place}
    return len(tags) == 1 and call.note not in tags


def _has_entered_more(evidence: Evidence, rank: int, call: Collective) -> bool:
    """Return whether a rank has entered its call's line once more than each of two other ranks or more, each as often."""
    made = Counter(r.rank for r in evidence.ranks for c in r.collectives if c.peer != -1 and c.site == call.site)
    others = {number for other, number in made.items() if other != rank}
    return len(made) > 2 and others == {made[rank] - 1} and not any(map(has_forgotten, evidence.ranks))


def _with_a_new_step(evidence: Evidence, ranks: set[int], halves: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks that came to their call from a line from which no rank has come there else, but to other lines."""
    if any(map(has_forgotten, evidence.ranks)):
        return ()
    steps: Counter[tuple[str, str]] = Counter()
    followers: dict[str, set[str]] = defaultdict(set)
    for rank in evidence.ranks:
        for one, other in itertools.pairwise(rank.collectives):
            steps[one.site, other.site] += 1
            followers[one.site].add(other.site)
    found = []
    for number in sorted(ranks & halves.keys()):
        call = halves[number]
        before = next((c for c in reversed(evidence.ranks[number].collectives) if c.index < call.index), None)
        if before is not None and steps[before.site, call.site] == 1 and len(followers[before.site]) > 1:
            found.append(number)
    return tuple(found)


def _is_past(evidence: Evidence, ranks: set[int], halves: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks of the circle that are in a later round of the loops which they share with the one that waits for them."""
    pairs = ((evidence.ranks[halves[waiter].peer], evidence.ranks[waiter]) for waiter in ranks if waiter in halves)
    return tuple(sorted({peer.rank for peer, waiter in pairs if _is_a_round_ahead(evidence, peer, waiter)}))


def _is_a_round_ahead(evidence: Evidence, one: RankEvidence, other: RankEvidence) -> bool:
    compared = compare_ranks(evidence.sources, one, other)
    return compared.order is Order.AFTER and compared.is_counted


def _made_fewer(evidence: Evidence, ranks: set[int], halves: dict[int, Collective], *, ended: bool) -> tuple[int, ...]:
    """Return the ranks that made fewer of the halves which a rank of the circle waits for than all others at that line."""
    made: dict[str, Counter[int]] = defaultdict(Counter)  # by line, how many calls of each rank
    for rank in evidence.ranks:
        for call in rank.collectives:
            if not (ended and call.is_inside):
                made[call.site][rank.rank] += 1
    # Of a line, the two smallest counts tell the smallest of all others' for each rank.
    fewest = {line: nsmallest(2, counts.values()) for line, counts in made.items()}
    found = set()
    for waiter in ranks:
        peer, sends = halves[waiter].peer, not halves[waiter].is_send
        mine = [
            c.site
            for c in (evidence.ranks[peer].collectives if peer in ranks else ())
            if c.peer == waiter and c.is_send == sends and not (ended and c.is_inside)
        ]
        if not mine:
            continue
        line = mine[-1]
        of_others = fewest[line][1:] if made[line][peer] == fewest[line][0] else fewest[line][:1]
        if of_others and mine.count(line) < of_others[0]:
            found.add(peer)
    return tuple(sorted(found))


def completed(evidence: Evidence, rank: int) -> tuple[Collective, ...]:
    """Return what a rank has called and completed."""
    return tuple(c for c in evidence.ranks[rank].collectives if not c.is_inside and not c.dropped)


def has_forgotten(rank: RankEvidence) -> bool:
    calls = rank.collectives
    return bool(calls) and calls[0].index > 0
