"""Whether ranks move: compare boards over time, find collectives that can no longer match, and measure a stall while it lasts."""

import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pytest_nsa.evidence.board import AFTER_LIMIT_S, BoardReader, BoardSnapshot
from pytest_nsa.evidence.collectives import Rings, any_can_complete, first_departure, waits_in_different_calls
from pytest_nsa.system.clock import monotonic, wall_clock
from pytest_nsa.system.procfs import ProcessState, difference, look_at

BEGIN_S = 1.4  # of a stall, before the first look at the processes
SAMPLE_S = 0.5
FIRST_ASSESSMENTS_S, LATER_ASSESSMENTS_S = 1.0, 5.0
OFTEN_S = 12.0
BUSY = 0.1  # of a core


@dataclass
class StallClock:
    """The length of a stall: ``look`` is called with the ranks' process ids at each poll; ``counted`` is the stall in seconds.

    A waiting rank's is measured by the clock, a computing rank's by the CPU time that it got: a slow machine ends no test.
    """

    counted: float = 0.0
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    _states: dict[int, tuple[float, ProcessState]] = field(default_factory=dict)
    _sampled: float = 0.0
    _assessed: float = 0.0

    def reset(self) -> None:
        """Reset after progress."""
        if self._sampled:
            self.counted, self._sampled, self._assessed = 0.0, 0.0, 0.0
            self.facts, self._states = {}, {}

    def look(self, pids: Mapping[int, int], stalled_s: float) -> bool:
        """Look at the processes (rank -> pid) if it is time to; return whether the stall should be assessed (again) now."""
        now = monotonic()
        if stalled_s < BEGIN_S or now - self._sampled < SAMPLE_S:
            return False
        is_first = not self._sampled
        self._sampled = now
        passed, computed = 0.0, 0.0
        for rank, pid in pids.items():
            state = look_at(pid)
            if state is None:
                continue
            if rank in self._states:
                before, last = self._states[rank]
                passed = now - before
                self.facts[rank] = difference(last, state, passed)
                used = state.cpu_s - last.cpu_s
                if self.facts[rank]["wants_cpu"] or used > BUSY * passed:
                    computed = max(computed, used) or 1e-9
            self._states[rank] = (now, state)
        self.counted += min(passed, computed) if computed else passed
        if is_first or not self.facts:
            self.counted = stalled_s if is_first else self.counted
            return False
        pause = FIRST_ASSESSMENTS_S if stalled_s < OFTEN_S else LATER_ASSESSMENTS_S
        if now - self._assessed < pause:
            return False
        self._assessed = now
        return True


QUIET_S = 0.2
GRACE_S = 1.0  # of a stall, before it counts as one
HELD_UP_S = 0.6  # between two looks, one every 0.05 s
BEAT_S = 0.05  # between looks of a rank's heartbeat
CONFIRM_MISMATCH_S = 1.0
STEPS, LONGEST = 5.0, 2.0  # times the usual step, and the longest pause at the place
PAUSE_S = 1.0  # a shorter stall is no pause
ENOUGH_STEPS = 3


@dataclass
class Past:
    """The steps and pauses of a job's ranks so far, in seconds."""

    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    _step_began: dict[int, float] = field(default_factory=dict)
    _longest: dict[str, float] = field(default_factory=dict)

    def moved(self, rank: int, before: BoardSnapshot, after: BoardSnapshot, pause: float) -> None:
        """Record that a rank has moved again after ``pause`` seconds."""
        now = monotonic()
        if after.numbers["step"] > before.numbers["step"]:
            began = self._step_began.get(rank)
            if began is not None:
                self._steps.append((now - began) / (after.numbers["step"] - before.numbers["step"]))
            self._step_began[rank] = now
        if pause >= PAUSE_S and before.blocked is None:
            place = _place(before.line)
            self._longest[place] = max(pause, self._longest.get(place, 0.0))

    def limit(self, least: float, line: str) -> float:
        """Return after how long a pause at ``line`` is unusual, ``least`` at least."""
        step = statistics.median(self._steps) if len(self._steps) >= ENOUGH_STEPS else 0.0
        return max(least, STEPS * step, LONGEST * self._longest.get(_place(line), 0.0))


def _place(line: str) -> str:
    """Return file and function of ``file:line in function``: equal pauses may be at different lines of a function."""
    file, _, rest = line.partition(":")
    return f"{file} {rest.partition(' in ')[2]}"


def _stalled_at_first_sight(board: BoardSnapshot, now: float) -> float:
    """Return for how many seconds a rank had not moved when its board is first read: by its heartbeat, or its last write."""
    n = board.numbers
    if beat := n.get("beat_monotonic"):
        # By both clocks: one may have been set, the other is another machine's.
        silent = min(now - beat, wall_clock() - n.get("beat_time", 0.0))
        return BEAT_S * n.get("still_looks", 0.0) + max(0.0, silent)
    wrote = max(n.get("phase_time", 0.0), n.get("line_time", 0.0))
    return max(0.0, wall_clock() - wrote) if wrote else 0.0


class Reader(Protocol):
    """Reads the board of a rank."""

    def read(self) -> BoardSnapshot | None:
        """Return its present state; None without a board."""


@dataclass
class ProgressWatch:
    """Reads the ranks' boards, and records since when nothing has moved."""

    readers: dict[int, Reader] = field(default_factory=dict)
    boards: dict[int, BoardSnapshot] = field(init=False, default_factory=dict)
    past: Past = field(init=False, default_factory=Past)
    running_since: float = 0.0
    called_since: float = 0.0  # since all ranks are in their test's call; 0 before, and once all have left it
    last_move: float = field(init=False)
    _signatures: dict[int, tuple[float, ...]] = field(init=False, default_factory=dict)
    _moves: dict[int, float] = field(init=False, default_factory=dict)
    _last_look: float = field(init=False)
    _departed_since: float = 0.0
    _held_up: deque[tuple[float, float]] = field(init=False, default_factory=lambda: deque(maxlen=100))

    def __post_init__(self) -> None:
        self.last_move = self._last_look = monotonic()

    def add_from(self, folder: Path) -> None:
        """Watch also the ranks that have a board in ``folder`` (``rankR/board.bin``)."""
        for path in folder.glob("rank*/board.bin"):
            number = path.parent.name.removeprefix("rank")
            if number.isdecimal() and int(number) not in self.readers:
                self.readers[int(number)] = BoardReader(path)

    def measure_stall(self, rank: int) -> float:
        """Seconds since a rank moved."""
        return monotonic() - self._moves.get(rank, monotonic())

    def look(self, *, worked: bool = False) -> None:
        """Read every board and note what moved. ``worked``: the caller itself has taken time since the last look."""
        now = monotonic()
        if not worked and now - self._last_look > HELD_UP_S:
            self._held_up.append((self._last_look, now))
        if now - self._last_look > 5.0:
            self.last_move = now  # this process was suspended, which is no stall of the ranks
        self._last_look = now
        for rank, reader in self.readers.items():
            board = reader.read()
            if board is None:
                continue
            before, self.boards[rank] = self.boards.get(rank), board
            if self._signatures.get(rank) != board.signature:
                self._signatures[rank] = board.signature
                if before is not None:
                    self.past.moved(rank, before, board, now - self._moves.get(rank, now))
                self._moves[rank] = now - (_stalled_at_first_sight(board, now) if before is None else 0.0)
                self.last_move = max(self._moves.values())
        are_running = all(board.phase != "start" for board in self.boards.values())
        if not self.running_since and are_running and len(self.boards) == len(self.readers):
            self.running_since = now
        calls = [board.numbers.get("call", 0) for board in self.boards.values()]
        if not self.called_since and calls and min(calls) == 1:
            self.called_since = now
        elif calls and min(calls) == 2:
            self.called_since = 0.0

    def pause(self, seconds: float) -> None:
        """Exclude ``seconds`` in which the ranks were held (by a debugger) from their time and from their stalls."""
        if seconds:
            self.last_move += seconds
            self._last_look += seconds
            self.running_since += seconds if self.running_since else 0.0
            self.called_since += seconds if self.called_since else 0.0
            self._departed_since = 0.0
            self._moves = {rank: at + seconds for rank, at in self._moves.items()}

    @property
    def stalled_s(self) -> float:
        """Seconds since any rank moved."""
        return monotonic() - self.last_move

    @property
    def longest_wait(self) -> float:
        """Seconds since any rank moved; or since a rank moved that waits in a collective for ranks that do move, if longer."""
        now = monotonic()
        waits = [now - self._moves[rank] for rank, board in self.boards.items() if board.inside and rank in self._moves]
        return max([self.stalled_s, *waits])

    @property
    def beat_ages(self) -> dict[str, float]:
        """Seconds since each rank's last heartbeat, by the monotonic clock, without the time in which this process did not run
        either: the machine causes a silence that all processes share.
        """
        now = monotonic()
        # Without a first beat, the silence began when the rank moved.
        beats = {r: b.numbers.get("beat_monotonic") or self._moves.get(r, now) for r, b in self.boards.items()}
        shared = {r: sum(max(0.0, end - max(start, beat)) for start, end in self._held_up) for r, beat in beats.items()}
        return {str(rank): now - beat - shared[rank] for rank, beat in beats.items()}

    def stop_facts(self) -> dict[str, Any]:
        """Return for how long no rank has moved, and which ranks have moved within `GRACE_S`, as evidence."""
        now = monotonic()
        moved = [rank for rank, at in self._moves.items() if now - at < GRACE_S]
        return {"stalled_s": self.stalled_s, "moved": self.stalled_s < GRACE_S, "moved_ranks": moved}

    @property
    def rings(self) -> Rings:
        """The ranks' last collectives."""
        return {rank: board.collectives for rank, board in self.boards.items()}

    def has_departed(self) -> bool:
        """Return whether the ranks' collectives have differed for `CONFIRM_MISMATCH_S`: that cannot resolve itself."""
        # Only at a stall: decoding every ring at every look is expensive.
        if self.stalled_s < QUIET_S or not self._disagree():
            self._departed_since = 0.0
            return False
        now = monotonic()
        self._departed_since = self._departed_since or now
        return now - self._departed_since >= CONFIRM_MISMATCH_S

    def _disagree(self) -> bool:
        blocked = {rank: board.blocked for rank, board in self.boards.items()}
        return first_departure(self.rings) is not None or waits_in_different_calls(blocked, self.rings) is not None

    def ends_by_itself(self, within: float) -> bool:
        """Return whether a rank waits in a call with a time limit that ends within ``within`` seconds, or has just ended."""
        now = wall_clock()
        return any(now - AFTER_LIMIT_S < board.limit_time < now + within for board in self.boards.values())

    def is_even(self) -> bool:
        """Return whether every rank has left each collective that it entered, and no collectives differed."""
        numbers = [board.numbers for board in self.boards.values()]
        return all(n["collectives_entered"] == n["collectives_left"] for n in numbers) and not first_departure(
            self.rings
        )

    @property
    def blocked(self) -> list[int]:
        """The ranks with a main thread that waits in a collective."""
        return [rank for rank, board in self.boards.items() if board.blocked is not None]

    def is_left_alone(self, ended: Collection[int]) -> bool:
        """Return whether every rank that has not ended waits in a collective that needs a rank that has."""
        waits = [board.blocked for rank, board in self.boards.items() if rank not in ended]
        found = [c for c in waits if c is not None and c.peer == -1]
        return 0 < len(found) == len(waits) and not any_can_complete(found, self.rings)
