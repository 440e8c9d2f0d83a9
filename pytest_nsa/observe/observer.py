"""The observer of a job: it reads the boards, looks closer at a stall, asks the rules, and records what the ranks do at the end.

It disturbs no rank, and signals none unless it is given a way to: the program that has started the ranks ends them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.verdict import Finding, split_reason
from pytest_nsa.evidence.board import BoardReader, BoardSnapshot
from pytest_nsa.evidence.load import load, with_sources
from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.evidence.waiting import BUSY, has_a_time_limit
from pytest_nsa.observe.finders import living_ranks
from pytest_nsa.observe.host_log import note
from pytest_nsa.observe.progress import GRACE_S, Past, ProgressWatch, StallClock
from pytest_nsa.observe.second_look import (
    await_counters,
    dump_children,
    dump_stacks,
    dump_where_useful,
    pause_heartbeats,
    request_counters,
    sample_processes,
    wants_to_dump,
)
from pytest_nsa.system.clock import monotonic, wall_clock
from pytest_nsa.system.gpu import look_at_gpus
from pytest_nsa.system.locks import file_locks
from pytest_nsa.system.procfs import has_more_threads
from pytest_nsa.wire.files import append_line
from pytest_nsa.wire.messages import DUMP_MAIN_SIGNAL, DUMP_SIGNAL, MOST_THREADS

if TYPE_CHECKING:
    from pytest_nsa.observe.launched import LaunchedJob  # it imports the rules, which take long to import

MOVING = ("straggler", "graph_explosion", "slow")  # causes of ranks that move
ENDING = ("dataloader_stuck", "sleeping")  # causes of waits that mostly end by themselves
WAITED_FOR_S, AT_WORK_S, LEFT_S = 3.0, 10.0, 1.5
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
        wait_for_ever = [r.waits_for_ever for r in evidence.ranks if r.rank in finding.ranks]
        if wait_for_ever and all(wait_for_ever):
            least = LEFT_S
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
    reason = split_reason(found.reason)[0]
    if at_work and not found.ends_the_test:
        return f"nsa: {test}: {who} at work for {seconds:.0f} s{at}: {reason} ({what})"
    return f"nsa: {test}: {found.cause} on {who}{at}, for {seconds:.1f} s: {reason} ({what})"


def measure_stall(found: Finding, watch: ProgressWatch) -> float:
    """Return for how many seconds the ranks of a suspicion have not moved; if they move, how long others have waited."""
    if found.cause in MOVING:
        return watch.longest_wait
    return min((watch.measure_stall(rank) for rank in found.ranks if rank in watch.boards), default=watch.longest_wait)


# Called with a suspicion, for how many seconds it has lasted, and whether its ranks are at work.
Announce = Callable[[Finding, float, bool], None]


class Observer:
    """Observes the ranks that leave evidence in ``folder`` (``rankR/board.bin``): ``ranks``, or all that have a board there.

    ``notes``: the folder for what is observed, where that is not ``folder``. ``read``: how the evidence is read. ``job``: one of
    ranks that leave no evidence in the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ranks: Collection[int] = (),
        notes: Path | None = None,
        read: Callable[[], Evidence] | None = None,
        announce: Announce | None = None,
        job: LaunchedJob | None = None,
    ) -> None:
        self.folder, self.notes, self.announce = folder, notes or folder, announce
        self.log, self._suspicions = self.notes / "host.jsonl", self.notes / "suspicions.jsonl"
        boards = {rank: BoardReader(folder / f"rank{rank}" / "board.bin") for rank in ranks}
        self.watch = ProgressWatch(dict(job.readers) if job is not None else {**boards})
        self.stall = StallClock()
        self.finding: Finding | None = None  # what the rules suspect
        self.is_due = False  # whether it has lasted so long that it is announced
        self.at_work = False  # whether the ranks of the suspicion are at work
        self.gone: set[int] = set()  # ranks without a process that were not done
        self.unread = ""  # why the evidence cannot be read
        self._read = job.read if job is not None else read or (lambda: with_sources(load(folder)))
        self._job, self._finds_ranks = job, not ranks and job is None
        self._delay = AnnounceDelay()
        self._announced: tuple[object, ...] = ()
        self._has_counters = False  # the ranks have written the counters of their loops in this stall
        self._counted_at = 0.0  # the last move that a rank had made by then
        self._beats: dict[int, tuple[float, float]] = {}

    @property
    def boards(self) -> dict[int, BoardSnapshot]:
        """The latest boards, by rank."""
        return dict(sorted(self.watch.boards.items()))

    def read_boards(self) -> None:
        """Read all boards, also those that are new since the last look."""
        if self._finds_ranks:
            self.watch.add_from(self.folder)
        self.watch.look()

    def look(self) -> None:
        """Look at a job that this process has not started: its ranks are the processes that map its boards."""
        self.read_boards()
        alive = living_ranks(self.folder, self.boards) if self._job is None else self._job.alive()
        lost = [rank for rank, board in self.boards.items() if rank not in alive and board.phase != "done"]
        for rank in lost:
            # It may have ended well since its board was read.
            board = self.watch.readers[rank].read()
            if rank not in self.gone and (board is None or board.phase != "done"):
                self.gone.add(rank)
                with contextlib.suppress(OSError):  # a folder that can only be read
                    note(self.log, "gone", rank=rank)
                self._ask(alive)
        self.assess(alive)

    def assess(self, alive: Mapping[int, int], *, moves: bool = False) -> bool:
        """At a stall, record what the processes do, and ask the rules. Return whether it is a stall.

        ``alive``: the ranks' process ids, by rank. ``moves``: what they wait for ends by itself.
        """
        waited = self.watch.longest_wait
        if moves or (waited < GRACE_S and not self.gone):
            self.stall.reset()
            self.finding, self.is_due, self._has_counters, self._beats = None, False, False, {}
            return False
        self._beats = self._beats or self._late_beats()
        if not self.stall.look(alive, waited):
            return True
        with contextlib.suppress(OSError):
            locks = file_locks(alive)
            for rank, facts in self.stall.facts.items():
                note(self.log, "process", rank=rank, **facts, gil_wait_ms=self._gil_wait(rank), **locks.get(rank, {}))
            note(self.log, "stall", **self.watch.stop_facts(), waits_s=waited, beat_age_s=self.watch.beat_ages)
        self._ask(alive)
        self.watch.look(worked=True)  # this may have taken long: see what moved in that time
        return True

    def _ask(self, alive: Mapping[int, int]) -> None:
        """Apply the rules. Before anything is announced or ended, the ranks write the counters of their loops."""
        try:
            found = self._suspect()
            if found is not None and self.is_due and self._wants_counters(found):
                self._has_counters, self._counted_at = True, self.watch.last_move
                await_counters(self.folder / f"rank{rank}" for rank in alive)
                found = self._suspect()
        except Exception as error:  # the job runs: what cannot be read now must not end it
            self.finding, self.is_due, self.unread = None, False, str(error)
            with contextlib.suppress(OSError):
                append_line(self._suspicions, {"time": wall_clock(), "error": f"{type(error).__name__}: {error}"})
            return
        self.finding, self.unread = found, ""
        if found is not None and self.is_due and self._delay.state != self._announced:
            self._announced = self._delay.state
            self._record_suspicion(found)

    def _wants_counters(self, found: Finding) -> bool:
        """Return whether the ranks shall write their counters: once before an announcement, and as of now for what ends a test."""
        if self.notes != self.folder:  # nothing is written into another user's folder
            return False
        return not self._has_counters or (found.ends_the_test and self._counted_at != self.watch.last_move)

    def _suspect(self) -> Finding | None:
        from pytest_nsa.diagnosis.engine import suspect  # not before a stall: the rules take long to import

        evidence = self._read()
        found = suspect(evidence) if self._job is None else self._job.suspect(evidence)
        if found is not None and found.ends_the_test and may_act(evidence):
            found = replace(found, certain=False, is_permanent=False)
        self.is_due = found is not None and (
            self._delay.is_due(found, evidence, self.watch.past, measure_stall(found, self.watch)) or bool(self.gone)
        )
        self.at_work = self._delay.at_work
        return found

    def _record_suspicion(self, found: Finding) -> None:
        seconds = measure_stall(found, self.watch)
        with contextlib.suppress(OSError):
            append_line(
                self._suspicions,
                {
                    "time": wall_clock(), "cause": found.cause, "ranks": found.ranks, "where": found.where,
                    "reason": found.reason, "certain": found.certain, "at_work": self.at_work, "stalled_s": round(seconds, 2),
                },
            )  # fmt: skip
        if self.announce is not None:
            self.announce(found, seconds, self.at_work)

    def may_act(self) -> bool:
        """Return whether a thread of a rank may still make the call that others wait for; False where that cannot be read."""
        try:
            return may_act(with_sources(load(self.folder), keep=False))
        except Exception as error:  # as above
            self.unread = str(error)
            return False

    def _late_beats(self) -> dict[int, tuple[float, float]]:
        """Return per rank the seconds by which its heartbeats came late, in all, and how many there were."""
        return {rank: (b.numbers["gil_late"], b.numbers["beat"]) for rank, b in self.watch.boards.items()}

    def _gil_wait(self, rank: int) -> float:
        """Return the mean delay of a heartbeat in this stall, in ms: its thread waited for the GIL."""
        late, beats = self._beats.get(rank, (0.0, 0.0))
        now_late, now_beats = self._late_beats().get(rank, (late, beats))
        return round(1e3 * (now_late - late) / max(1.0, now_beats - beats), 2)

    def stop(
        self,
        reason: str,
        alive: Mapping[int, int],
        *,
        by: str = "",
        signal: Callable[[int, int], None] | None = None,
        more: Callable[[Path, Mapping[int, int]], Iterable[dict[str, Any]]] | None = None,
    ) -> None:
        """Record why the job ends, and what its ranks do; ``signal(rank, number)``, where it is given, lets them dump their stacks.

        The dump is last, because its signal may wake the very call that hung.
        """
        note(self.log, "stop", reason=reason, by=by, **self.watch.stop_facts())
        locks = file_locks(alive)
        facts = {rank: {"gil_wait_ms": self._gil_wait(rank), **locks.get(rank, {})} for rank in alive}
        request_counters(self.folder / f"rank{rank}" for rank in alive)  # answered while the processes are looked at
        sample_processes(alive, self.log, facts)
        note(self.log, "gpus", gpus=look_at_gpus())
        self.watch.look(worked=True)
        note(self.log, "sampled", beat_age_s=self.watch.beat_ages)
        if signal is not None:
            self._dump(alive, signal)
        for fact in more(self.folder, alive) if more is not None else ():
            note(self.log, "told", of=fact["rank"], kind=fact["kind"], file=fact["file"], says=fact["text"])

    def _dump(self, alive: Mapping[int, int], signal: Callable[[int, int], None]) -> None:
        folders = {rank: self.folder / f"rank{rank}" for rank in alive}
        pause_heartbeats(folders.values())
        stacks = {rank: folder / "stacks.txt" for rank, folder in folders.items()}
        crowded = {rank: path for rank, path in stacks.items() if has_more_threads(alive[rank], MOST_THREADS)}
        for ranks, number in ((crowded, DUMP_MAIN_SIGNAL), (stacks, DUMP_SIGNAL)):
            dump_stacks(
                ranks, lambda rank, number=number: signal(rank, number), lambda rank: wants_to_dump(alive[rank])  # type: ignore[misc]
            )  # fmt: skip
        native = {rank: folder / "native.txt" for rank, folder in folders.items()}
        for rank, absent in dump_where_useful(native, alive, self.watch.blocked):
            note(self.log, "native", rank=rank, absent=absent)
        dump_children({rank: pid for rank, pid in alive.items() if pid}, stacks)

    def record_end(self, reason: str, began: float, statuses: Mapping[int, int] | None = None) -> None:
        """Record the end of a job that another program has started, as far as it can be seen from outside; it may go on.

        ``reason``: why it is looked at, as if it ended now; '' where its test has failed by itself. ``began``: in seconds since the
        epoch. ``statuses``: by pid, the wait status of processes that have ended and were not reaped.
        """
        self.log.unlink(missing_ok=True)  # written at an earlier look, after which the job continued
        note(self.log, "started", time=began, pids=[])
        alive = living_ranks(self.folder, self.boards) if reason else {}
        if reason:
            self.stop(reason, alive)
        for rank, board in self.boards.items():
            status = (statuses or {}).get(board.pid)
            if status is not None and board.phase != "done":
                code = os.waitstatus_to_exitcode(status)
                note(self.log, "exit", rank=rank, code=max(code, 0), signal=max(-code, 0), by_us=False)
            elif rank in alive:
                note(self.log, "exit", rank=rank, code=0, signal=9, by_us=True)
            elif board.phase != "done":
                note(self.log, "gone", rank=rank)
        note(self.log, "ended", duration_s=wall_clock() - began)
