"""Slow progress: how slow, which rank the others wait for, and whether the autograd graph explains it."""

from __future__ import annotations

from pytest_nsa.diagnosis.facts import make_finding
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.diagnosis.words import describe_progress, describe_rate
from pytest_nsa.evidence.values import Evidence, RankEvidence

MANY_NODES = 20_000
SHARE = 0.5  # share of a forward's nodes that one module makes
RECENT = 20  # collectives, and all in the last seconds
WINDOW_S = 5.0
OFTEN = 0.7
LATE = 0.4  # of the time
_ENGINE = "_engine_run_backward"


def graph_explosion(evidence: Evidence) -> Finding | None:
    """Find ranks at work in a forward or backward with many autograd nodes, mostly of one module."""
    if evidence.stop not in ("deadline", "hang_after", "host_died", "certain"):
        return None
    found = [r for r in evidence.ranks if not r.finished and _many_nodes(r)]
    if not found:
        return None
    rank = found[0]
    assert rank.board is not None
    n, module = rank.board.numbers, rank.board.nodes_module
    total = max(n["nodes"], n["nodes_owned"])
    reason = f"{module} makes {n['nodes_owned']:,.0f} of the forward's {total:,.0f} autograd nodes; {describe_progress(rank)}"
    return make_finding(evidence, "graph_explosion", found, reason, 0.8, module=module)


def _many_nodes(rank: RankEvidence) -> bool:
    board = rank.board
    if board is None or board.phase not in ("forward", "backward"):
        return False
    owned, total = board.numbers.get("nodes_owned", 0.0), board.numbers.get("nodes", 0.0)
    if owned < MANY_NODES or owned < SHARE * total:
        return False
    works = rank.process.get("wants_cpu") or rank.process.get("cpu_share", 0.0) > SHARE or rank.moved_at_stop
    stack = rank.stack
    in_engine = stack is None or board.phase == "forward" or stack.frames[0].function == _ENGINE
    return bool(works and in_engine)


def straggler(evidence: Evidence) -> Finding | None:
    """Find that the ranks move, and one is last in nearly every collective, while the others wait for most of the time."""
    if evidence.stop not in ("deadline", "host_died") or not evidence.moved_at_stop:
        return None
    last, waited = _always_last(evidence), _find_awaited_rank(evidence)
    late = last if waited is None or (last is not None and last[0] == waited[0]) else waited  # who is waited for now
    if late is None:
        return None
    return make_finding(evidence, "straggler", [evidence.ranks[rank] for rank in late[0]], late[1], 0.7)


def _always_last(evidence: Evidence) -> tuple[tuple[int, ...], str] | None:
    """Return the rank that was last in the ranks' latest collectives, and by how much."""
    by_place: dict[tuple[str, int], dict[int, float]] = {}
    for rank in evidence.ranks:
        for c in rank.collectives:
            if c.peer == -1 and not c.group.startswith("ddp"):  # DDP makes these calls by itself, once a bucket
                by_place.setdefault(c.place, {})[rank.rank] = c.entered
    calls = [(min(e.values()), e) for e in by_place.values() if len(e) == len(evidence.ranks)]
    whole = sorted(calls, key=lambda call: call[0])
    if not whole:
        return None
    # Of short steps, more count: on a busy machine one rank is last in several in a row by chance.
    since = whole[-1][0] - WINDOW_S
    whole = [call for place, call in enumerate(whole) if call[0] >= since or place >= len(whole) - RECENT]
    spans = [(max(e.values()) - min(e.values()), max(e, key=lambda r: e[r])) for _, e in whole]
    if len(spans) < 3:
        return None
    waited = sum(span for span, _ in spans)
    time = max(max(e.values()) for _, e in whole) - whole[0][0]
    if waited < LATE * time:
        return None
    blame: dict[int, float] = {}
    for span, last in spans:
        blame[last] = blame.get(last, 0.0) + span
    culprit, most = max(blame.items(), key=lambda entry: entry[1])
    if most < OFTEN * waited:
        return None
    count = sum(last == culprit for _, last in spans)
    return (culprit,), (
        f"rank {culprit} came last to {count} of the last {len(spans)} collectives; the others waited for it "
        f"{min(100.0, 100 * most / max(time, 1e-9)):.0f}% of the time"
    )


def _find_awaited_rank(evidence: Evidence) -> tuple[tuple[int, ...], str] | None:
    """Find that the others are blocked in a collective that a rank which makes progress has not reached."""
    waiting = [r for r in evidence.ranks if not r.finished and not r.moved_at_stop and r.is_waiting]
    moving = tuple(r.rank for r in evidence.ranks if not r.finished and r.moved_at_stop)
    if not waiting or not moving or evidence.waits_s < 1.5:
        return None
    who = describe_ranks(moving, evidence.job.world_size)
    text = f"the others have waited for {who} for {evidence.waits_s:.1f} s; it makes progress, and has not arrived"
    return moving, text


def slow(evidence: Evidence) -> Finding | None:
    """Find that the deadline passed while the ranks still moved."""
    if evidence.stop != "deadline" or not evidence.moved_at_stop:
        return None
    moving = [r for r in evidence.ranks if not r.finished and r.moved_at_stop]
    moving = moving or [r for r in evidence.ranks if not r.finished] or list(evidence.ranks)
    reason = f"the ranks still made progress at the time limit: {describe_rate(evidence)}"
    return make_finding(evidence, "slow", moving, reason, 0.8, module="")
