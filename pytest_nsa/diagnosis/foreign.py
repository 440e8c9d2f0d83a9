"""The verdict on a job of which only other tools left evidence: recorders, watchdogs, analyzers, samplers of stacks.

The evidence states calls of one number with another operation or size, an exception, and the end of a process. Counters alone prove
nothing: a verdict by them is never certain.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pytest_nsa.diagnosis.engine import Rule, diagnose, first_finding
from pytest_nsa.diagnosis.facts import last_seen, make_finding
from pytest_nsa.diagnosis.rules import absence, calls, messages, payloads, stalls
from pytest_nsa.diagnosis.rules.activity import SHOWN, find_activity
from pytest_nsa.diagnosis.rules.exits import is_victim_text
from pytest_nsa.diagnosis.verdict import Finding, Verdict, describe_ranks, stated
from pytest_nsa.evidence.board import Collective, make_board
from pytest_nsa.evidence.source import LOCATION, Sources, record_sources
from pytest_nsa.evidence.stacks import Frame, ThreadStack
from pytest_nsa.evidence.values import Evidence, RaisedException, RankEvidence
from pytest_nsa.foreign.values import ForeignCall, ForeignJob, ForeignRank
from pytest_nsa.wire.messages import Job

Payloads = dict[tuple[str, int, str], tuple[str, int]]  # (group, number, operation) -> type and count
_AMONG_MANY = 0.4  # that several ranks without evidence never came: their evidence may be elsewhere
_CONSEQUENCES = (signal.SIGTERM, signal.SIGABRT)
_CAUSES = {"missing": "missing_collective", "mismatch": "collective_mismatch", "behind": "missing_collective"}


def judge(job: ForeignJob, name: str, *, sources: bool = False) -> tuple[Verdict, Evidence]:
    """Return the verdict on a job, and the evidence in the form that reports take. ``name`` is shown as the test's.

    ``sources``: read the Python files of this machine that frames name.
    """
    evidence = build_evidence(job, name, sources=sources)
    return diagnose(evidence, _make_rules(job)), evidence


def suspect(job: ForeignJob, evidence: Evidence) -> Finding | None:
    """Return what the rules find of a job that still runs, with its evidence from `build_evidence`; None where no rule fits."""
    found, _ = first_finding(_make_rules(job), evidence)
    return found if found is not None and found.cause != "unknown" else None


def _make_rules(job: ForeignJob) -> tuple[Rule, ...]:
    raised, died, stated, absent, behind, aborted, silent, unlike = (
        _as_rule(job, rule) for rule in (_raised, _died, _stated, _absent, _behind, _aborted, _silent, _unlike)
    )
    return (
        payloads.models_differ, raised, died, calls.departed, stated, absent, behind, calls.waiting_in_different_calls,
        messages.unpaired, stalls.blocked, absence.not_entered, stalls.in_transit, payloads.wrong_numbers, aborted, unlike,
        silent, _unknown,
    )  # fmt: skip


def _with_sources(evidence: Evidence) -> Evidence:
    stacks = (rank.stack.frames for rank in evidence.ranks if rank.stack is not None)
    places = [(f.file, f.line) for frames in stacks for f in frames if f.is_user]
    lines = (LOCATION.match(place) for rank in evidence.ranks for call in rank.collectives for place in call.way)
    places += [(at["file"], int(at["line"])) for at in lines if at is not None]
    found = record_sources(evidence.folder, places, Sources(), keep=False)
    return replace(evidence, sources=found, ranks=tuple(replace(rank, sources=found) for rank in evidence.ranks))


def _as_rule(job: ForeignJob, rule: Callable[[ForeignJob, Evidence], Finding | None]) -> Rule:
    def of_evidence(evidence: Evidence) -> Finding | None:
        return rule(job, evidence)

    of_evidence.__module__, of_evidence.__name__ = __name__, rule.__name__.strip("_")
    return of_evidence


def _raised(job: ForeignJob, evidence: Evidence) -> Finding | None:
    """Find an exception of a rank that is not the report of a lost peer or of a time limit."""
    own = {r: v.error for r, v in job.ranks.items() if v.error and not is_victim_text(v.error)}
    if not own:
        return None
    first = min(own)
    ranks = [evidence.ranks[r] for r, error in sorted(own.items()) if error == own[first]]
    return make_finding(
        evidence, "rank_exception", ranks, own[first], 0.9, certain=2 * len(ranks) <= len(evidence.ranks)
    )


def _died(job: ForeignJob, evidence: Evidence) -> Finding | None:
    """Find the ranks that a signal ended: not SIGTERM, by which a launcher ends the others, nor SIGABRT."""
    return _ended(evidence, {r: v.signal for r, v in job.ranks.items() if v.signal not in (0, *_CONSEQUENCES)})


def _aborted(job: ForeignJob, evidence: Evidence) -> Finding | None:
    """Find the ranks that aborted, as NCCL's watchdog and gloo do because of another rank."""
    return _ended(evidence, {r: v.signal for r, v in job.ranks.items() if v.signal == signal.SIGABRT})


def _ended(evidence: Evidence, signals: dict[int, int]) -> Finding | None:
    if not signals:
        return None
    names = ", ".join(f"rank {r} was ended by signal {number}" for r, number in sorted(signals.items()))
    ranks, is_certain = [evidence.ranks[r] for r in sorted(signals)], signal.SIGABRT not in signals.values()
    confidence = 0.9 if is_certain else _AMONG_MANY
    return make_finding(evidence, "rank_died", ranks, names, confidence, certain=is_certain and len(ranks) == 1)


def _stated(job: ForeignJob, evidence: Evidence) -> Finding | None:
    """Find what an analyzer, a monitored barrier or a service states: the narrowest statement, that of the fewest ranks."""
    known = [s for s in job.statements if s.ranks and max(s.ranks) < len(evidence.ranks)]
    if not known:
        return None
    first = min(known, key=lambda s: (s.kind != "mismatch", len(s.ranks)))
    who = describe_ranks(first.ranks, evidence.job.world_size)
    ranks = [evidence.ranks[r] for r in first.ranks]
    return make_finding(
        evidence, _CAUSES[first.kind], ranks, f"{who}: {first.text}", 0.8, where=first.where or last_seen(ranks[0])
    )


def _absent(job: ForeignJob, evidence: Evidence) -> Finding | None:
    """Find the ranks without a pending call, or without a dump, for which others wait in a group of both.

    Where the dumps of most ranks have no pending call, those that wait have made one call more.
    """
    waited = {r: v.pending for r, v in job.ranks.items() if v.pending}
    idle = [
        r for r in range(len(evidence.ranks)) if r not in waited and not (r in job.ranks and job.ranks[r].has_pending)
    ]
    in_waits = {c.group: evidence.members(c.group) for calls_of in waited.values() for c in calls_of}
    needed = [r for r in idle if any(r in members for members in in_waits.values())]
    if not waited or not needed:
        return None
    without = [r for r in needed if r not in job.ranks or not job.ranks[r].has_dump]
    if len(needed) - len(without) > len(waited):
        call = next(iter(waited.values()))[-1]
        ranks = [evidence.ranks[r] for r in sorted(waited)]
        who = describe_ranks(tuple(sorted(waited)), len(evidence.ranks))
        reason = f"{who} entered {call.op} #{call.number}, which others ended without"
        return make_finding(evidence, "extra_collective", ranks, reason, 0.6, where=_where(call) or last_seen(ranks[0]))
    missed = min(
        (c for calls_of in waited.values() for c in calls_of if needed[0] in in_waits[c.group]),
        key=lambda c: (c.peer != -1, c.number),
    )
    ranks = [evidence.ranks[r] for r in needed]
    who = describe_ranks(tuple(needed), evidence.job.world_size)
    reason = f"{who} never entered {missed.op} #{missed.number}, where others wait"
    if without:
        reason += f"; {describe_ranks(tuple(without), evidence.job.world_size)} left no dump"
    activity = next((found for rank in ranks if (found := find_activity(rank)) is not None), None)
    if activity is not None:
        where = activity.where or last_seen(ranks[0])
        text = stated(tuple(needed), activity.description, evidence.job.world_size)
        return make_finding(evidence, activity.cause, ranks, text, SHOWN, where=where)
    where = last_seen(ranks[0]) if ranks[0].stack is not None else _where(missed)
    return make_finding(
        evidence,
        "missing_collective",
        ranks,
        reason,
        _AMONG_MANY if len(without) > 1 else 0.6 if without else 0.8,
        where=where,
    )


def _behind(job: ForeignJob, evidence: Evidence) -> Finding | None:
    """Find the ranks that have completed the fewest calls in each of their groups, and fewer than another rank in one.

    A call completes on a rank when every member has begun it. So a rank that is behind another waits for none that is ahead.
    Groups with messages are skipped: their counters also count sends and receives. Where no call is pending no rank waits: the
    dumps are of different moments.
    """
    pairs = {c.group for v in job.ranks.values() for c in v.calls if c.peer != -1}
    by_group: dict[str, dict[int, int]] = {}
    for r, values in job.ranks.items():
        for group, counts in values.counts.items():
            if group not in pairs:
                by_group.setdefault(group, {})[r] = counts.completed
    lowest = {r for of in by_group.values() for r, n in of.items() if n < max(of.values())}
    ahead = {r for of in by_group.values() for r, n in of.items() if n > min(of.values())}
    found = sorted(lowest - ahead)
    if not found or 2 * len(found) > len(evidence.ranks) or not any(v.has_pending for v in job.ranks.values()):
        return None
    group, of = next((g, of) for g, of in by_group.items() if found[0] in of and of[found[0]] < max(of.values()))
    who = describe_ranks(tuple(found), evidence.job.world_size)
    reason = f"{who} completed the fewest calls in each group; in group {group} {of[found[0]]}, others up to {max(of.values())}"
    ranks = [evidence.ranks[r] for r in found]
    return make_finding(evidence, "device_busy", ranks, reason, 0.6, where=last_seen(ranks[0]))


def _unlike(job: ForeignJob, evidence: Evidence) -> Finding | None:
    """Find the ranks at another line of the program than most, as a person reads the stacks of all ranks."""
    places = {rank.rank: place for rank in evidence.ranks if rank.stack is not None and (place := last_seen(rank))}
    (usual, number), *others = Counter(places.values()).most_common() or [("", 0)]
    if not others or 2 * number <= len(evidence.ranks):
        return None
    ranks = [evidence.ranks[r] for r, place in places.items() if place != usual]
    who = describe_ranks(tuple(r.rank for r in ranks), len(evidence.ranks))
    at = last_seen(ranks[0])
    return make_finding(evidence, "unknown", ranks, f"{who}: not where most ranks wait, {usual}", _AMONG_MANY, where=at)


def _silent(job: ForeignJob, evidence: Evidence) -> Finding | None:
    """Find the ranks without a dump, where most have one: they had ended, or held the GIL, which a watchdog's thread needs."""
    have_dumps = {r for r, values in job.ranks.items() if values.has_dump}
    ranks = [rank for rank in evidence.ranks if rank.rank not in have_dumps]
    if not ranks or len(ranks) > len(have_dumps):
        return None
    who = describe_ranks(tuple(r.rank for r in ranks), len(evidence.ranks))
    reason = f"{who} left no dump, and the others do not wait in a call"
    return make_finding(evidence, "unknown", ranks, reason, _AMONG_MANY, where=last_seen(ranks[0]))


def _unknown(evidence: Evidence) -> Finding:
    places = "; ".join(f"rank {r.rank} at {place}" for r in evidence.ranks if (place := last_seen(r)))
    return Finding(cause="unknown", ranks=(), reason=f"no rule fits{f'; {places}' if places else ''}", confidence=0.0)


def missing_for_more(job: ForeignJob) -> str:
    """Return which evidence would show more, as one sentence; '' where dumps with stacks are there."""
    has_frames = any(c.frames for v in job.ranks.values() for c in v.calls) or any(v.stack for v in job.ranks.values())
    if not has_frames:
        return (
            "for lines: py-spy dump of each rank, or dumps with stacks (TORCH_FR_BUFFER_SIZE=2000 at the next launch)"
        )
    if not any(v.calls for v in job.ranks.values()):
        return "for calls: flight recorder dumps (TORCH_FR_BUFFER_SIZE=2000 at the next launch)"
    return ""


def _members(job: ForeignJob, group: str) -> tuple[int, ...]:
    known = job.groups.get(group)
    if known:
        return known
    called = {r for r, v in job.ranks.items() if any(c.group == group for c in v.calls) or group in v.counts}
    has_all = group == "0" or group.startswith("of ") or job.size == 2  # a call of one rank alone does not wait
    return tuple(range(job.size)) if has_all else tuple(sorted(called))


def build_evidence(job: ForeignJob, name: str, *, sources: bool = False) -> Evidence:
    """Return the values that the diagnosis takes: stalled ranks with the calls of their dumps. ``sources``: as `judge` has it."""
    n = job.size
    names = {g for v in job.ranks.values() for g in (*v.counts, *(c.group for c in v.calls))}
    groups = {name: _members(job, name) for name in names}
    payloads = _payloads(job)
    ranks = tuple(_rank(r, job.ranks.get(r, ForeignRank()), groups, payloads) for r in range(n))
    evidence = Evidence(
        job=Job(nodeid=name, folder=name, world_size=n, backend=job.backend), ranks=ranks, stop="hang_after", stalled_s=0.0,
        moved_at_stop=False, duration_s=0.0, started=0.0, stop_time=0.0, waits_s=0.0, refused="", lost="", folder=Path(name),
        sources=Sources(),
    )  # fmt: skip
    return _with_sources(evidence) if sources else evidence


def _payloads(job: ForeignJob) -> Payloads:
    """Return type and count of the calls for which all ranks that have them agree: a line of a log may be cut before them."""
    found: dict[tuple[str, int, str], set[tuple[str, int]]] = {}
    for call in (c for values in job.ranks.values() for c in values.calls if c.dtype and c.peer == -1):
        found.setdefault((call.group, call.number, call.op), set()).add((call.dtype, call.count))
    return {key: next(iter(payloads)) for key, payloads in found.items() if len(payloads) == 1}


def _rank(number: int, values: ForeignRank, groups: dict[str, tuple[int, ...]], payloads: Payloads) -> RankEvidence:
    pending = set(values.pending)
    in_order = sorted(values.calls, key=lambda call: (call.created, call.number))
    ring = tuple(
        _collective(i, c, payloads, is_done=c not in pending, size=len(groups[c.group])) for i, c in enumerate(in_order)
    )
    error = RaisedException(
        time=0.0, type=values.error.partition(": ")[0], message=values.error.partition(": ")[2], when="call", file="", line=0,
        function="", module="", raised_in="", chain=(), frames=values.stack,
    )  # fmt: skip
    return RankEvidence(
        rank=number, exit_code=None, signal=values.signal, exit_time=0.0,
        by_us=not values.signal, finished=False, passed=False, skipped=None,
        xfailed=None, left={}, exceptions=(error,) if values.error else (), parameter_names=(),
        board=make_board({}, ring=ring) if values.calls else None,
        beat_age_s=None, moved_at_stop=False, process={},
        threads=(ThreadStack(values.stack, is_main=True),) if values.stack else (), fatal=(), children_threads=(),
        native_symbol="", native_absent="", abort_message="", reports=(), heartbeats=(), notes=(), warnings=(), left_running=(),
        left_threads=(), quit_debugger=False, pytest_exit={}, gone=0.0, anomalies=(), modules=(),
        checksums=Path("/nonexistent"), parallel=None, groups=groups, numbers={}, folder=Path("/nonexistent"),
        sources=Sources(),
    )  # fmt: skip


def _collective(index: int, call: ForeignCall, payloads: Payloads, *, is_done: bool, size: int) -> Collective:
    own = call.dtype, call.count
    dtype, count = own if call.dtype else payloads.get((call.group, call.number, call.op), own)
    return Collective(
        index=index, op=call.op, group=call.group, sequence=call.number, dtype=dtype, count=count, site=_where(call),
        step=0, phase="", peer=call.peer, size=size, entered=call.created or float(index + 1), left=1.0 if is_done else 0.0,
        callers=" < ".join(f.describe() for f in _user(call.frames)[1:]),
    )  # fmt: skip


def _user(frames: tuple[Frame, ...]) -> list[Frame]:
    return [f for f in frames if f.is_user]


def _where(call: ForeignCall) -> str:
    found = _user(call.frames)
    return found[0].describe() if found else ""
