"""A job of ranks that this process did not start: follow its boards, record what its diagnosis needs, signal no process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pytest_nsa.observe.host_log import note
from pytest_nsa.observe.progress import ProgressWatch
from pytest_nsa.observe.second_look import request_counters, sample_processes
from pytest_nsa.system.clock import wall_clock
from pytest_nsa.system.locks import file_locks


class ObservedJob:
    """The ranks that leave evidence in ``folder`` (``rankR/board.bin``)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "host.jsonl"
        self.watch = ProgressWatch()

    def look(self) -> None:
        """Read all boards, also those that are new since the last look."""
        self.watch.add_from(self.folder)
        self.watch.look()

    @property
    def pids(self) -> dict[int, int]:
        """The pids on this machine, by rank, of ranks that live and are not done."""
        boards = self.watch.boards.items()
        return {rank: b.pid for rank, b in boards if b.phase != "done" and Path(f"/proc/{b.pid}").exists()}

    def record_stop(self, reason: str, began: float, statuses: Mapping[int, int] | None = None) -> None:
        """Record why and when the job is looked at for the last time, and what its processes do, as if its ranks were ended now.

        ``began``: start of the job, in seconds since the epoch. ``statuses``: by pid, the wait status of processes that have ended
        and were not reaped.
        """
        watch = self.watch
        self.log.unlink(missing_ok=True)  # written at an earlier look, after which the job continued
        note(self.log, "started", time=began, pids=[])
        note(self.log, "stop", reason=reason, by="", **watch.stop_facts())
        alive = self.pids
        request_counters(self.folder / f"rank{rank}" for rank in alive)
        sample_processes(alive, self.log, file_locks(alive))
        watch.look(worked=True)
        note(self.log, "sampled", beat_age_s=watch.beat_ages)
        self._ended(alive, statuses or {})
        note(self.log, "ended", duration_s=wall_clock() - began)

    def record_end(self, began: float) -> None:
        """Record the job's state after its test has failed by itself."""
        self.log.unlink(missing_ok=True)
        note(self.log, "started", time=began, pids=[])
        self._ended({}, {})
        note(self.log, "ended", duration_s=wall_clock() - began)

    def _ended(self, alive: Mapping[int, int], statuses: Mapping[int, int]) -> None:
        for rank, board in self.watch.boards.items():
            status = statuses.get(board.pid)
            if status is not None and board.phase != "done":
                code = os.waitstatus_to_exitcode(status)
                note(self.log, "exit", rank=rank, code=max(code, 0), signal=max(-code, 0), by_us=False)
            elif rank in alive:
                note(self.log, "exit", rank=rank, code=0, signal=9, by_us=True)
            elif board.phase != "done":
                note(self.log, "gone", rank=rank)
