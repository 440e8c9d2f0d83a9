"""Sends and receives without their other half: by the chain of ranks that wait for each other, the rank that it ends at."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from heapq import nsmallest

from pytest_nsa.diagnosis.facts import all_facts, last_seen
from pytest_nsa.diagnosis.rules.blame import rings
from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.rules.order import STOPS, awaited, doing, of_a_shift, of_rounds
from pytest_nsa.diagnosis.rules.rounds import out_of_their_round
from pytest_nsa.diagnosis.verdict import Finding, by_ranks, describe_ranks
from pytest_nsa.evidence.board import ANY, Collective
from pytest_nsa.evidence.collectives import any_can_complete
from pytest_nsa.evidence.values import Evidence, RankEvidence


def unpaired(evidence: Evidence) -> Finding | None:
    """Find that a rank waits in a send or receive whose other half does not come, where every rank waits or has ended its test.

    The rank that is waited for and is not inside its half is the culprit, not its victim; of ranks that wait for each other in a
    circle, the one that most wait for, else all.
    """
    if evidence.stop not in (*STOPS, "left_alone") or not evidence.was_stalled:
        return None
    alive = [r for r in evidence.ranks if not r.finished]
    waits = {r.rank: c for r in alive if (c := awaited(r)) is not None}
    halves = {rank: c for rank, c in waits.items() if c.peer != -1}
    if not halves or len(waits) < len(alive) or any(not r.is_waiting for r in alive):
        return None
    if any(not is_victim(error) for r in evidence.ranks for error in r.exceptions):
        return None
    if any_can_complete((c for c in waits.values() if c.peer == -1), rings(evidence)):
        return None
    if any(is_paired(rank, c, halves) for rank, c in halves.items()):
        return None  # it may be under way
    apart = out_of_their_round(evidence, waits)
    elsewhere = of_a_shift(evidence) or of_rounds(evidence, apart, _in_words(evidence, waits))
    if elsewhere is not None:
        return elsewhere
    ends = _ends(halves, len(evidence.ranks))
    outside = ends - set(halves)
    waiters: dict[int, list[int]] = defaultdict(list)
    for rank, c in halves.items():
        waiters[c.peer].append(rank)
    waited_for = {rank for end in outside for rank in waiters[end]}
    if outside and waited_for <= _addressed_by_another(evidence, halves) and all(
        _has_made_its_half(evidence, end, waiters[end], halves) for end in outside
    ):  # fmt: skip
        return _misdirected(evidence, halves)
    if apart is not None:
        outside &= set(apart.ranks)
    culprits = (apart.ranks if apart is not None else tuple(sorted(outside))) or _of_the_circle(evidence, ends, halves)
    more = _sent_more(evidence, halves, outside) or _asked_for_more(evidence, halves)
    if more is not None:
        return more
    culprits = _unasked(evidence, outside, waits, halves) or _once_more(evidence, outside, halves) or culprits
    first = evidence.ranks[culprits[0]]
    mine = waits.get(culprits[0])
    victims = {rank: c for rank, c in sorted(halves.items()) if rank not in culprits}
    reason = f"receives and sends do not pair: {_in_words(evidence, victims or halves)}"
    if victims:
        reason += f"; {_what_they_do(evidence, culprits, waits)}"
    inside = mine is not None and mine.peer != -1
    where = last_seen(first) if inside else last_seen(evidence.ranks[_first_left(evidence, victims or halves, mine)])
    return Finding(
        cause="p2p_unmatched", ranks=culprits, where=where, reason=reason, certain=True, confidence=0.85,
        facts=all_facts(evidence.ranks),
    )  # fmt: skip


def _first_left(evidence: Evidence, victims: dict[int, Collective], mine: Collective | None) -> int:
    """Return the victim whose half was left out first: one that has not entered the collective that the culprit is in."""
    entered = {
        r for r in victims if mine is not None and any(c.place == mine.place for c in evidence.ranks[r].collectives)
    }
    return min(set(victims) - entered or victims)


def _in_words(evidence: Evidence, waits: dict[int, Collective]) -> str:
    return by_ranks({rank: f"in {c.describe()}" for rank, c in waits.items()}, evidence.job.world_size)


def _what_they_do(evidence: Evidence, culprits: tuple[int, ...], waits: dict[int, Collective]) -> str:
    """Return what the ranks do that others wait for, in words."""
    n = evidence.job.world_size
    who, is_one = describe_ranks(culprits, n), len(culprits) == 1
    calls = {r: waits[r] for r in culprits if r in waits}
    if all(evidence.ranks[r].finished for r in culprits):
        return f"{who} ended {'its test' if is_one else 'their tests'} without the other half"
    if len({c.shape for c in calls.values()}) > 1:
        return f"{who} do not meet: {_in_words(evidence, calls)}"
    does = {r: doing(evidence.ranks[r]) for r in culprits}
    if len(set(does.values())) > 1:
        return by_ranks(does, n)
    return f"{who} {'' if is_one else 'each '}waits {does[culprits[0]]}"


def _has_made_its_half(evidence: Evidence, rank: int, waiters: list[int], halves: dict[int, Collective]) -> bool:
    """Return whether a rank that others wait for has sent and received at their lines as often as they have tried to: it left
    nothing out, and they address another rank than theirs.
    """
    mine = _exchanges(evidence, rank)
    for waiter in waiters:
        call, theirs = halves[waiter], _exchanges(evidence, waiter)
        way_out = call.op.startswith("send")
        tried = theirs[way_out, call.site]
        other_halves = sum(mine[key] for key in theirs if key[0] != way_out)
        if mine[way_out, call.site] < tried or other_halves < tried:
            return False
    return True


def _addressed_by_another(evidence: Evidence, halves: dict[int, Collective]) -> set[int]:
    """Return the ranks for which another rank than the one that their call addresses is in a half that it could answer, or has
    entered more halves for them than they have answered.
    """
    made: Counter[tuple[bool, int, int]] = Counter()  # whether it sends, who, to or from whom
    under_way: dict[bool, list[int]] = {True: [], False: []}
    for rank in evidence.ranks:
        for call in (c for c in rank.collectives if c.peer != -1):
            sends = call.op.startswith("send")
            made[sends, rank.rank, call.peer] += 1
            # A completed receive from any rank has its message.
            if call.is_inside and (rank.rank in halves or call.peer == ANY):
                under_way[sends].append(rank.rank)
    offers: dict[tuple[bool, int], list[int]] = defaultdict(list)
    for (sends, caller, peer), number in made.items():
        if number > made[not sends, peer, caller]:
            offers[sends, peer].append(caller)
    found = set()
    for waiter, call in halves.items():
        answer = not call.op.startswith("send")
        others = itertools.chain(under_way[answer], offers[answer, waiter])
        if any(other not in (waiter, call.peer) for other in others):
            found.add(waiter)
    return found


def _exchanges(evidence: Evidence, rank: int) -> Counter[tuple[bool, str]]:
    """Return how often a rank has entered a send (True) or a receive, by its line."""
    calls = evidence.ranks[rank].collectives
    return Counter((c.op.startswith("send"), c.site) for c in calls if c.peer != -1)


def _misdirected(evidence: Evidence, halves: dict[int, Collective]) -> Finding:
    told, first = _in_words(evidence, halves), min(halves)
    return Finding(
        cause="p2p_unmatched", ranks=tuple(sorted(halves)), where=last_seen(evidence.ranks[first]),
        reason=f"receives and sends do not pair: {told}; whom they wait for has sent and received as often as they, with others",
        certain=True, confidence=0.8, facts=all_facts(evidence.ranks),
    )  # fmt: skip


def _sent_more(evidence: Evidence, halves: dict[int, Collective], outside: set[int]) -> Finding | None:
    """Find that a rank has received from anybody once for each other rank, and one of these has sent twice: it took the turn of
    the rank that still sends. None where a ring has forgotten calls: of many rounds it is not known who sent too often.
    """
    if len(outside) != 1 or any(c.peer not in outside for c in halves.values()):
        return None
    (receiver,) = outside
    received = [c for c in _calls(evidence, receiver) if c.op.startswith("recv")]
    if not received or any(c.peer != ANY for c in received) or any(_has_forgotten(r) for r in evidence.ranks):
        return None
    sent = {
        r.rank: [c for c in r.collectives if c.op.startswith("send") and c.peer == receiver] for r in evidence.ranks
    }
    sent = {rank: calls for rank, calls in sent.items() if calls}
    culprits = tuple(rank for rank, calls in sent.items() if len(calls) == 2 and rank not in halves)
    others = [len(calls) for rank, calls in sent.items() if rank not in culprits]
    if len(received) != len(sent) or len(sent) != len(evidence.ranks) - 1 or len(culprits) != 1 or set(others) != {1}:
        return None
    n, call = evidence.job.world_size, sent[culprits[0]][-1]
    reason = (
        f"{describe_ranks(culprits, n)} has sent twice to {describe_ranks((receiver,), n)}, which takes from any rank, once "
        f"for each; the others once: receives and sends do not pair: {_in_words(evidence, halves)}"
    )
    return Finding(
        cause="p2p_unmatched", ranks=culprits, where=call.site, reason=reason, certain=True, confidence=0.8,
        facts=all_facts(evidence.ranks),
    )  # fmt: skip


def _asked_for_more(evidence: Evidence, halves: dict[int, Collective]) -> Finding | None:
    """Find that a rank began a receive that it never waited for, and went on through a collective that the sender went through,
    too: that receive takes what is sent for a later one.
    """
    for rank, call in halves.items():
        calls = [c for c in evidence.ranks[rank].collectives if c.index < call.index]
        ended = (
            {c.place for c in _calls(evidence, call.peer) if c.peer == -1}
            if 0 <= call.peer < len(evidence.ranks)
            else ()
        )
        last = max((c.index for c in calls if c.peer == -1 and not c.is_inside and c.place in ended), default=-1)
        left = [
            c for c in calls
            if c.is_inside and c.index < last and (c.op, c.peer, c.note) == (call.op, call.peer, call.note)
        ]  # fmt: skip
        if not left or not call.op.startswith("recv"):
            continue
        who = describe_ranks((rank,), evidence.job.world_size)
        reason = (
            f"{who} began {left[0].describe()} and never waited for it: it takes what is sent for a later one: receives and sends "
            f"do not pair: {_in_words(evidence, halves)}"
        )
        return Finding(
            cause="p2p_unmatched", ranks=(rank,), where=left[0].site, called_from=next(iter(left[0].way[1:]), ""), reason=reason,
            certain=True, confidence=0.8, facts=all_facts(evidence.ranks),
        )  # fmt: skip
    return None


def _unasked(
    evidence: Evidence, outside: set[int], waits: dict[int, Collective], halves: dict[int, Collective]
) -> tuple[int, ...]:
    """Return the ranks that wait for one whose rounds between two collectives were all alike, the latest too, and who are in an
    earlier round than it, of rounds that differ: what they send or receive, it was not to answer.
    """
    if len(outside) != 1:
        return ()
    (end,) = outside
    mark = waits.get(end)
    if mark is None or mark.peer != -1:
        return ()
    before = {
        rank
        for rank, c in halves.items()
        if c.peer == end and all(other.place != mark.place for other in evidence.ranks[rank].collectives)
    }
    # It waits at the mark, and so its latest round is whole.
    own = _rounds(evidence, end, mark)
    is_regular = len(set(own)) == 1 and len(own) > 2
    are_few = 2 * len(halves) < len(
        evidence.ranks
    )  # where most ranks do what is new to all, it is the one that does not
    differ = all(_is_unlike_before(_rounds(evidence, rank, mark), halves[rank], are_few) for rank in before)
    return tuple(sorted(before)) if before and is_regular and differ else ()


def _once_more(evidence: Evidence, outside: set[int], halves: dict[int, Collective]) -> tuple[int, ...]:
    """Return the one rank that is in its half once more than it and the others have completed theirs at that line, where the rank
    that it waits for has made the other half as often as the others have, at theirs: a stage that expects a batch more.
    """
    waiters = [rank for rank, c in halves.items() if c.peer in outside]
    if len(waiters) != 1 or any(_has_forgotten(r) for r in evidence.ranks):
        return ()
    (waiter,) = waiters
    call = halves[waiter]
    way_out = call.op.startswith("send")
    answers = [c.site for c in _calls(evidence, call.peer) if c.peer == waiter and c.op.startswith("send") != way_out]
    if not answers:
        return ()
    numbers = set()
    for site in {call.site, answers[-1]}:
        made = Counter(
            r.rank for r in evidence.ranks for c in _calls(evidence, r.rank) if c.peer != -1 and c.site == site
        )
        if len(made) < 2:
            return ()
        numbers |= set(made.values())
    return (waiter,) if len(numbers) == 1 else ()


def _is_unlike_before(rounds: list[tuple[tuple[str, str], ...]], call: Collective, may_be_new: bool) -> bool:
    """Return whether a rank's whole rounds differ, or none began as the latest one, with the call that it waits in."""
    return len(set(rounds[:-1])) > 1 or (may_be_new and _begins_anew(rounds, call))


def _begins_anew(rounds: list[tuple[tuple[str, str], ...]], call: Collective) -> bool:
    """Return whether none of a rank's whole rounds began as the latest one, with the call that it waits in."""
    *whole, latest = rounds or [()]
    now = (*latest, (call.op, call.site))
    return bool(whole) and all(found[: len(now)] != now for found in whole)


def _rounds(evidence: Evidence, rank: int, mark: Collective) -> list[tuple[tuple[str, str], ...]]:
    """Return what a rank has called and completed, by operation and line, from each of its calls of the collective ``mark`` to the
    next; the last one is as long as it has come.
    """
    rounds: list[list[tuple[str, str]]] = [[]]
    for call in _calls(evidence, rank):
        if (call.group, call.op, call.root) == (mark.group, mark.op, mark.root) and call.peer == -1:
            rounds.append([])
        rounds[-1].append((call.op, call.site))
    return [tuple(found) for found in rounds[1:]]


def _has_forgotten(rank: RankEvidence) -> bool:
    calls = rank.collectives
    return bool(calls) and calls[0].index > 0


def is_paired(rank: int, call: Collective, halves: dict[int, Collective]) -> bool:
    """Return whether the peer is in the other half of a rank's call."""
    other = halves.get(call.peer)
    if other is None or other.peer != rank or other.note != call.note:
        return False
    return {call.op.startswith("send"), other.op.startswith("send")} == {True, False}


def _ends(halves: dict[int, Collective], world_size: int) -> set[int]:
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


def _of_the_circle(evidence: Evidence, ranks: set[int], halves: dict[int, Collective]) -> tuple[int, ...]:
    """Return the one rank of a circle that completed, else entered, fewer of the calls that are waited for than other ranks did at
    the same line; else the one with an old tag or out of its round; else the one that more ranks wait for than for any other; all
    of them where there is none.
    """
    if _differ_by_tag(
        ranks, halves
    ):  # how many calls were made, and who waits for one of the two, tells not which tag is wrong
        old = tuple(r for r in ranks if _has_an_old_tag(evidence, r, halves))
        return old if len(old) == 1 else tuple(sorted(ranks))
    for completed in (True, False):
        fewer = _made_fewer(evidence, ranks, halves, completed=completed)
        if len(fewer) == 1:
            return fewer
    odd = tuple(sorted(r for r in ranks if _is_out_of_its_round(evidence, r, halves)))
    if len(odd) == 1:
        return odd
    more = tuple(sorted(r for r in ranks if _has_entered_more(evidence, r, halves[r])))
    if len(more) == 1:
        return more
    counts = Counter(c.peer for c in halves.values() if c.peer in ranks).most_common()
    if len(counts) > 1 and counts[0][1] > counts[1][1]:
        return (counts[0][0],)
    return tuple(sorted(ranks))


def _differ_by_tag(ranks: set[int], halves: dict[int, Collective]) -> bool:
    """Return whether two ranks are in the two halves of one message, but for the tag."""
    calls = [halves.get(rank) for rank in sorted(ranks)]
    if len(calls) != 2 or calls[0] is None or calls[1] is None:
        return False
    one, other = calls[0], calls[1]
    is_pair = {one.peer, other.peer} == ranks and one.op.startswith("send") != other.op.startswith("send")
    return is_pair and one.note != other.note


def _has_an_old_tag(evidence: Evidence, rank: int, halves: dict[int, Collective]) -> bool:
    """Return whether a rank and its peer are in the two halves of one message, but for the tag, and the rank has completed a call
    with its tag before, the peer none with its own.
    """
    if not _differ_by_tag({rank, halves[rank].peer}, halves):
        return False
    mine, other = halves[rank], halves[halves[rank].peer]
    used, others = ({(c.op, c.peer, c.note) for c in _calls(evidence, r)} for r in (rank, mine.peer))
    return (mine.op, mine.peer, mine.note) in used and (other.op, other.peer, other.note) not in others


def _is_out_of_its_round(evidence: Evidence, rank: int, halves: dict[int, Collective]) -> bool:
    """Return whether no round between two collectives of a rank began as its latest one, with the call that it waits in."""
    mark = next((c for c in reversed(_calls(evidence, rank)) if c.peer == -1), None)
    return mark is not None and _begins_anew(_rounds(evidence, rank, mark), halves[rank])


def _has_entered_more(evidence: Evidence, rank: int, call: Collective) -> bool:
    """Return whether a rank has entered its call's line once more than each of two other ranks or more, each as often."""
    made = Counter(r.rank for r in evidence.ranks for c in r.collectives if c.peer != -1 and c.site == call.site)
    others = {number for other, number in made.items() if other != rank}
    return len(made) > 2 and others == {made[rank] - 1} and not any(map(_has_forgotten, evidence.ranks))


def _made_fewer(
    evidence: Evidence, ranks: set[int], halves: dict[int, Collective], *, completed: bool
) -> tuple[int, ...]:
    """Return the ranks that made fewer of the halves which a rank of the circle waits for than all others at that line."""
    made: dict[str, Counter[int]] = defaultdict(Counter)  # by line, how many calls of each rank
    for rank in evidence.ranks:
        for call in rank.collectives:
            if not (completed and call.is_inside):
                made[call.site][rank.rank] += 1
    # Of a line, the two smallest counts tell the smallest of all others' for each rank.
    fewest = {line: nsmallest(2, counts.values()) for line, counts in made.items()}
    found = set()
    for waiter in ranks:
        peer, sends = halves[waiter].peer, not halves[waiter].op.startswith("send")
        mine = [
            c.site
            for c in (evidence.ranks[peer].collectives if peer in ranks else ())
            if c.peer == waiter and c.op.startswith("send") == sends and not (completed and c.is_inside)
        ]
        if not mine:
            continue
        line = mine[-1]
        of_others = fewest[line][1:] if made[line][peer] == fewest[line][0] else fewest[line][:1]
        if of_others and mine.count(line) < of_others[0]:
            found.add(peer)
    return tuple(sorted(found))


def _calls(evidence: Evidence, rank: int) -> tuple[Collective, ...]:
    """Return what a rank has called and completed."""
    return tuple(c for c in evidence.ranks[rank].collectives if not c.is_inside)
