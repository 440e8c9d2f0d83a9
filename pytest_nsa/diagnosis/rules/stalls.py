"""What a rank is blocked in when nothing moves: which rank is not where the others wait, and why."""

from __future__ import annotations

from pytest_nsa.diagnosis.facts import all_facts, last_seen, owning_module
from pytest_nsa.diagnosis.rules.keys import of_keys
from pytest_nsa.diagnosis.rules.pairs import is_paired
from pytest_nsa.diagnosis.rules.whys import why_of
from pytest_nsa.diagnosis.verdict import Finding, by_ranks, describe_ranks
from pytest_nsa.evidence.values import Evidence, RankEvidence
from pytest_nsa.evidence.waiting import torch_s_wait

STOPS = ("certain", "deadline", "hang_after", "failed", "host_died")


def blocked(evidence: Evidence) -> Finding | None:
    """Find the rank that is not where the others wait; with one rank, or none waiting, every rank that has a location."""
    if evidence.stop not in STOPS or evidence.moved_at_stop or not evidence.was_stalled:
        return None
    alive = [r for r in evidence.ranks if not r.finished and (r.by_us or evidence.stop == "host_died")]
    # A rank that waits for a key is waited for only where no other rank is elsewhere: that one may be to set it.
    absent = [r for r in alive if not r.is_waiting and not r.waits_for_a_key]
    if not absent:
        absent = [r for r in alive if r.waits_for_a_key]
        of_a_key = of_keys(evidence, alive, absent) if absent else None
        if of_a_key is not None:
            return of_a_key
    if not absent:
        return _all_wait(evidence, alive)
    whys = {rank.rank: why for rank in absent if (why := why_of(rank)) is not None}
    if not whys:
        return None
    rank = next(r for r in absent if r.rank in whys)
    why = whys[rank.rank]
    culprits = tuple(r for r, other in whys.items() if other.cause == why.cause)
    served = tuple(r for r in culprits if _waits_in_a_thread(evidence.ranks[r]))
    if len(served) < len(culprits):  # these get what they wait for when another rank answers their thread
        culprits = tuple(r for r in culprits if r not in served)
        rank, why = evidence.ranks[culprits[0]], whys[culprits[0]]
    # One that waits for a lock which it holds itself holds up all the others that want it.
    themselves = tuple(r for r in culprits if r in whys[r].holders)
    if themselves:
        culprits, rank = themselves, evidence.ranks[themselves[0]]
        why = whys[rank.rank]
    # A rank that holds the lock and waits itself is half of the deadlock; where several wait for it, the one to look at.
    holders = tuple(h for h in why.holders if evidence.ranks[h].is_waiting)
    if holders:
        culprits = tuple(sorted({*culprits, *holders})) if len(culprits) == 1 else holders
    held_up = {r for r, other in whys.items() if themselves and set(other.holders) <= set(themselves)} | set(served)
    waiting = tuple(
        r.rank
        for r in alive
        if r.rank not in culprits and (r.rank in held_up or (r not in absent and (r.is_waiting or r.waits_for_a_key)))
    )
    n = evidence.job.world_size
    reason = f"{'each of ' if len(culprits) > 1 else ''}{describe_ranks(culprits, n)} {why.says}"
    if waiting:
        reason += f"; {describe_ranks(waiting, n)} waited for it"
    more = [(r, other) for r, other in whys.items() if other.cause != why.cause]
    for number, other in more:
        at = other.where or last_seen(evidence.ranks[number])
        reason += f"; a second cause: rank {number} {other.says} ({other.cause}, at {at})"
    return Finding(
        cause=why.cause,
        ranks=culprits,
        where=why.where or last_seen(rank),
        module=owning_module(rank),
        reason=reason,
        confidence=why.confidence,
        facts=all_facts(evidence.ranks),
    )


def _waits_in_a_thread(rank: RankEvidence) -> bool:
    """Return whether a thread of the user's, beside the one that shows what the rank does, waits for other ranks."""
    threads = [t for t in rank.threads if t is not rank.stack and t.user_frame is not None and not t.is_ours]
    return any(torch_s_wait(t.frames) for t in threads)


def _all_wait(evidence: Evidence, alive: list[RankEvidence]) -> Finding | None:
    """Find that no rank is elsewhere: all in the same collective, in different groups, or receiving from each other."""
    inside = [(r, c) for r in alive if r.board is not None and (c := r.board.waits_in) is not None]
    if len(alive) < 2 or len(inside) < len(alive):
        return None
    shown = by_ranks({r.rank: f"in {c.describe()}" for r, c in inside}, evidence.job.world_size)
    certain = True
    if any(c.peer != -1 for _, c in inside):
        halves = {r.rank: c for r, c in inside if c.peer != -1}
        if not any(is_paired(rank, c, halves) for rank, c in halves.items()):
            return None
        cause, reason, confidence = "transport_stuck", f"a send and its receive do not complete: {shown}", 0.6
        certain = False
    elif len({c.group for _, c in inside}) > 1:
        cause, reason, confidence = "group_order_deadlock", f"the ranks wait in different groups: {shown}", 0.9
    elif len({(c.group, c.sequence, c.op) for _, c in inside}) == 1 and len(inside) >= inside[0][1].size:
        cause, reason, confidence = "transport_stuck", f"all ranks are inside the same collective: {shown}", 0.7
        certain = False
        unsent = sum(r.process.get("unsent_bytes", 0) for r in alive)
        if unsent:  # handed to the kernel, and never acknowledged
            reason, confidence = f"{reason}; {unsent} bytes unsent", 0.9
    else:
        return None
    return Finding(
        cause=cause, ranks=tuple(r.rank for r, _ in inside), where=inside[0][1].site, reason=reason, certain=certain,
        confidence=confidence, facts=all_facts(evidence.ranks),
    )  # fmt: skip
