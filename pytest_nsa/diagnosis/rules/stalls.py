"""What a rank is blocked in when nothing moves: the rank that is not where the others wait, and why."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from pytest_nsa.diagnosis.facts import (
    all_facts,
    awaited,
    doing,
    find_awaited,
    last_seen,
    make_finding,
    owning_module,
    signal_text,
)
from pytest_nsa.diagnosis.rules.activity import SHOWN, Activity, computes_aside, find_activity, is_silent
from pytest_nsa.diagnosis.rules.exits import deaths, gave_up
from pytest_nsa.diagnosis.rules.messages import is_paired
from pytest_nsa.diagnosis.verdict import Finding, by_ranks, describe_ranks, stated
from pytest_nsa.diagnosis.words import polled
from pytest_nsa.evidence.values import Evidence, RankEvidence

LONG_S = 5.0  # of a stall: native code that aborts does so sooner
AT_WORK = ("infinite_loop", "native_busy", "slow", "compiling")  # causes of ranks that compute
STOPS = ("certain", "deadline", "hang_after", "failed", "host_died")


def blocked(evidence: Evidence) -> Finding | None:
    """Find the rank that is not where the others wait; with one rank, or none waiting, every rank that has a location."""
    if evidence.stop not in STOPS or evidence.moved_at_stop or not evidence.was_stalled:
        return None
    alive = [r for r in evidence.ranks if not r.finished and (r.by_us or evidence.stop == "host_died")]
    absent = [r for r in alive if (not r.is_waiting and not r.waits_for_a_key) or _cannot_leave_its_call(evidence, r)]
    activities = {
        rank.rank: _with_holders(activity, alive, evidence.job.world_size)
        for rank in absent
        if (activity := find_activity(rank)) is not None
    }
    if not activities:
        return None
    rank = next(r for r in absent if r.rank in activities)
    activity = activities[rank.rank]
    culprits = tuple(r for r, other in activities.items() if other.cause == activity.cause)
    # A rank that waits for a lock which it holds itself blocks all others that wait for it.
    themselves = tuple(r for r in culprits if r in activities[r].holders)
    if themselves:
        culprits, rank = themselves, evidence.ranks[themselves[0]]
        activity = activities[rank.rank]
    # A rank that holds the lock while it waits for the others is the culprit, not those that ask for the lock.
    holders = tuple(h for h in activity.holders if evidence.ranks[h].is_waiting)
    culprits = holders or culprits
    n = evidence.job.world_size
    does = tuple(r for r in culprits if r in activities)
    if not does:  # a holder waits in something else: its line is where it does so
        does, rank = tuple(r for r in activities if activities[r] == activity), evidence.ranks[culprits[0]]
    reason = stated(does, activity.description, n)
    condition, advice = polled(rank) if activity.cause == "sleeping" else ("", "")
    reason += condition
    for holder in (h for h in culprits if h not in does):
        reason += f"; rank {holder} waits {doing(evidence.ranks[holder])}"
    more = [(r, other) for r, other in activities.items() if other.cause != activity.cause]
    for number, other in more:
        at = other.where or last_seen(evidence.ranks[number])
        reason += f"; a second cause: rank {number} {other.description} ({other.cause}, at {at})"
    found = make_finding(
        evidence, activity.cause, [evidence.ranks[r] for r in culprits], reason, SHOWN,
        where=activity.where or last_seen(rank), module=owning_module(rank),
    )  # fmt: skip
    return replace(found, advice=advice)


def _with_holders(activity: Activity, ranks: Sequence[RankEvidence], world_size: int) -> Activity:
    """Return what a rank is blocked in; if it polls for a lock, with the ranks that hold one while they wait in a call."""
    holders = [r for r in ranks if r.is_waiting and r.process.get("holds_locks")]
    if not activity.is_of_unknown_file or not holders:
        return activity
    held = by_ranks({r.rank: f"holds {' and '.join(r.process['holds_locks'])}" for r in holders}, world_size)
    return replace(activity, description=f"{activity.description}, and {held}", holders=tuple(r.rank for r in holders))


def _cannot_leave_its_call(evidence: Evidence, rank: RankEvidence) -> bool:
    """Return whether nothing but the GIL, which a thread holds, keeps a rank in its call: another rank has left it, or the thread
    computes.
    """
    call = awaited(rank)
    if call is None or not is_silent(rank):
        return False
    has_ended = any(c.left > 0 for r in evidence.ranks if r is not rank for c in r.collectives if c.place == call.place)
    return computes_aside(rank) or (call.peer == -1 and has_ended)


def late(evidence: Evidence) -> Finding | None:
    """Find a rank at work for which others waited until their time limit: that it never ends was not observed."""
    found = gave_up(evidence)
    if found is None:
        return None
    ranks = [evidence.ranks[r] for r in found.ranks]
    activities = [find_activity(rank) for rank in ranks if not rank.finished]
    if len(activities) < len(ranks) or any(a is None or a.cause not in AT_WORK for a in activities):
        return None
    who = describe_ranks(found.ranks, evidence.job.world_size)
    return replace(
        found, reason=f"{found.reason}; {who} {'was' if len(ranks) == 1 else 'were'} at work at {found.where}",
        facts=(*found.facts, *all_facts(tuple(ranks))),
    )  # fmt: skip


def aborted(evidence: Evidence) -> Finding | None:
    """Find what a rank was blocked in when SIGABRT ended it, long after it had stalled: a watchdog or an operator sent it."""
    dead = deaths(evidence)
    if not dead or dead[0].signal != signal.SIGABRT or evidence.stalled_s < LONG_S:
        return None
    found = blocked(evidence)
    if found is None:
        return None
    ended = f"after {evidence.stalled_s:.0f} s, {signal_text(dead[0].signal)} ended rank {dead[0].rank}"
    return replace(found, reason=f"{found.reason}; {ended}")


def in_transit(evidence: Evidence) -> Finding | None:
    """Find that every rank waits and nothing is missing: all are in one collective, or a send and its receive are both there.

    Never certain: a large message may be in progress.
    """
    if evidence.stop not in STOPS or evidence.moved_at_stop or not evidence.was_stalled:
        return None
    alive = [r for r in evidence.ranks if not r.finished]
    calls = find_awaited(r for r in alive if r.is_waiting)
    if len(calls) < max(2, len(alive)):
        return None
    first = next(iter(calls.values()))
    pending = {rank: c for rank, c in calls.items() if c.peer != -1}
    if pending and any(is_paired(rank, c, pending) for rank, c in pending.items()):
        reason = "a send and its receive do not complete"
    elif not pending and len({c.place for c in calls.values()}) == 1 and len(calls) >= first.size:
        reason = "all ranks are inside the same collective"
    else:
        return None
    reason += f": {by_ranks({rank: f'in {c.describe()}' for rank, c in calls.items()}, evidence.job.world_size)}"
    unsent = sum(r.process.get("unsent_bytes", 0) for r in alive)  # handed to the kernel, and not acknowledged
    return Finding(
        cause="transport_stuck", ranks=tuple(calls), where=first.site, confidence=0.9 if unsent else 0.7,
        reason=reason + (f"; {unsent} bytes unsent" if unsent else ""), facts=all_facts(evidence.ranks),
    )  # fmt: skip
