"""Where a rank stands when nothing moves: which rank is not where the others wait, and why it stands there."""

from __future__ import annotations

import re

from pytest_nsa.diagnosis.facts import all_facts, last_seen, owning_module, user_frame
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence import Evidence, RankEvidence
from pytest_nsa.watch.stacks import Frame

STOPS = ("deadline", "hang_after", "failed", "host_died")
BUSY = 0.5  # of a core, over the sample
STARVED = 0.15  # of a core, for a rank that is runnable at every look
SILENT_S = 0.3  # the heartbeat beats every 0.05 s
_LOCK = re.compile(r"\.acquire\(|\bwith\b.*lock|\.wait\(|\.join\(|\.get\(|\.result\(", re.IGNORECASE)
_LOCK_FILES = ("/threading.py", "/queue.py", "/concurrent/futures/", "/multiprocessing/synchronize.py")
_COMPILERS = ("torch/_inductor/", "torch/_dynamo/", "torch/_functorch/", "/triton/")


def standing(evidence: Evidence) -> Finding | None:
    """The rank that is not where the others wait; with one rank, or none waiting, every rank that stands somewhere."""
    if evidence.stop not in STOPS or evidence.moved_at_stop:
        return None
    alive = [r for r in evidence.ranks if not r.finished and (r.by_us or evidence.stop == "host_died")]
    absent = [r for r in alive if not r.is_waiting]
    if not absent:
        return _all_wait(evidence, alive)
    causes = {rank.rank: _why(rank) for rank in absent}
    known = [rank for rank in absent if causes[rank.rank][0]]
    if not known:
        return None
    rank = known[0]
    cause, what, confidence = causes[rank.rank]
    culprits = tuple(r.rank for r in absent if causes[r.rank][0] == cause)
    waiting = [r for r in alive if r.is_waiting]
    reason = f"{describe_ranks(culprits, evidence.job.world_size)} {what}"
    if waiting:
        reason += f"; {describe_ranks(tuple(r.rank for r in waiting), evidence.job.world_size)} waited for it"
    return Finding(
        cause=cause,
        ranks=culprits,
        where=last_seen(rank),
        module=owning_module(rank),
        reason=reason,
        # A lock can only be released by another thread: where there is none, nobody will.
        certain=cause == "lock_deadlock" and all(t.is_main or t.is_ours for t in rank.threads),
        confidence=confidence,
        facts=all_facts(evidence.ranks),
    )


def _why(rank: RankEvidence) -> tuple[str, str, float]:
    """(cause, what the rank does, confidence); '' when nothing says why."""
    process, stack = rank.process, rank.stack
    state, cpu = process.get("state", "?"), process.get("cpu_share", 0.0)
    frame = user_frame(rank)
    if state in ("T", "t"):
        return "rank_stopped", f"is stopped (state {state}): SIGSTOP or a debugger", 0.95
    files = [f.file for f in stack.frames] if stack else []
    if any(part in file for file in files for part in _COMPILERS):
        return "compiling", "compiles", 0.7
    if any("torch/utils/data/dataloader.py" in file for file in files[:6]):
        return "dataloader_stuck", "waits for its data loader", 0.85
    if any(file.endswith("/subprocess.py") for file in files[:4]):
        return (
            "child_process",
            f"waits for a child process: {', '.join(process.get('children', ())) or 'unknown'}",
            0.85,
        )
    if cpu >= BUSY or (process.get("wants_cpu") and cpu >= STARVED):
        return _why_busy(rank, frame)
    source = frame.source if frame else ""
    wchan = process.get("wchan", "")
    if "sleep" in source or "nanosleep" in wchan:
        return "sleeping", "sleeps", 0.8
    if state == "D" or any(
        part in wchan for part in ("pipe", "fifo", "nfs", "unix_stream", "tcp_recv", "wait_for_partner")
    ):
        return "io_stuck", f"waits for I/O ({wchan or 'state D'})", 0.8
    if (files and files[0].endswith(_LOCK_FILES)) or any(part in (files[0] if files else "") for part in _LOCK_FILES):
        return "lock_deadlock", "waits for a lock that is not released", 0.9
    if _LOCK.search(source) or (
        "futex" in wchan and frame is not None and stack is not None and stack.frames[0] == frame
    ):
        return "lock_deadlock", "waits for a lock that is not released", 0.9 if _LOCK.search(source) else 0.7
    board = rank.board
    if board is not None and board.phase == "backward" and not board.numbers["gradients"]:
        return "backward_deadlock", "stands in backward before any gradient", 0.6
    return "", "", 0.0


def _why_busy(rank: RankEvidence, frame: Frame | None) -> tuple[str, str, float]:
    if rank.beat_age_s is not None and rank.beat_age_s > SILENT_S:
        return "gil_held", "holds the interpreter's lock in native code", 0.8
    stack = rank.stack
    in_python = stack is not None and frame is not None and stack.frames[0] == frame
    if in_python:
        return "infinite_loop", "runs in Python without making progress", 0.8
    return "native_busy", "is busy in native code", 0.6


def _all_wait(evidence: Evidence, alive: list[RankEvidence]) -> Finding | None:
    """Nobody is elsewhere: all in the same collective, in different groups, or receiving from each other."""
    inside = [(r, r.board.inside[0]) for r in alive if r.board is not None and r.board.inside]
    if len(alive) < 2 or len(inside) < len(alive):
        return None
    ranks = tuple(r.rank for r, _ in inside)
    shown = "; ".join(f"rank {r.rank} in {c.describe()}" for r, c in inside)
    if any(c.peer != -1 or c.op.startswith("recv") for _, c in inside):
        cause, reason, confidence = "p2p_unmatched", f"receives and sends do not pair: {shown}", 0.85
    elif len({c.group for _, c in inside}) > 1:
        cause, reason, confidence = (
            "group_order_deadlock",
            f"the ranks wait in different groups: {shown}",
            0.9,
        )
    elif len({(c.group, c.sequence, c.op) for _, c in inside}) == 1:
        cause, reason, confidence = (
            "transport_stuck",
            f"all ranks are inside the same collective: {shown}",
            0.7,
        )
    else:
        return None
    return Finding(
        cause=cause, ranks=ranks, where=inside[0][1].site, reason=reason, certain=cause != "transport_stuck",
        confidence=confidence, facts=all_facts(evidence.ranks),
    )  # fmt: skip
