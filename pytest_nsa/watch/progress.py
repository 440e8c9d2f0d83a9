"""Whether ranks move: compares boards over time, and sees collectives that cannot match any more."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from pytest_nsa.watch.board import BoardReader, BoardSnapshot, Collective

QUIET_S = 0.2
CONFIRM_MISMATCH_S = 1.0


def first_departure(boards: dict[int, BoardSnapshot]) -> tuple[Collective, ...] | None:
    """The first place where ranks' sequences of collectives differ: what each rank entered there, by rank.

    Compares what both sides of a group have entered at the same sequence number: operation, dtype, count. Point-to-point
    calls and groups that only one rank used are left out.
    """
    by_key: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, board in boards.items():
        for c in board.collectives:
            if c.peer == -1:
                by_key.setdefault((c.group, c.sequence), {})[rank] = c
    for key in sorted(by_key, key=lambda k: (k[1], k[0])):
        entered = by_key[key]
        if len({c.shape for c in entered.values()}) > 1:
            return tuple(entered[rank] for rank in sorted(entered))
    return None


def waits_apart(boards: dict[int, BoardSnapshot]) -> dict[int, Collective] | None:
    """What each rank waits in, when every rank's main thread waits and no two of them in the same collective's call.

    Nobody can come to anybody's help then. Point-to-point calls are left out: they pair by tag, not by sequence.
    """
    waiting = {rank: board.blocked for rank, board in boards.items()}
    found = {rank: c for rank, c in waiting.items() if c is not None and c.peer == -1 and c.is_inside}
    if len(found) < max(2, len(boards)):
        return None
    places = {(c.group, c.sequence) for c in found.values()}
    entered = [{(c.group, c.sequence) for c in board.collectives} for board in boards.values()]
    # A collective that every rank has entered completes by itself; one that some rank has yet to enter does not, as that
    # rank waits elsewhere.
    if len(places) < 2 or any(all(place in seen for seen in entered) for place in places):
        return None
    return found


@dataclass
class ProgressWatch:
    """Feeds on the ranks' boards; knows since when nothing has moved."""

    folders: dict[int, Path]
    readers: dict[int, BoardReader] = field(init=False)
    boards: dict[int, BoardSnapshot] = field(init=False, default_factory=dict)
    running_since: float = 0.0
    last_move: float = field(init=False)
    _signatures: dict[int, tuple[float, ...]] = field(init=False, default_factory=dict)
    _last_look: float = field(init=False)
    _departed_since: float = 0.0

    def __post_init__(self) -> None:
        self.readers = {rank: BoardReader(folder / "board.bin") for rank, folder in self.folders.items()}
        self.last_move = self._last_look = time.monotonic()

    def look(self) -> None:
        """Read every board and note what moved."""
        now = time.monotonic()
        if now - self._last_look > 5.0:
            self.last_move = now  # this process itself was suspended: that is not the ranks' stand-still
        self._last_look = now
        for rank, reader in self.readers.items():
            board = reader.read()
            if board is None:
                continue
            self.boards[rank] = board
            if self._signatures.get(rank) != board.signature:
                self._signatures[rank] = board.signature
                self.last_move = now
        if not self.running_since and len(self.boards) == len(self.folders) and self.all_past("start"):
            self.running_since = now

    def all_past(self, phase: str) -> bool:
        """Whether every rank has a board and none is in ``phase``."""
        return all(board.phase != phase for board in self.boards.values())

    @property
    def stood_still(self) -> float:
        """Seconds since anything of any rank moved."""
        return time.monotonic() - self.last_move

    def has_departed(self) -> bool:
        """Whether collectives have disagreed for long enough to be sure of it: that cannot mend itself."""
        # Ranks that still move are not looked at more closely: decoding every ring at every look costs.
        if self.stood_still < QUIET_S or (first_departure(self.boards) is None and waits_apart(self.boards) is None):
            self._departed_since = 0.0
            return False
        now = time.monotonic()
        self._departed_since = self._departed_since or now
        return now - self._departed_since >= CONFIRM_MISMATCH_S
