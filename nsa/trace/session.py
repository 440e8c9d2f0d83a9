"""The always-on tracers of a process, together: board, observer, collectives, heartbeat."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import dataloader

from nsa.trace.board import Board
from nsa.trace.calls import thread_starts
from nsa.trace.calls.arguments import in_runs
from nsa.trace.calls.collectives import HAS_HOOKS, CollectiveRecorder
from nsa.trace.ddp_buckets import hook_new_models
from nsa.trace.divergence.checksums import Checksums
from nsa.trace.events import mute, record
from nsa.trace.files import monotonic, sleep
from nsa.trace.observe import Observer
from nsa.trace.stall.exceptions import record_thread_exception
from nsa.trace.stall.exits import note_ends
from nsa.trace.stall.heartbeat import Heartbeat
from nsa.trace.stall.thread_errors import forget_thread_errors, report_thread_errors

if TYPE_CHECKING:
    from nsa.trace.flow.recorder import FlowRecorder

LEVEL, LEVELS = "NSA_TRACE_LEVEL", ("full", "light")
FLOW = "NSA_TRACE_FLOW"  # 1: record the ranks' control flow

_current: TraceSession | None = None


def is_light() -> bool:
    """Return whether modules, gradients and phases are not traced, only collectives (DDP's, too) and heartbeat.

    ValueError for another level.
    """
    level = os.environ.get(LEVEL) or "full"
    if level not in LEVELS:
        raise ValueError(f"{LEVEL}={level!r}: must be full or light")
    return level == "light"


def is_flow_wanted() -> bool:
    """Return whether the control flow of ranks is to be recorded."""
    return os.environ.get(FLOW, "0") not in ("", "0")


class TraceSession:
    """The tracers, installed once per process. Until `begin` they write into private memory."""

    heartbeat: Heartbeat

    def __init__(self) -> None:
        self.board = Board()
        self._has_begun = False
        self._folder: Path | None = None
        self.recorder = CollectiveRecorder(self.board)
        self.observer = Observer(self.board)
        self.recorder.install()
        self.is_light = is_light()
        if not self.is_light:
            self.observer.install()
        elif not HAS_HOOKS:
            hook_new_models()
        count_batches(self.board)
        thread_starts.install()
        note_ends(self.board, self._note_signal)
        os.register_at_fork(after_in_child=self._in_child)

    def _note_signal(self, pid: int, number: int, site: str) -> None:
        if self._folder is not None:
            record(self._folder, event="sends_signal", pid=int(pid), signal=int(number), where=site)

    def _in_child(self) -> None:
        """Detach a fork, such as a data loader's worker, from the board; a forked rank begins a new one."""
        if not self._has_begun:  # a fork of the zygote: its board is private memory already
            return
        mute(True)
        self.recorder.stores.forget()
        self.observer.forget()
        forget_thread_errors()
        self.board.open(None, 0, 1)

    def begin(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        world_size: int,
        label: str = "",
        beats: Path | None = None,
        *,
        checksums: bool = False,
    ) -> None:
        """Write ``board.bin`` in ``folder`` from now on, and ``heartbeat_rank{r}.jsonl`` in ``beats`` (default: ``folder``).

        With ``checksums``, also those of what DDP keeps equal on all ranks. Raises ValueError if the level is light.
        """
        if checksums and self.is_light:
            raise ValueError(f"check_divergence needs what {LEVEL}=light does not record: unset it")
        self._has_begun = True
        self._folder = Path(folder)
        mute(False)
        self.recorder.forget(rank, world_size)
        self.recorder.report_groups(lambda label, ranks, number: record(
            Path(folder), event="group", name=label, ranks=in_runs(list(ranks)),
            **({} if number is None else {"number": number}),
        ))  # fmt: skip
        self.recorder.stores.on_set = lambda key, site: record(Path(folder), event="key_set", key=key, where=site)
        self.observer.forget()
        self.board.open(Path(folder) / "board.bin", rank, world_size)
        path = (beats or Path(folder)) / f"heartbeat_rank{rank}.jsonl"
        self.heartbeat = Heartbeat(self.board, self.recorder, path, rank, Path(folder) / "stall.json", label)
        self.observer.on_change = self.heartbeat.change
        self.observer.checksums = Checksums(Path(folder)) if checksums else None
        self.recorder.on_reduce = self.observer.checksums.reduced if self.observer.checksums is not None else None
        report_thread_errors(
            lambda error, owner, future: record_thread_exception(Path(folder), error, owner, future),
            lambda future: record(Path(folder), event="future_asked", future=future),
        )
        self.heartbeat.start()

    def begin_flow(self, folder: Path) -> FlowRecorder:
        """Return what records this rank's control flow and its calls in ``folder``; it starts later."""
        from nsa.trace.flow.recorder import FlowRecorder  # most runs do without

        flow = FlowRecorder(folder / "flow.bin")
        self.recorder.on_call = self.recorder.stores.on_call = flow.call
        return flow

    def end(self, settle_s: float = 0.0) -> None:
        """End the trace, with a last heartbeat.

        Collectives that the program does not wait for get ``settle_s`` seconds to complete.
        """
        self.observer.end_step()
        forget_thread_errors()
        if self.observer.checksums is not None:
            self.observer.checksums.close()
        self.observer.forget()
        self.recorder.poll()
        deadline = monotonic() + settle_s
        while self.recorder.is_waiting and monotonic() < deadline:
            sleep(0.001)
            self.recorder.poll()
        self.recorder.stores.record_latest()
        self.recorder.stores.forget()  # a later key would be recorded in a folder that may be gone
        self.heartbeat.stop()


def installed() -> TraceSession:
    """Return this process's tracers, installed on first use. A fork inherits them."""
    global _current
    if _current is None:
        _current = TraceSession()
    return _current


def count_batches(board: Board) -> None:
    """Count on ``board`` each batch of a DataLoader of this process, and each iterator that is exhausted."""
    iterator: Any = dataloader._BaseDataLoaderIter
    following = iterator.__next__

    def counted(self: Any) -> Any:
        __tracebackhide__ = True
        try:
            batch = following(self)
        except StopIteration:
            board.add("loaders_ended")
            raise
        board.add("batches")
        board.add("progress")
        return batch

    iterator.__next__ = counted
