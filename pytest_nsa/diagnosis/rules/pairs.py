"""Sends and receives without their other half: by the chain of ranks that wait for each other, the rank that it ends at."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

from pytest_nsa.diagnosis.explain.locations import recomputes
from pytest_nsa.diagnosis.explain.source import are_of_one_function
from pytest_nsa.diagnosis.facts import STOPS, all_facts, awaited, doing, last_seen, rings
from pytest_nsa.diagnosis.rules.alone import of_a_shift, of_rounds
from pytest_nsa.diagnosis.rules.circles import completed, ends_of_chains, has_forgotten, of_the_circle
from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.rules.halves import dropped_halves, left_out_half, the_silent_one
from pytest_nsa.diagnosis.rules.shifts import out_of_their_round
from pytest_nsa.diagnosis.rules.waiters import (
    entered_alone,
    first_at_a_line,
    once_more,
    turned_to_a_stranger,
    went_on_without,
)
from pytest_nsa.diagnosis.verdict import Finding, by_ranks, describe_ranks
from pytest_nsa.evidence.board import ANY, Collective
from pytest_nsa.evidence.collectives import any_can_complete
from pytest_nsa.evidence.values import Evidence


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
    dropped = dropped_halves(evidence, halves)
    if dropped is not None:
        return dropped
    again = _made_again(evidence, halves)
    if again is not None:
        return again
    if _all_do_the_same(evidence, halves):
        return _in_a_ring(evidence, halves)
    apart = out_of_their_round(evidence, waits)
    elsewhere = of_a_shift(evidence) or of_rounds(evidence, apart, _in_words(evidence, waits))
    if elsewhere is not None:
        return elsewhere
    told = f": {_in_words(evidence, waits)}"
    beside = went_on_without(evidence, halves, waits, told) or entered_alone(evidence, waits, told)
    if beside is not None:
        return beside
    ends = ends_of_chains(halves, len(evidence.ranks))
    outside = ends - set(halves)
    waiters: dict[int, list[int]] = defaultdict(list)
    for rank, c in halves.items():
        waiters[c.peer].append(rank)
    waited_for = {rank for end in outside for rank in waiters[end]}
    if outside and waited_for <= _addressed_by_another(evidence, halves) and all(
        _has_made_its_half(evidence, end, waiters[end], halves) for end in outside
    ):  # fmt: skip
        return _misdirected(evidence, halves)
    if outside and _belong_to_each_other(evidence, outside, halves):
        return _misdirected(evidence, halves)
    if apart is not None:
        outside &= set(apart.ranks)
    culprits = (apart.ranks if apart is not None else tuple(sorted(outside))) or of_the_circle(evidence, ends, halves)
    more = _sent_more(evidence, halves, outside) or _asked_for_more(evidence, halves) or _sent_fewer(evidence, halves)
    if more is not None:
        return more
    first = first_at_a_line(evidence, waits)
    if first is not None:
        return _of_a_new_line(evidence, *first, waits)
    culprits = turned_to_a_stranger(evidence, outside, halves) or once_more(evidence, outside, halves) or culprits
    # Each of several at which a chain ends has left something out.
    silent = the_silent_one(evidence, ends, waits, halves) if len(outside) < 2 else ()
    culprits = silent or culprits
    if not outside and not silent:
        culprits = _of_another_partner(evidence, halves) or culprits
    culprit = evidence.ranks[culprits[0]]
    mine = waits.get(culprits[0])
    victims = {rank: c for rank, c in sorted(halves.items()) if rank not in culprits}
    reason = f"receives and sends do not pair: {_in_words(evidence, victims or halves)}"
    if victims:
        reason += f"; {_what_they_do(evidence, culprits, waits)}"
    inside = mine is not None and mine.peer != -1
    where = last_seen(culprit) if inside else last_seen(evidence.ranks[_first_left(evidence, victims or halves, mine)])
    half = left_out_half(evidence, culprits[0], halves)
    if half is not None:
        where = _where_it_is_waited_for(evidence, half.site, victims)
        reason += f"; {describe_ranks(culprits[:1], len(evidence.ranks))} left out {half.describe()}"
    # Of a circle, which rank is to blame is likely at best.
    is_clear = len(outside) == 1 or set(culprits) == set(halves)
    return Finding(
        cause="p2p_unmatched", ranks=culprits, where=where, reason=reason, is_permanent=True, certain=is_clear,
        confidence=0.85 if is_clear else 0.7, facts=all_facts(evidence.ranks),
    )  # fmt: skip


def _where_it_is_waited_for(evidence: Evidence, site: str, victims: dict[int, Collective]) -> str:
    """Return the line at which a rank waits for the calls that it began at ``site``, in that function; ``site`` where none does."""
    for rank in (evidence.ranks[r] for r, c in victims.items() if c.site == site):
        frame = next((f for f in rank.stack.frames if f.is_user), None) if rank.stack is not None else None
        if frame is not None and are_of_one_function(evidence.sources, frame.describe(), site):
            return frame.describe()
    return site


def _made_again(evidence: Evidence, halves: dict[int, Collective]) -> Finding | None:
    """Find a send or receive of a recomputation, which its rank has made in its forward already: its partner, which does not
    recompute, owes nothing.
    """
    again = {rank: c for rank, c in halves.items() if recomputes(evidence.ranks[rank])}
    again = {rank: c for rank, c in again.items() if 0 <= c.peer < len(evidence.ranks) and c.peer not in again}
    if not again:
        return None
    call = again[min(again)]
    shown = by_ranks({rank: f"makes {c.describe()}" for rank, c in again.items()}, evidence.job.world_size)
    return Finding(
        cause="p2p_unmatched", ranks=tuple(sorted(again)), where=call.site, called_from=next(iter(call.way[1:]), ""),
        reason=f"{shown}, a second time, during the recomputation of a checkpointed forward: {_in_words(evidence, halves)}",
        certain=True, confidence=0.9, facts=all_facts(evidence.ranks),
    )  # fmt: skip


def _all_do_the_same(evidence: Evidence, halves: dict[int, Collective]) -> bool:
    """Return whether all ranks are in a ring of sends at one line, or of receives, and none has begun the other half, too: none
    offers what another one waits for.
    """
    world_size, kinds = len(evidence.ranks), {(c.is_send, c.site) for c in halves.values()}
    if len(halves) < world_size or world_size < 3 or len(kinds) > 1:
        return False
    begun = (c for rank in evidence.ranks for c in rank.collectives if c.peer != -1 and c.is_inside)
    if any((c.is_send, c.site) not in kinds for c in begun):
        return False
    at, seen = min(halves), set[int]()
    while at in halves and at not in seen:
        seen.add(at)
        at = halves[at].peer
    return len(seen) == world_size


def _in_a_ring(evidence: Evidence, halves: dict[int, Collective]) -> Finding:
    call = halves[min(halves)]
    does = "sends to" if call.is_send else "receives from"
    return Finding(
        cause="p2p_unmatched", ranks=tuple(sorted(halves)), where=call.site, called_from=next(iter(call.way[1:]), ""),
        reason=f"each rank of a ring {does} the next first, and none makes the other half: {_in_words(evidence, halves)}",
        certain=True, confidence=0.9, facts=all_facts(evidence.ranks),
    )  # fmt: skip


def _of_a_new_line(evidence: Evidence, rank: int, call: Collective, waits: dict[int, Collective]) -> Finding:
    """Report a send or receive that one rank alone has made, at a line from which no rank had before."""
    who = describe_ranks((rank,), evidence.job.world_size)
    does = "sends" if call.is_send else "receives"
    reason = (
        f"{who} {does} at a line from which no rank did before, {call.describe()}: receives and sends do not pair: "
        f"{_in_words(evidence, waits)}"
    )
    return Finding(
        cause="p2p_unmatched", ranks=(rank,), where=call.site, called_from=next(iter(call.way[1:]), ""), reason=reason,
        certain=True, confidence=0.8, facts=all_facts(evidence.ranks),
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
        way_out = call.is_send
        tried = theirs[way_out, call.site]
        other_halves = sum(mine[key] for key in theirs if key[0] != way_out)
        if mine[way_out, call.site] < tried or other_halves < tried:
            return False
    return True


def _belong_to_each_other(evidence: Evidence, outside: set[int], halves: dict[int, Collective]) -> bool:
    """Return whether those that wait have begun both halves of an exchange whose two halves all other ranks have made with each
    other alone: a rank without a partner, or a pair that takes another pair's numbers for its own.
    """
    begun = [c for rank in halves for c in evidence.ranks[rank].collectives if c.peer != -1 and c.is_inside]
    waiting = {(c.is_send, c.site) for c in begun}
    if len(waiting) != 2 or {sends for sends, _ in waiting} != {True, False}:
        return False
    if any(c.peer not in outside for c in halves.values()):
        return False
    others = [r.rank for r in evidence.ranks if r.rank not in halves]
    made = [(r, c) for r in others for c in completed(evidence, r) if (c.is_send, c.site) in waiting]
    sent = Counter((r, c.peer) for r, c in made if c.is_send)
    received = Counter((c.peer, r) for r, c in made if not c.is_send)
    have_met = any(c.peer in halves for r in others for c in completed(evidence, r))
    return bool(sent) and sent == received and not have_met


def _addressed_by_another(evidence: Evidence, halves: dict[int, Collective]) -> set[int]:
    """Return the ranks for which another rank than the one that their call addresses is in a half that it could answer, or has
    entered more halves for them than they have answered.
    """
    under_way: dict[bool, list[int]] = {True: [], False: []}
    for rank in evidence.ranks:
        for call in (c for c in rank.collectives if c.peer != -1):
            # A completed receive from any rank has its message.
            if call.is_inside and (rank.rank in halves or call.peer == ANY):
                under_way[call.is_send].append(rank.rank)
    offers, found = _unanswered(evidence), set()
    for waiter, call in halves.items():
        answer = not call.is_send
        others = itertools.chain(under_way[answer], offers[answer, waiter])
        if any(other not in (waiter, call.peer) for other in others):
            found.add(waiter)
    return found


def _of_another_partner(evidence: Evidence, halves: dict[int, Collective]) -> tuple[int, ...]:
    """Return the one rank of a circle that waits for a rank which has left nothing out, while another one has entered more halves
    for it than it has answered: it takes the former for its partner.
    """
    offers = _unanswered(evidence)
    found = tuple(
        rank
        for rank, call in sorted(halves.items())
        if call.peer in halves
        and any(other not in (rank, call.peer) for other in offers[not call.is_send, rank])
        and _has_made_its_half(evidence, call.peer, [rank], halves)
    )
    return found if len(found) == 1 else ()


def _unanswered(evidence: Evidence) -> dict[tuple[bool, int], list[int]]:
    """Return, by whether they send and for whom, the ranks that have entered more halves than that one has answered."""
    made: Counter[tuple[bool, int, int]] = Counter()  # whether it sends, who, to or from whom
    for rank in evidence.ranks:
        made.update((c.is_send, rank.rank, c.peer) for c in rank.collectives if c.peer != -1)
    offers: dict[tuple[bool, int], list[int]] = defaultdict(list)
    for (sends, caller, peer), number in made.items():
        if number > made[not sends, peer, caller]:
            offers[sends, peer].append(caller)
    return offers


def _exchanges(evidence: Evidence, rank: int) -> Counter[tuple[bool, str]]:
    """Return how often a rank has entered a send (True) or a receive, by its line."""
    calls = evidence.ranks[rank].collectives
    return Counter((c.is_send, c.site) for c in calls if c.peer != -1)


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
    received = [c for c in completed(evidence, receiver) if c.is_receive]
    if not received or any(c.peer != ANY for c in received) or any(has_forgotten(r) for r in evidence.ranks):
        return None
    sent = {r.rank: [c for c in r.collectives if c.is_send and c.peer == receiver] for r in evidence.ranks}
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


def _sent_fewer(evidence: Evidence, halves: dict[int, Collective]) -> Finding | None:
    """Find that a rank receives from anybody, all others have gone on to a collective or to their ends, and a few of them have sent
    it fewer messages than the rest, each of which has sent as many.
    """
    if len(halves) != 1 or any(has_forgotten(r) for r in evidence.ranks):
        return None
    ((receiver, call),) = halves.items()
    if call.peer != ANY:
        return None
    sent = {
        r.rank: [c for c in r.collectives if c.is_send and c.peer == receiver]
        for r in evidence.ranks
        if r.rank != receiver
    }
    (most, number), *_ = Counter(map(len, sent.values())).most_common()
    culprits = tuple(rank for rank, calls in sent.items() if 0 < len(calls) < most)
    if len(culprits) + number != len(sent) or not culprits or number < 2 or number <= len(culprits):
        return None
    n, last = evidence.job.world_size, sent[culprits[0]][-1]
    told = by_ranks({r: f"{len(calls)} messages" for r, calls in sent.items()}, n)
    reason = (
        f"{describe_ranks((receiver,), n)} waits {doing(evidence.ranks[receiver])}; {describe_ranks(culprits, n)} has sent it "
        f"fewer than the others, which have all sent as many: {told}"
    )
    return Finding(
        cause="p2p_unmatched", ranks=culprits, where=last.site, called_from=next(iter(last.way[1:]), ""), reason=reason,
        certain=True, confidence=0.8, facts=all_facts(evidence.ranks),
    )  # fmt: skip


def _asked_for_more(evidence: Evidence, halves: dict[int, Collective]) -> Finding | None:
    """Find that a rank began a receive that it never waited for, and went on through a collective that the sender went through,
    too: that receive takes what is sent for a later one.
    """
    for rank, call in halves.items():
        calls = [c for c in evidence.ranks[rank].collectives if c.index < call.index]
        ended = (
            {c.place for c in completed(evidence, call.peer) if c.peer == -1}
            if 0 <= call.peer < len(evidence.ranks)
            else ()
        )
        last = max((c.index for c in calls if c.peer == -1 and not c.is_inside and c.place in ended), default=-1)
        left = [
            c for c in calls
            if c.is_inside and c.index < last and (c.op, c.peer, c.note) == (call.op, call.peer, call.note)
        ]  # fmt: skip
        if not left or not call.is_receive:
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


def is_paired(rank: int, call: Collective, halves: dict[int, Collective]) -> bool:
    """Return whether the peer is in the other half of a rank's call, in the same group: messages of two groups never meet."""
    other = halves.get(call.peer)
    if other is None or other.peer != rank or (other.note, other.group) != (call.note, call.group):
        return False
    return {call.is_send, other.is_send} == {True, False}
