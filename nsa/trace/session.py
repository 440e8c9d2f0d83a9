"""The always-on tracers of one rank, started together: board, observer, collectives, heartbeat."""

from __future__ import annotations

import os
from pathlib import Path

from nsa.trace.board import Board
from nsa.trace.collectives import CollectiveRecorder
from nsa.trace.heartbeat import Heartbeat
from nsa.trace.observe import Observer

_current: TraceSession | None = None


class TraceSession:
    """Leaves ``board.bin`` in ``folder`` and ``heartbeat_rank{r}.jsonl`` in ``beats`` (default: there too)."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        world_size: int,
        label: str = "",
        beats: Path | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.board = Board(self.folder / "board.bin", rank, world_size)
        self.recorder = CollectiveRecorder(self.board)
        heartbeat_file = (beats or self.folder) / f"heartbeat_rank{rank}.jsonl"
        self.heartbeat = Heartbeat(self.board, self.recorder, heartbeat_file, rank, label)
        self.observer = Observer(self.board, self.heartbeat.record)


def start(
    folder: str | os.PathLike[str], rank: int, world_size: int, label: str = "", beats: Path | None = None
) -> TraceSession:
    """Start the tracers of this process. A second call returns the first one's session."""
    global _current
    if _current is None:
        _current = TraceSession(folder, rank, world_size, label, beats)
        _current.recorder.install()
        _current.observer.install()
        _current.heartbeat.start()
    return _current
