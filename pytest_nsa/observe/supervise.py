"""The host's side of a test on ranks: start the ranks, watch them, end them, and record what happened. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_nsa.diagnosis.verdict import Finding
from pytest_nsa.evidence.board import BoardReader
from pytest_nsa.observe.announcements import may_act_in
from pytest_nsa.observe.host_log import note
from pytest_nsa.observe.native import dump_where_useful
from pytest_nsa.observe.progress import GRACE_S, ProgressWatch
from pytest_nsa.observe.second_look import (
    dump_children,
    dump_stacks,
    pause_heartbeats,
    request_counters,
    sample_processes,
    wants_to_dump,
)
from pytest_nsa.observe.stall import StallClock
from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.gpu import XidWatch, look_at_gpus
from pytest_nsa.system.locks import file_locks
from pytest_nsa.system.procfs import has_more_threads
from pytest_nsa.wire.messages import DUMP_MAIN_SIGNAL, DUMP_SIGNAL, MOST_THREADS, Job
from pytest_nsa.wire.protocols import Limits, Monitor, Starter

POLL_S = 0.05
LOOK_AGAIN_S = 1.0  # between two looks at the ranks' threads
KILL_WAIT_S = 10.0


@dataclass
class RanksRun:
    """Runs one job to its end. Everything it sees goes to ``host.jsonl`` in the job's folder as it happens."""

    job: Job
    launcher: Starter
    limits: Limits
    monitors: Sequence[Monitor] = ()
    suspect: Callable[[ProgressWatch], Finding | None] | None = None  # what is wrong, by the evidence so far
    more: Callable[[Path, Mapping[int, int]], Iterable[dict[str, Any]]] | None = None  # facts of hooks, before the end
    ranks: Sequence[int] = ()  # those that are watched; all by default
    pids: list[int] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    _ended_by: str = ""
    _looked_at_threads: float = 0.0
    _thread_at_work: bool = False

    def __post_init__(self) -> None:
        self.folder = Path(self.job.folder)
        self.log = self.folder / "host.jsonl"
        self.ranks = self.ranks or range(self.job.world_size)
        self.stall = StallClock()
        self.suspicion: Finding | None = None
        self._beats: dict[int, tuple[float, float]] = {}
        self.watch = ProgressWatch({r: BoardReader(self.job.rank_folder(r) / "board.bin") for r in self.ranks})

    def run(self) -> None:
        """Start, watch and end the ranks. Raises LaunchError; a KeyboardInterrupt is raised again once no rank is left."""
        started = monotonic()
        xids = XidWatch() if self.job.device == "cuda" else None
        try:
            self.pids = self.launcher.start(self.job)
            note(self.log, "started", pids=self.pids)
            reason = self._watch(monotonic())
            if reason:
                self._stop(reason)
        except KeyboardInterrupt as interrupt:
            self._stop("interrupted", str(interrupt))
            raise
        finally:
            self._kill()
            for monitor in self.monitors:
                monitor.finish()
            if xids is not None:
                for error in xids.read():
                    note(self.log, "xid", **error)
                xids.close()
            note(self.log, "ended", duration_s=monotonic() - started)
            with contextlib.suppress(OSError):
                (self.folder / "store").unlink()

    def _watch(self, started: float) -> str:
        """Wait until all ranks have ended, and return ''; or until there is a reason to stop them, and return it."""
        failed_at = 0.0
        while len(self.statuses) < len(self.ranks):
            self._collect(POLL_S)
            paused = sum(monitor.poll() for monitor in self.monitors)
            started, failed_at = started + paused, failed_at + paused if failed_at else 0.0
            self.watch.pause(paused)
            if len(self.statuses) == len(self.ranks):
                return ""
            reason = next((monitor.stop_reason for monitor in self.monitors if monitor.stop_reason), "")
            if reason:
                return reason
            self.watch.look()
            if self._look_closer():
                self.watch.look(worked=True)  # the closer look may have taken long: see what moved in that time
            now = monotonic()
            if not failed_at and any(status != 0 for status in self.statuses.values()):
                failed_at = now
            if failed_at and self._nothing_to_wait_for(now - failed_at):
                return "failed"
            reason = self._never_ends()
            if reason and not self._may_act(now):
                return reason
            reason = self._past_limits(started, now)
            if reason:
                return reason
        return ""

    def _never_ends(self) -> str:
        """Return why the ranks' main threads wait for ever; '' unless that is certain."""
        if self._has_limits_to_come():
            return ""
        if self.watch.has_departed():
            return "departed"
        return "left_alone" if self._waits_for_the_finished() else ""

    def _may_act(self, now: float) -> bool:
        """Return whether a thread of a rank may still make the missing call; looked up every `LOOK_AGAIN_S`."""
        if now - self._looked_at_threads >= LOOK_AGAIN_S:
            self._looked_at_threads, self._thread_at_work = now, may_act_in(self.folder)
        return self._thread_at_work

    def _has_limits_to_come(self) -> bool:
        """Return whether a rank's wait ends by itself before the test does: until then it is no stall."""
        since = self.watch.running_since
        return bool(since) and self.watch.ends_by_itself(self.limits.run - (monotonic() - since))

    def _past_limits(self, started: float, now: float) -> str:
        since = self.watch.running_since
        if not since:
            return "start" if now - started >= self.limits.start else ""
        if now - since >= self.limits.run:
            return "deadline"
        if self.suspicion is None:
            return ""
        if self.watch.stalled_s < GRACE_S:  # a rank moves: slow, and not a hang
            return ""
        if self.suspicion.ends_the_test:
            return "certain"
        return "hang_after" if 0 < self.limits.hang_after <= self.stall.counted else ""

    def _look_closer(self) -> bool:
        """At a stall, record what the processes do and apply the rules. Return whether it is a stall."""
        waited = self.watch.longest_wait
        moves = waited < GRACE_S or self._has_limits_to_come()
        if self.suspect is None or not self.watch.running_since or moves:
            self.stall.reset()
            self.suspicion = None
            self._beats = {}
            return False
        self._beats = self._beats or self._late_beats()
        if not self.stall.look(self._alive(), waited):
            return True
        locks = file_locks(self._alive())
        for rank, facts in self.stall.facts.items():
            note(self.log, "process", rank=rank, **facts, gil_wait_ms=self._gil_wait(rank), **locks.get(rank, {}))
        note(self.log, "stall", **self.watch.stall_facts(waited))
        self.suspicion = self.suspect(self.watch)
        return True

    def _late_beats(self) -> dict[int, tuple[float, float]]:
        """Return per rank the seconds by which its heartbeats came late, in all, and how many there were."""
        return {rank: (b.numbers["gil_late"], b.numbers["beat"]) for rank, b in self.watch.boards.items()}

    def _gil_wait(self, rank: int) -> float:
        """Return the mean delay of a heartbeat in this stall, in ms: its thread waited for the GIL."""
        late, beats = self._beats.get(rank, (0.0, 0.0))
        now_late, now_beats = self._late_beats().get(rank, (late, beats))
        return round(1e3 * (now_late - late) / max(1.0, now_beats - beats), 2)

    def _alive(self) -> dict[int, int]:
        """Return the process ids of the ranks that have not ended, by rank."""
        return {rank: pid for rank, pid in zip(self.ranks, self.pids, strict=False) if rank not in self.statuses}

    def _nothing_to_wait_for(self, since_failure: float) -> bool:
        """Return whether to stop the other ranks of a failed test: after a while, or sooner if they only wait."""
        if since_failure >= self.limits.after_failure:
            return True
        return since_failure >= GRACE_S and self.watch.stalled_s >= GRACE_S and self.watch.all_blocked(self.statuses)

    def _waits_for_the_finished(self) -> bool:
        """Return whether the other ranks wait in a collective for ranks that have ended, which cannot complete."""
        if not self.statuses or self.watch.stalled_s < GRACE_S:
            return False
        return self.watch.is_left_alone(self.statuses)

    def _collect(self, timeout: float) -> None:
        for rank, status in self.launcher.exits(timeout).items():
            self.statuses[rank] = status
            code = os.waitstatus_to_exitcode(status)
            by_us = bool(self._ended_by) and rank not in self.launcher.lost
            note(self.log, "exit", rank=rank, code=max(code, 0), signal=max(-code, 0), by_us=by_us)

    def _stop(self, reason: str, by: str = "") -> None:
        """Record what the ranks do, then dump their stacks: the dump's signal may wake the very call that hung."""
        note(self.log, "stop", reason=reason, by=by, **self.watch.stop_facts())
        alive = self._alive()
        locks = file_locks(alive)
        beats = {rank: {"gil_wait_ms": self._gil_wait(rank), **locks.get(rank, {})} for rank in alive}
        request_counters(self.job.rank_folder(rank) for rank in alive)  # answered while the processes are looked at
        sample_processes(alive, self.log, beats)
        note(self.log, "gpus", gpus=look_at_gpus())
        self.watch.look(worked=True)
        note(self.log, "sampled", beat_age_s=self.watch.beat_ages)
        self._ended_by = reason
        pause_heartbeats(self.job.rank_folder(rank) for rank in alive)
        stacks = {rank: self.job.rank_folder(rank) / "stacks.txt" for rank in alive}
        crowded = {rank: path for rank, path in stacks.items() if has_more_threads(alive[rank], MOST_THREADS)}
        for ranks, number in ((crowded, DUMP_MAIN_SIGNAL), (stacks, DUMP_SIGNAL)):
            dump_stacks(
                ranks, lambda rank, number=number: self.launcher.signal(rank, number),  # type: ignore[misc]
                lambda rank: wants_to_dump(alive[rank]),
            )  # fmt: skip
        native = {rank: self.job.rank_folder(rank) / "native.txt" for rank in alive}
        for rank, absent in dump_where_useful(native, alive, self.watch.blocked):
            note(self.log, "native", rank=rank, absent=absent)
        dump_children({rank: pid for rank, pid in alive.items() if pid}, stacks)
        for fact in self.more(self.folder, alive) if self.more is not None else ():
            note(self.log, "told", of=fact["rank"], kind=fact["kind"], file=fact["file"], says=fact["text"])

    def _kill(self) -> None:
        self._ended_by = self._ended_by or "cleanup"
        if len(self.statuses) < len(self.pids) or (self.job.stay and not self._may_stay()):
            self.launcher.kill()
        deadline = monotonic() + KILL_WAIT_S
        while len(self.statuses) < len(self.pids) and monotonic() < deadline:
            self._collect(POLL_S)

    def _may_stay(self) -> bool:
        """Return whether the ranks are fit for another test: all passed, and left every collective that any of them entered."""
        self.watch.look()
        return not any(self.statuses.values()) and self.watch.is_even()
