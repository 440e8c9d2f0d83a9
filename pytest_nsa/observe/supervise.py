"""The host's side of a test on ranks: start the ranks, watch them, end them, and record what happened. Imports no torch."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.observe.host_log import note
from pytest_nsa.observe.observer import Observer, announcement
from pytest_nsa.observe.progress import GRACE_S
from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.gpu import XidWatch
from pytest_nsa.system.procfs import count_oom_kills
from pytest_nsa.wire.messages import Job
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
    announce: Callable[[str], None] | None = None  # suspicions; None: no closer look is taken while the ranks run
    more: Callable[[Path, Mapping[int, int]], Iterable[dict[str, Any]]] | None = None  # facts of hooks, before the end
    ranks: Sequence[int] = ()  # those that are watched; all by default
    pids: list[int] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    _ended_in_wrap: str = ""
    _looked_at_threads: float = 0.0
    _thread_at_work: bool = False
    _oom_kills: int = 0  # before the ranks started

    def __post_init__(self) -> None:
        self.folder = Path(self.job.folder)
        self.ranks = self.ranks or range(self.job.world_size)
        self.observer = Observer(self.folder, ranks=self.ranks, announce=self._announce)
        self.log, self.watch = self.observer.log, self.observer.watch

    def run(self) -> None:
        """Start, watch and end the ranks. Raises LaunchError; a KeyboardInterrupt is raised again once no rank is left."""
        started = monotonic()
        self._oom_kills = count_oom_kills()
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
            if self.announce is not None:
                moves = not self.watch.running_since or self._has_limits_to_come()
                self.observer.assess(self._alive(), moves=moves)
            now = monotonic()
            if not failed_at and any(status != 0 for status in self.statuses.values()):
                failed_at = now
            if failed_at and self._has_no_wait(now - failed_at):
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
            self._looked_at_threads, self._thread_at_work = now, self.observer.may_act()
        return self._thread_at_work

    def _has_limits_to_come(self) -> bool:
        """Return whether a rank's wait ends by itself before the test does: until then it is no stall."""
        return bool(self.watch.running_since) and self.watch.ends_by_itself(self._time_left(monotonic()))

    def _time_left(self, now: float) -> float:
        """Seconds until the test is ended: since its ranks run, or since they are in its call."""
        if self.limits.fixtures and not self.watch.called_since:
            return self.limits.fixtures - (now - self.watch.running_since)
        return self.limits.run - (now - (self.watch.called_since if self.limits.fixtures else self.watch.running_since))

    def _past_limits(self, started: float, now: float) -> str:
        if not self.watch.running_since:
            return "start" if now - started >= self.limits.start else ""
        if self._time_left(now) <= 0:
            return "deadline"
        found = self.observer.finding
        if found is None or self.watch.stalled_s < GRACE_S:  # a rank moves: slow, and not a hang
            return ""
        if found.ends_the_test:
            return "certain"
        return "hang_after" if 0 < self.limits.hang_after <= self.observer.stall.counted else ""

    def _announce(self, found: Finding, seconds: float, at_work: bool) -> None:
        left = max(0.0, self._time_left(monotonic()))
        if found.ends_the_test:
            what = "this cannot resolve itself: the test is ended"
        elif at_work or not self.limits.hang_after:
            what = f"{'' if at_work else 'a suspicion; '}the test has {left:.0f} s left"
        else:
            what = f"a suspicion; the test is ended if it lasts for {self.limits.hang_after:g} s"
        who, test = describe_ranks(found.ranks, self.job.world_size), self.job.scenario or self.job.nodeid
        if self.announce is not None:
            self.announce(announcement(found, test, who, seconds, what, at_work=at_work))

    def _alive(self) -> dict[int, int]:
        """Return the process ids of the ranks that have not ended, by rank."""
        return {rank: pid for rank, pid in zip(self.ranks, self.pids, strict=False) if rank not in self.statuses}

    def _has_no_wait(self, since_failure: float) -> bool:
        """Return whether to stop the other ranks of a failed test: after a while, or sooner if they only wait."""
        if since_failure >= self.limits.after_failure:
            return True
        is_still = since_failure >= GRACE_S and self.watch.stalled_s >= GRACE_S
        return is_still and set(self.watch.boards) - set(self.statuses) <= set(self.watch.blocked)

    def _waits_for_the_finished(self) -> bool:
        """Return whether the other ranks wait in a collective for ranks that have ended, which cannot complete."""
        if not self.statuses or self.watch.stalled_s < GRACE_S:
            return False
        return self.watch.is_left_alone(self.statuses)

    def _collect(self, timeout: float) -> None:
        for rank, status in self.launcher.exits(timeout).items():
            self.statuses[rank] = status
            code = os.waitstatus_to_exitcode(status)
            by_us = bool(self._ended_in_wrap) and rank not in self.launcher.lost
            kills = count_oom_kills() - self._oom_kills if code == -signal.SIGKILL and not by_us else 0
            found = {"oom_kills": kills} if kills else {}
            note(self.log, "exit", rank=rank, code=max(code, 0), signal=max(-code, 0), by_us=by_us, **found)

    def _stop(self, reason: str, by: str = "") -> None:
        self.observer.stop(reason, self._alive(), by=by, signal=self._signal, more=self.more)
        self._ended_in_wrap = reason

    def _signal(self, rank: int, number: int) -> None:
        self._ended_in_wrap = self._ended_in_wrap or "stop"  # a rank that ends from now on, ends by this
        self.launcher.signal(rank, number)

    def _kill(self) -> None:
        self._ended_in_wrap = self._ended_in_wrap or "cleanup"
        if len(self.statuses) < len(self.pids) or (self.job.stay and not self._may_stay()):
            self.launcher.kill()
        deadline = monotonic() + KILL_WAIT_S
        while len(self.statuses) < len(self.pids) and monotonic() < deadline:
            self._collect(POLL_S)

    def _may_stay(self) -> bool:
        """Return whether the ranks are fit for another test: all passed, and left every collective that any of them entered."""
        self.watch.look()
        return not any(self.statuses.values()) and self.watch.is_even()
