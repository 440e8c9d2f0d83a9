"""The evidence of a pytest process that an outer launcher has numbered: in tests without our ranks it is a rank itself."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nsa.trace import autostart, events
from nsa.trace.stall import exceptions

if TYPE_CHECKING:
    from nsa.trace.training import TracedTraining

END_REQUEST = "end.asked"  # its clock makes this file to request that the process ends itself
EXIT_ENDED = 1


class LaunchedRank:
    """This process as a rank, traced from its first process group on into ``run/rankR``. With NSA_TRACE_DIR, `autostart` traces."""

    def __init__(self, run: Path, rank: int, world_size: int) -> None:
        self.run, self.rank, self.world_size = run, rank, world_size
        self.folder = run / f"rank{rank}"
        self._traced: TracedTraining | None = None
        if not os.environ.get(autostart.VARIABLE):
            autostart.begin_at_first_group(lambda *_: self._begin())

    def _begin(self) -> None:
        from nsa.trace.training import trace_training

        self._traced = trace_training(self.run, self.rank, self.world_size)
        self._traced.session.heartbeat.on_stall = self._end_if_requested

    def _end_if_requested(self) -> None:
        """End a process whose main thread may be in native code for ever: its clock has reported everything."""
        if (self.folder / END_REQUEST).exists():
            os._exit(EXIT_ENDED)

    def record(self, nodeid: str, call: pytest.CallInfo[None]) -> None:
        """Record how a phase of a test ended: an exception, a skip, an expected failure."""
        if call.excinfo is None or "torch.distributed" not in sys.modules or not (self.folder / "board.bin").exists():
            return  # a rank without a group: nothing waits for it
        error = call.excinfo.value
        kinds = {pytest.skip.Exception: "skipped", pytest.xfail.Exception: "xfailed"}
        kind = next((name for of, name in kinds.items() if isinstance(error, of)), "")
        if kind:
            where = exceptions.origin(error)
            events.record(self.folder, event=kind, reason=str(getattr(error, "msg", error)), nodeid=nodeid, **where)
        else:
            exceptions.record_exception(self.folder, error, call.when, nodeid=nodeid)

    def end(self, *, passed: bool) -> None:
        """Record the end of the session: other ranks may still wait for this one."""
        if self._traced is not None:
            self._traced.end(passed=passed)
