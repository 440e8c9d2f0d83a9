"""Unpaired sends and receives, where every rank waits or has ended its test."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from pytest_nsa.diagnosis.explain.choose import explain
from pytest_nsa.diagnosis.explain.edits import Calls, Edit
from pytest_nsa.diagnosis.explain.messages import ended, is_collective
from pytest_nsa.diagnosis.facts import STOPS, all_facts, find_awaited, has_lost_calls, last_seen, rings
from pytest_nsa.diagnosis.rules.calls import make_calls_finding
from pytest_nsa.diagnosis.rules.exits import have_own_errors
from pytest_nsa.diagnosis.verdict import Finding, by_ranks, describe_ranks, stated
from pytest_nsa.diagnosis.words import because, describe_awaited, each_call, list_terms
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.collectives import any_can_complete
from pytest_nsa.evidence.values import Evidence

SLOW = 1e8  # bytes a second
IN_ONE_GROUP = "send and receive in one group: messages of two groups do not meet"


def unpaired(evidence: Evidence) -> Finding | None:
    """Find that a rank waits in a send or receive that no rank matches."""
    entered = held_in_messages(evidence)
    if entered is None:
        return None
    found = _dropped(evidence, entered) or finding_of_messages(evidence, entered)
    halves = _in_other_groups(evidence, entered)
    if found is None or not halves:
        return found
    return replace(found, reason=f"{halves}; {found.reason}", advice=IN_ONE_GROUP)


def held_in_messages(evidence: Evidence) -> Calls | None:
    """Return the call that each rank waits in, or its end, where every rank waits or has ended and no call can
    complete.

    None where no rank waits for a message.
    """
    if evidence.stop not in (*STOPS, "left_alone") or not evidence.was_stalled:
        return None
    alive = [r for r in evidence.ranks if not r.finished]
    waits = find_awaited(alive)
    pending = {rank: c for rank, c in waits.items() if c.peer != -1}
    if not pending or len(waits) < len(alive) or any(not r.is_waiting for r in alive):
        return None
    if have_own_errors(evidence.ranks):
        return None
    if any_can_complete((c for c in waits.values() if c.peer == -1), rings(evidence)):
        return None
    if any(is_paired(rank, c, pending) or _is_long(c, evidence.stalled_s) for rank, c in pending.items()):
        return None  # it may be in progress
    return waits | {r.rank: ended(r) for r in evidence.ranks if r.finished}


def finding_of_messages(evidence: Evidence, entered: Calls, among: Collection[int] = ()) -> Finding | None:
    """Return the finding that explains why ranks wait in ``entered``, one or more of them in sends or receives.

    ``among``: the ranks that it may name, () for all.
    """
    found = explain(evidence, entered, among)
    if found is None:
        return None
    if found.candidate.owed is None:
        return make_calls_finding(evidence, entered, found)
    n, owed, ranks = evidence.job.world_size, found.candidate.owed, found.candidate.ranks
    pending = {rank: c for rank, c in sorted(entered.items()) if c.peer != -1}
    blames_waiter = found.candidate.edit is not Edit.UNANSWERED
    victims = {rank: c for rank, c in pending.items() if rank not in ranks} or pending
    reason = f"receives and sends do not pair: {each_call(pending if blames_waiter else victims, n)}"
    if found.candidate.is_for_all and len(ranks) > 1:
        reason += f"; {describe_ranks(ranks, n)} wait for each other, and none makes the matching call first"
    elif blames_waiter:
        reason += f"; no call matches that of {describe_ranks(ranks, n)}"
        waiting = tuple(rank for rank, c in pending.items() if c.peer in ranks and rank not in ranks)
        if waiting and found.candidate.edit is Edit.MISDIRECTED:
            reason += f"; {stated(waiting, 'waits for', n)} {describe_ranks(ranks, n)}"
    else:
        reason += f"; {describe_awaited(evidence, ranks, entered, instead_of='the matching call')}"
    collectives = {
        rank: c for rank, c in sorted(entered.items()) if is_collective(c) and (blames_waiter or rank not in ranks)
    }
    reason += f"; {each_call(collectives, n)}" if collectives else ""
    call, where = owed.call, owed.call.site
    if not blames_waiter and owed.was_skipped:
        call = owed.answers[-1]
        where = call.site
        reason += f"; the other half is like {call.describe()}"
    elif ranks[0] in pending:
        call = pending[ranks[0]]
        where = last_seen(evidence.ranks[ranks[0]]) or call.site
    terms = list_terms(found, n)
    return Finding(
        cause="p2p_unmatched", ranks=ranks, where=where, called_from=next(iter(call.way[1:]), ""),
        reason=reason + because(terms), certain=found.is_certain, is_permanent=True,
        confidence=round(found.probability, 2), facts=all_facts(evidence.ranks), terms=terms,
    )  # fmt: skip


def is_paired(rank: int, call: Collective, pending: Calls) -> bool:
    """Return whether the peer is in the matching call in the same group: messages of two groups never pair."""
    other = pending.get(call.peer)
    if other is None or other.peer != rank or (other.note, other.group) != (call.note, call.group):
        return False
    return {call.is_send, other.is_send} == {True, False}


def _in_other_groups(evidence: Evidence, entered: Calls) -> str:
    """Return that two ranks are in the halves of one message, in different groups of the same ranks; '' where none are."""
    for rank, call in sorted(entered.items()):
        other = entered.get(call.peer)
        if other is None or other.peer != rank or not call.is_send or not other.is_receive or call.group == other.group:
            continue
        fits = (call.note, call.dtype, call.count) == (other.note, other.dtype, other.count)
        if fits and evidence.members(call.group) == evidence.members(other.group):
            sends, receives = (
                f"rank {rank} sends in group {call.group}",
                f"rank {call.peer} receives in group {other.group}",
            )
            return f"the halves of a message are in different groups: {sends}, {receives}"
    return ""


def _is_long(call: Collective, stalled_s: float) -> bool:
    """Return whether a message is so large that a slow link may still transfer it."""
    bits = re.search(r"\d+", call.dtype)  # of float32, bfloat16, float8_e4m3fn
    return call.count * (int(bits[0]) / 8 if bits else 1) > SLOW * max(stalled_s, 1.0)


def _dropped(evidence: Evidence, entered: Calls) -> Finding | None:
    """Find ranks that dropped the Work of the call that would match what other ranks wait in, without a wait.

    The messages between two ranks, in one group and with one tag, pair in their order.
    """
    dropped = {}
    for waiter, call in entered.items():
        if not 0 <= call.peer < len(evidence.ranks):
            continue
        kind = (call.group, call.note)
        ends = (evidence.ranks[waiter], call.peer, call.is_send), (evidence.ranks[call.peer], waiter, not call.is_send)
        made, answers = (
            [c for c in rank.collectives if (c.peer, c.is_send, c.group, c.note) == (peer, sends, *kind)]
            for rank, peer, sends in ends
        )
        # A ring that lost its first calls cannot number them: take the latest.
        number = len(answers) - 1 if has_lost_calls(evidence) else [c.index for c in made].index(call.index)
        if 0 <= number < len(answers) and answers[number].dropped:
            dropped[call.peer] = answers[number]
    return _dropped_finding(evidence, dropped, entered, certain=True) if dropped else None


def lost_messages(evidence: Evidence) -> Finding | None:
    """Find that all ranks wait, after some dropped the Work of a send or receive. A suspicion, never certain.

    The unfinished message may block the connection, so that a call that all ranks have entered does not complete either.
    """
    alive = [r for r in evidence.ranks if not r.finished]
    dropped = {r.rank: c for r in alive for c in r.collectives if c.dropped and c.peer != -1}
    if evidence.stop not in (*STOPS, "left_alone") or not dropped or any(not r.is_waiting for r in alive):
        return None
    waits = find_awaited(alive)
    return _dropped_finding(evidence, dropped, waits, certain=False)


def _dropped_finding(evidence: Evidence, dropped: Calls, waits: Calls, *, certain: bool) -> Finding:
    n, first = evidence.job.world_size, dropped[min(dropped)]
    began = by_ranks({rank: f"began {c.describe()}" for rank, c in dropped.items()}, n)
    return Finding(
        cause="p2p_unmatched", ranks=tuple(sorted(dropped)), where=first.site, called_from=next(iter(first.way[1:]), ""),
        reason=f"{began} and dropped its Work; gloo then forgets the message; {each_call(waits, n)}",
        certain=certain, confidence=0.95 if certain else 0.7, facts=all_facts(evidence.ranks),
        advice="keep the Work that isend or irecv returns, and wait for it",
    )  # fmt: skip
