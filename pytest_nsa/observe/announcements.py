"""Announcements of suspicions: after how long, by what the rank does in that time and by the job's earlier pauses; and their text.

| what is seen | announced after |
| --- | --- |
| it cannot resolve itself (ranks wait for each other, for ever) | at once |
| ranks wait for one that stalls: in a lock, a sleep, I/O, a process | 3 s |
| a rank is at work by itself, or a thread or a child process: it computes, imports, compiles, writes | 10 s |
| a rank has left no evidence yet, and may still import; one waits, or joins a thread, with a time limit | 10 s |
| a rank waits for a batch: a loader's worker may fetch or compute it | 10 s |

Both limits grow with what the job did before: to 5 times its usual step, and to twice its longest pause at the same place, so that
a pause that recurs (a checkpoint, an evaluation) is announced once at most. If a rank begins something else, its time starts again.
"""

from __future__ import annotations

from collections.abc import Iterable

from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.verdict import Finding, split_reason
from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.evidence.waiting import BUSY, has_a_time_limit
from pytest_nsa.observe.progress import Past, ProgressWatch
from pytest_nsa.system.clock import monotonic

MOVING = ("straggler", "graph_explosion", "slow")  # causes of ranks that move
ENDING = ("dataloader_stuck", "sleeping")  # causes of waits that mostly end by themselves
WAITED_FOR_S, AT_WORK_S = 3.0, 10.0
WRITES = 1e6  # bytes a second: more than the tracers' own files


class AnnounceDelay:
    """Decides whether a suspicion has lasted long enough to be announced. Called at each assessment of a stall."""

    def __init__(self) -> None:
        self.at_work = False  # whether the ranks of the last suspicion are at work by themselves
        self.state: tuple[object, ...] = ()  # what the last suspicion's ranks are stalled in, and which they are
        self._since = 0.0

    def is_due(self, finding: Finding, evidence: Evidence, past: Past, stalled_s: float) -> bool:
        """Return whether to announce now; ``stalled_s``: since the culprits moved, or since all have been stalled."""
        now = monotonic()
        self.at_work = is_at_work(finding, evidence)
        state = ("at work" if self.at_work else finding.cause, finding.ranks)
        if state != self.state:
            # The first state has lasted since the rank moved; each later state, since it was first observed.
            self._since = now if self.state else now - stalled_s
            self.state = state
        self._since = max(self._since, now - stalled_s)
        if finding.ends_the_test:
            return True
        boards = [r.board for r in evidence.ranks if r.rank in finding.ranks and r.board is not None]
        find_awaited_ranks = any(
            r.is_waiting or r.waits_for_a_key for r in evidence.ranks if r.rank not in finding.ranks
        )
        all_wait = all(r.is_waiting for r in evidence.ranks if not r.finished)
        works = self.at_work or finding.cause in ENDING or may_act(evidence)
        works = works or _may_come(finding, evidence) or _waits_with_a_limit(finding, evidence)
        least = AT_WORK_S if works or not (find_awaited_ranks or all_wait) else WAITED_FOR_S
        return now - self._since >= max((past.limit(least, b.line) for b in boards), default=least)


def may_act(evidence: Evidence) -> bool:
    """Return whether a rank that waits may yet make the missing call: in a thread that is at work, or in its main thread, which
    joins a thread with a time limit.
    """
    alive = [rank for rank in evidence.ranks if not rank.finished]
    joins = (thread.join_frame for rank in alive for thread in rank.threads if thread.is_main)
    return _has_a_limit(joins, evidence) or any(rank.threads_at_work for rank in alive)


def _waits_with_a_limit(finding: Finding, evidence: Evidence) -> bool:
    """Return whether a rank of a suspicion waits with a time limit, by its line: for a child process, an answer, a queue."""
    stacks = (rank.stack for rank in evidence.ranks if rank.rank in finding.ranks)
    return _has_a_limit((stack.user_frame for stack in stacks if stack is not None), evidence)


def _has_a_limit(frames: Iterable[Frame | None], evidence: Evidence) -> bool:
    """Return whether one of these lines waits with a time limit."""
    return any(has_a_time_limit(evidence.sources.line(at.file, at.line)) for at in frames if at is not None)


def _may_come(finding: Finding, evidence: Evidence) -> bool:
    """Return whether a rank of a suspicion has not been seen: its process may import, or load data, before it joins a group."""
    seen = {rank.rank for rank in evidence.ranks if rank.board is not None}
    return not seen.issuperset(finding.ranks)


def is_at_work(finding: Finding, evidence: Evidence) -> bool:
    """Return whether the ranks of a suspicion are at work by themselves, so that the stall may resolve: they compute, import,
    compile or write; or one waits for a thread or a child process that is at work.
    """
    if CAUSES[finding.cause].at_work:
        return True
    ranks = [r for r in evidence.ranks if r.rank in finding.ranks]
    if any(
        r.process.get("written_per_s", 0.0) > WRITES or r.process.get("below_cpu_share", 0.0) >= BUSY for r in ranks
    ):
        return True
    is_locked = finding.cause == "lock_deadlock"
    return is_locked and any(thread is not rank.stack for rank in ranks for thread in rank.threads_at_work)


def announcement(found: Finding, test: str, who: str, seconds: float, what: str, *, at_work: bool) -> str:
    """Return the line that announces a suspicion. ``who``: its ranks; ``seconds``: how long it has lasted; ``what``: the end."""
    at = f" at {found.where}" if found.where else ""
    reason = " ".join(split_reason(found.reason)[0].split())  # a child's command may have several lines
    if at_work and not found.ends_the_test:
        return f"nsa: {test}: {who} at work for {seconds:.0f} s{at}: {reason} ({what})"
    return f"nsa: {test}: {found.cause} on {who}{at}, for {seconds:.1f} s: {reason} ({what})"


def measure_stall(found: Finding, watch: ProgressWatch) -> float:
    """Return for how many seconds the ranks of a suspicion have not moved; if they move, how long others have waited."""
    if found.cause in MOVING:
        return watch.longest_wait
    return min((watch.measure_stall(rank) for rank in found.ranks if rank in watch.boards), default=watch.longest_wait)
