"""Sends and receives without their other half: by the chain of ranks that wait for each other, the rank that it ends at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pytest_nsa.diagnosis.facts import all_facts, last_seen
from pytest_nsa.diagnosis.rules.blame import rings
from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.rules.order import STOPS, awaited, of_a_shift, of_rounds
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
    n = evidence.job.world_size
    apart = out_of_their_round(evidence, waits)
    elsewhere = of_a_shift(evidence) or of_rounds(evidence, apart, _in_words(evidence, waits))
    if elsewhere is not None:
        return elsewhere
    ends = {rank: _end(evidence, rank, halves) for rank in halves}
    outside = {end for found in ends.values() for end in found if end not in halves}
    if outside and all(_has_made_its_half(evidence, end, halves) for end in outside):
        return _misdirected(evidence, halves)
    if apart is not None:
        outside &= set(apart.ranks)
    culprits = (apart.ranks if apart is not None else tuple(sorted(outside))) or _of_the_circle(
        evidence, {r for found in ends.values() for r in found}, halves
    )
    more = _sent_more(evidence, halves, outside) or _asked_for_more(evidence, halves)
    if more is not None:
        return more
    culprits = _unasked(evidence, outside, waits, halves) or culprits
    first = evidence.ranks[culprits[0]]
    mine = waits.get(culprits[0])
    victims = {rank: c for rank, c in sorted(halves.items()) if rank not in culprits}
    if first.finished:
        does = "ended its test without the other half"
    elif mine is not None and len({waits[r].shape for r in culprits if r in waits}) > 1:
        does = f"do not meet: {_in_words(evidence, {r: waits[r] for r in culprits if r in waits})}"
    elif mine is not None:
        does = f"{'each ' if len(culprits) > 1 else ''}waits in {mine.describe()}"
    else:
        does = f"{'each ' if len(culprits) > 1 else ''}is at {last_seen(first)}"
    who = describe_ranks(culprits, n)
    reason = f"receives and sends do not pair: {_in_words(evidence, victims or halves)}"
    if victims:
        reason += f"; {who} {does}"
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


def _has_made_its_half(evidence: Evidence, rank: int, halves: dict[int, Collective]) -> bool:
    """Return whether a rank that others wait for has sent and received at their lines as often as they have tried to: it left
    nothing out, and they address another rank than theirs.
    """
    for waiter, call in halves.items():
        if call.peer != rank:
            continue
        mine, theirs = _exchanges(evidence, rank), _exchanges(evidence, waiter)
        way_out = call.op.startswith("send")
        if not _is_addressed_by_another(evidence, waiter, call, halves):
            return False
        tried = theirs[way_out, call.site]
        other_halves = sum(mine[key] for key in theirs if key[0] != way_out)
        if mine[way_out, call.site] < tried or other_halves < tried:
            return False
    return True


def _is_addressed_by_another(evidence: Evidence, rank: int, call: Collective, halves: dict[int, Collective]) -> bool:
    """Return whether another rank than the one that ``call`` addresses is in a half that ``call`` could answer, or has entered more
    halves for ``rank`` than that has answered.
    """
    op, other_op = ("recv", "send") if call.op.startswith("send") else ("send", "recv")
    for other in evidence.ranks:
        if other.rank in (rank, call.peer):
            continue
        if other.rank in halves and any(c.is_inside and c.op.startswith(op) for c in other.collectives):
            return True
        offered = sum(c.op.startswith(op) and c.peer in (rank, ANY) for c in other.collectives)
        answered = sum(c.op.startswith(other_op) and c.peer == other.rank for c in _entered(evidence, rank))
        if offered > answered:
            return True
    return False


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
    others = [_rounds(evidence, rank, mark) for rank in before]
    is_regular = len(set(_rounds(evidence, end, mark))) == 1 and len(_rounds(evidence, end, mark)) > 2
    return tuple(sorted(before)) if before and is_regular and all(len(set(rounds)) > 1 for rounds in others) else ()


def _rounds(evidence: Evidence, rank: int, mark: Collective) -> list[tuple[tuple[str, str], ...]]:
    """Return what a rank has called and completed in each whole round, by operation and line; a round ends with a call of the
    collective ``mark``.
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


def _end(evidence: Evidence, rank: int, halves: dict[int, Collective]) -> set[int]:
    """Return the rank at which the chain of ranks that wait for each other ends, or those of the circle that it runs into."""
    way = [rank]
    while True:
        call = halves[way[-1]]
        if call.peer < 0 or call.peer >= len(evidence.ranks):  # from any rank
            return {way[-1]}
        if call.peer not in halves:
            return {call.peer}
        if call.peer in way:
            return set(way[way.index(call.peer) :])
        way.append(call.peer)


def _of_the_circle(evidence: Evidence, ranks: set[int], halves: dict[int, Collective]) -> tuple[int, ...]:
    """Return the rank of a circle that made fewer of the calls that are waited for than other ranks did of the same line; else
    the one that more ranks wait for than for any other; all of them where there is none.
    """
    for calls in (_calls, _entered):
        fewer = tuple(sorted(r for r in ranks if _made_fewer(evidence, r, ranks, halves, calls)))
        if len(fewer) == 1:
            return fewer
    for shows_it in (_has_an_old_tag, _is_out_of_its_round):
        odd = tuple(sorted(r for r in ranks if shows_it(evidence, r, halves)))
        if len(odd) == 1:
            return odd
    counts = Counter(c.peer for c in halves.values() if c.peer in ranks).most_common()
    if len(counts) > 1 and counts[0][1] > counts[1][1]:
        return (counts[0][0],)
    return tuple(sorted(ranks))


def _has_an_old_tag(evidence: Evidence, rank: int, halves: dict[int, Collective]) -> bool:
    """Return whether a rank and its peer are in the two halves of one message, but for the tag, and the rank has completed a call
    with its tag before, the peer none with its own.
    """
    mine, other = halves[rank], halves.get(halves[rank].peer)
    is_pair = other is not None and other.peer == rank and mine.op.startswith("send") != other.op.startswith("send")
    if other is None or not is_pair or mine.note == other.note:
        return False
    used, others = ({(c.op, c.peer, c.note) for c in _calls(evidence, r)} for r in (rank, mine.peer))
    return (mine.op, mine.peer, mine.note) in used and (other.op, other.peer, other.note) not in others


def _is_out_of_its_round(evidence: Evidence, rank: int, halves: dict[int, Collective]) -> bool:
    """Return whether no round between two collectives of a rank began as its latest one, with the call that it waits in."""
    call = halves[rank]
    mark = next((c for c in reversed(_calls(evidence, rank)) if c.peer == -1), None)
    if mark is None:
        return False
    *earlier, latest = _rounds(evidence, rank, mark)
    now = (*latest, (call.op, call.site))
    return bool(earlier) and all(found[: len(now)] != now for found in earlier)


def _made_fewer(
    evidence: Evidence,
    rank: int,
    ranks: set[int],
    halves: dict[int, Collective],
    calls: Callable[[Evidence, int], tuple[Collective, ...]],
) -> bool:
    """Return whether a rank made fewer of the halves that a rank of the circle waits for than all others at that line."""
    for waiter in (w for w in ranks if halves[w].peer == rank):
        op = "recv" if halves[waiter].op.startswith("send") else "send"
        mine = [c for c in calls(evidence, rank) if c.peer == waiter and c.op.startswith(op)]
        if not mine:
            continue
        line = mine[-1].site
        counts = [sum(c.site == line for c in calls(evidence, r.rank)) for r in evidence.ranks if r.rank != rank]
        others = [n for n in counts if n]
        if others and sum(c.site == line for c in mine) < min(others):
            return True
    return False


def _entered(evidence: Evidence, rank: int) -> tuple[Collective, ...]:
    """Return what a rank has called, completed or not."""
    return evidence.ranks[rank].collectives


def _calls(evidence: Evidence, rank: int) -> tuple[Collective, ...]:
    """Return what a rank has called and completed."""
    return tuple(c for c in evidence.ranks[rank].collectives if not c.is_inside)
