"""The evidence of a test and its ranks as values: what `load` reads, and properties that follow from it."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_nsa.evidence import waiting
from pytest_nsa.evidence.board import DEFAULT_GROUPS, OTHER_WORLD, BoardSnapshot, Collective
from pytest_nsa.evidence.source import Sources
from pytest_nsa.evidence.stacks import Frame, ThreadStack, thread_that_shows
from pytest_nsa.evidence.wrapped import Wrapped
from pytest_nsa.wire.messages import Job

SILENT_S = 0.6  # the heartbeat beats every 0.05 s
POLLED_S = 2.0  # a stalled rank that has queried a store within this time polls it
STILL_LOOKS = 16  # beats that found the rank where it was: 0.8 s
# The kernel sends these for an instruction of the process, and abort() sends SIGABRT: no other process is their sender.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGABRT)


def _first_line(message: str) -> str:
    return next(iter(message.strip().splitlines()), "")


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A key of a store that a line of the user's code set.

    ``callers`` are the lines that led there, innermost first, as in `Collective`.
    """

    key: str
    where: str
    callers: str = ""

    @property
    def called_from(self) -> str:
        """The line that called the function of ``where``; '' where that is unknown."""
        return self.callers.partition(" < ")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class RaisedException:
    """An exception as the rank recorded it. ``where`` is the innermost line of the user's code.

    ``raised_in`` is the file of the innermost frame of all; ``chain`` has (message, raised_in, type) of its causes. ``in_loader``:
    it was raised while a batch was taken from a data loader's worker. ``network``: the interface, host or port that the rank found
    unusable; ``missing``: the file that it did not find. ``frames``: its stack, innermost first; ``counters``: of its loops.
    """

    time: float
    when: str
    type: str
    module: str
    message: str
    file: str
    line: int
    function: str
    raised_in: str
    chain: tuple[tuple[str, str, str], ...]
    in_loader: bool = False
    network: str = ""
    missing: str = ""
    frames: tuple[Frame, ...] = ()
    counters: tuple[tuple[str, Mapping[str, int]], ...] = ()

    @property
    def where(self) -> str:
        """``file:line in function``."""
        return f"{self.file}:{self.line} in {self.function}" if self.file else ""

    @property
    def headline(self) -> str:
        """The first line of its message, '' where it has none."""
        return _first_line(self.message)


@dataclass(frozen=True, slots=True)
class ThreadError:
    """An exception of a thread other than the main one, or of an asyncio task, that was never retrieved. ``where``: the user's line
    that raised it; ``raised_in`` the file of the innermost frame.
    """

    time: float
    owner: str
    type: str
    message: str
    where: str
    raised_in: str

    @property
    def headline(self) -> str:
        """The first line of its message, '' where it has none."""
        return _first_line(self.message)


@dataclass(frozen=True, slots=True)
class Handled:
    """An exception that a stalled rank was handling: in an ``except``, a ``finally``, an ``__exit__``.

    ``text`` is its type and first argument, ``at`` the user's line that raised it, ``inside`` the line that handles it.
    """

    text: str
    at: str
    inside: str

    @property
    def type(self) -> str:
        return self.text.partition(":")[0]


@dataclass(frozen=True, slots=True)
class EventLoop:
    """What a stalled rank's asyncio loop waited for: the user's lines of its tasks, and how many timers and files may wake it;
    ``failed`` are (exception, the user's line that raised it) of tasks that ended so and whose exception was never retrieved.
    """

    tasks: tuple[str, ...]
    timers: int
    files: int
    failed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class MissingGradients:
    """Parameters without a gradient after the backward of ``step``. ``where``: the user's line at which the trace found it."""

    step: int
    names: tuple[str, ...]
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEvidence:
    """The evidence of one rank. ``signal`` ended it (0: no signal did); ``by_us``: the host sent it. ``anomalies`` are unusual
    steps; ``modules`` are those that the current forward had called, in order;
    ``groups`` has the members of the rank's groups, ``numbers`` its number in other worlds; ``left`` is where it skipped, or
    expected to fail, and after what; ``pytest_exit`` has the arguments of its call of ``pytest.exit``; ``abort_message`` is what
    its process printed before SIGABRT ended it; ``gone`` is when its process was last alive, if its end was not observed;
    ``beat_age_s`` is how long its heartbeat had been silent at the stall.
    """

    rank: int
    exit_code: int | None
    signal: int
    exit_time: float
    by_us: bool
    finished: bool
    passed: bool
    skipped: str | None
    xfailed: str | None
    left: dict[str, Any]
    exceptions: tuple[RaisedException, ...]
    parameter_names: tuple[str, ...]
    board: BoardSnapshot | None
    beat_age_s: float | None
    moved_at_stop: bool
    process: dict[str, Any]
    threads: tuple[ThreadStack, ...]
    fatal: tuple[ThreadStack, ...]
    children_threads: tuple[tuple[ThreadStack, ...], ...]
    native_symbol: str
    native_absent: str
    abort_message: str
    reports: tuple[dict[str, Any], ...]
    heartbeats: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    warnings: tuple[dict[str, Any], ...]
    left_running: tuple[str, ...]
    left_threads: tuple[tuple[str, str], ...]
    quit_debugger: bool
    pytest_exit: dict[str, Any]
    gone: float
    anomalies: tuple[dict[str, Any], ...]
    modules: tuple[str, ...]
    checksums: Path
    parallel: str | None
    groups: dict[str, tuple[int, ...]]
    numbers: dict[str, int]
    folder: Path
    sources: Sources
    peaks: Mapping[str, float] = field(default_factory=dict)  # of memory, in MiB
    backend: str = ""
    machine: str = ""
    memory_mib: float = 0.0  # of its machine or container; 0: unknown
    pid: int = 0
    signals_sent: tuple[tuple[int, int, str], ...] = ()  # process, signal, the line that sent it
    oom_kills: int = 0  # processes of its control group that the kernel had ended for memory by its end
    gpu: Mapping[str, Any] = field(default_factory=dict)  # what the driver reports of its GPU at the stall
    counters: tuple[tuple[str, Mapping[str, int]], ...] = ()  # of loops, by the user's location, outermost first
    handles: Handled | None = None
    streams: tuple[str, ...] = ()  # the locations of the user's generators in these loops
    kept_errors: tuple[tuple[str, str, str], ...] = ()  # exceptions in its variables: name, text, raised at
    lines_seen: tuple[str, ...] = ()  # of the user's code, at which its heartbeat found the main thread in a stall
    keys_set: tuple[KeyUse, ...] = ()  # the first and the last key of a store, of each kind, that each line set
    loop: EventLoop | None = None
    thread_errors: tuple[ThreadError, ...] = ()
    gradients_missing: tuple[MissingGradients, ...] = ()  # by a requested trace; one entry for steps that lack the same
    # By step, a checksum of the order in which gradients became ready.
    ready_orders: Mapping[int, int] = field(default_factory=dict)
    appeared: Mapping[str, float] = field(
        default_factory=dict
    )  # files that it did not find, and when each was written later
    needs_every_gradient: bool = False  # DDP waits for a gradient of each parameter
    wrapped: tuple[Wrapped, ...] = ()  # the models that DDP wraps, in order

    @property
    def fatal_signal(self) -> int:
        """The signal that ended it; 0 if none did, or if the host sent it."""
        return 0 if self.by_us else self.signal

    @property
    def rounds(self) -> dict[str, str]:
        """The counters of the loops as text, 'step = 3, attempt = 1', by location, where there are any."""
        texts = {place: ", ".join(f"{name} = {n}" for name, n in counts.items()) for place, counts in self.counters}
        return {place: words for place, words in texts.items() if words}

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The last calls that its board holds, oldest first; () without a board."""
        return self.board.collectives if self.board is not None else ()

    @property
    def threads_at_work(self) -> tuple[ThreadStack, ...]:
        """The side threads that may still act: timers, user code, and calls in an executor; not those that wait without a time
        limit for work, for a lock or for other ranks. None where the rank waits for ever.
        """
        if self.waits_for_ever:
            return ()
        others = (t for t in self.threads if not t.is_main and not t.is_ours)
        return tuple(t for t in others if t.is_a_timer or self._is_at_work(t))

    def _is_at_work(self, thread: ThreadStack) -> bool:
        at = thread.user_frame
        if waiting.torch_wait(thread.frames):
            return False
        if at is None and not thread.runs_a_call:
            return thread.runs_a_loop
        if at is not None and (thread.waits_for_a_process or waiting.has_a_time_limit(self._line(thread))):
            return True
        frame = thread.frames[0]
        line = self.sources.line(frame.file, frame.line) if frame.is_user else ""
        # At a lock in Python code, or in C code called by a user's line: a `with` that has called no Python enters a lock.
        at_a_lock = frame.function == "acquire" or line.startswith("with ") or waiting.is_at_a_lock(line)
        return thread.runs_a_loop or not (thread.waits_for_work or at_a_lock)

    @property
    def waits_for_ever(self) -> bool:
        """Whether its program has ended, and each of its threads waits for another one of them without a time limit."""
        threads = [t for t in self.threads if not t.is_ours]
        is_idle, children = self.process.get("cpu_share", 0.0) < waiting.STARVED, self.process.get("children")
        return is_idle and waiting.wait_for_ever(threads, self.sources, has_children=bool(children))

    @property
    def stack(self) -> ThreadStack | None:
        """The thread that shows the rank's location: from the dump of the crash if there is one, else from that of the stall."""
        return thread_that_shows(self.fatal) or thread_that_shows(self.threads)

    @property
    def last_stack(self) -> ThreadStack | None:
        """The rank's last location in its program: the stack of the exception that ended its test, else `stack`."""
        frames = self.exceptions[0].frames if self.exceptions and not self.fatal else ()
        return ThreadStack(frames, is_main=True) if frames else self.stack

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for others: inside a call that the board records, or in a function of torch that waits.

        False while its main thread computes, is stopped, or waits for a disk, even inside such a call.
        """
        if self.process.get("state") in ("T", "t", "D"):
            return False
        board, stack = self.board, thread_that_shows(self.threads)
        if stack is None:
            # A silent rank marks no completed collectives; the call that blocks it was marked before.
            silent = self.beat_age_s is not None and self.beat_age_s > SILENT_S
            return board is not None and (board.blocked is not None if silent else bool(board.inside))
        if board is not None and board.inside and self._is_in_one_call_on_a_device:
            return True
        if waiting.computes(self.process):
            return False
        if not waiting.torch_wait(stack.frames):
            waits = waiting.waits_for_a_result(stack.frames, self._line(stack))
            return bool(board and board.inside) and waits and self.process.get("wchan") not in waiting.SLEEPS
        if board is None or board.blocked is not None:
            return True
        return not stack.is_main or not waiting.in_recorded_call(stack.frames)

    @property
    def _is_in_one_call_on_a_device(self) -> bool:
        """Whether collectives run on a device and the main thread stays in one native call, in which it may spin."""
        if self.board is None or not (self.board.numbers.get("on_device") or self.backend not in ("", "gloo")):
            return False
        n = self.board.numbers
        return n.get("still_looks", 0.0) >= STILL_LOOKS and n.get("still_moves", 0.0) <= 1

    @property
    def waits_for_a_key(self) -> bool:
        """Whether the rank waits for a key of a store: in a call that waits, or by polling."""
        stack = thread_that_shows(self.threads)
        if stack is not None and waiting.waits_for_a_key(stack.frames, self._line(stack)):  # a store of files is polled
            return True
        n = self.board.numbers if self.board is not None else {}
        looked, since = n.get("polled_time", 0.0), n.get("polled_from", 0.0)
        # If the rank's heartbeat has stopped, it is unknown whether it still polls.
        is_live = self.process.get("state") not in ("T", "t", "D") and (self.beat_age_s or 0.0) <= SILENT_S
        looks = bool(looked) and n.get("beat_time", 0.0) - looked < POLLED_S and looked - since >= POLLED_S / 2
        return looks and is_live and not self.is_waiting

    def _line(self, stack: ThreadStack) -> str:
        frame = stack.user_frame
        return self.sources.line(frame.file, frame.line) if frame is not None else ""

    @property
    def missing(self) -> tuple[str, ...]:
        """Parameters for which no gradient had arrived in the latest backward."""
        if self.board is None or len(self.board.arrived) < len(self.parameter_names):
            return ()
        return tuple(n for n, seen in zip(self.parameter_names, self.board.arrived, strict=False) if not seen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One piece of evidence: its rank (-1: of none in particular), kind, file (relative to the test's folder), and text."""

    rank: int
    kind: str
    file: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The evidence of a test on ranks. ``stop`` is why the host ended it, '' if all ranks ended by themselves; ``refused`` is why
    no ranks could be started; ``lost`` is why the host lost the ranks that ran."""

    job: Job
    ranks: tuple[RankEvidence, ...]
    stop: str
    stalled_s: float
    moved_at_stop: bool
    duration_s: float
    started: float
    stop_time: float
    waits_s: float
    refused: str
    lost: str
    folder: Path
    sources: Sources
    stopped_by: str = ""  # the signal that interrupted the session; '' for Ctrl-C
    unread: tuple[str, ...] = ()  # what could not be read, and why
    xids: tuple[tuple[int, int], ...] = ()  # (GPU, error) as the driver logged them
    external: tuple[Fact, ...] = ()  # by the hook pytest_nsa_collect_evidence

    @property
    def was_ended_at_a_stall(self) -> bool:
        """Whether all ranks of a training that is only watched disappeared after a stall: then it was ended from outside."""
        left = [r for r in self.ranks if not r.finished]
        return bool(left and self.stalled_s) and all(r.gone > self.stop_time for r in left)

    @property
    def was_stalled(self) -> bool:
        """Whether the ranks were stalled at the end. If the host was killed, they may have made progress: the boards decide."""
        if self.stop != "host_died":
            return True
        boards = [r.board.numbers for r in self.ranks if not r.finished and r.board is not None]
        if self.stalled_s:  # the host observed the stall: a rank with later heartbeats must not have moved since
            boards = [n for n in boards if n["beat_time"] > self.stop_time]
        elif not boards:
            return False
        # A rank that was silent before (stopped, or without the GIL) shows nothing.
        newest = max((n["beat_time"] for n in boards), default=0.0)
        boards = [n for n in boards if n["beat_time"] > newest - SILENT_S]
        return all(n.get("still_looks", 0.0) >= STILL_LOOKS for n in boards)

    def was_ended_by_the_test(self, rank: int) -> bool:
        """Return whether the program itself ended a rank by a signal: by a crash, or as a rank sent it."""
        return self.ranks[rank].signal in CRASHES or self.find_sender(rank) is not None

    def find_sender(self, rank: int) -> tuple[int, str] | None:
        """Return the rank that sent the signal which ended a rank, and the line; None where no rank did."""
        of = (self.ranks[rank].pid, self.ranks[rank].signal)
        sent = ((other.rank, where) for other in self.ranks for *what, where in other.signals_sent if (*what,) == of)
        return next(sent, None)

    def members(self, group: str) -> tuple[int, ...]:
        """Return the ranks of a group. Of another world's group: those that recorded it. Of an unrecorded group: the ranks that
        called in it if its size is below the world's, else all.
        """
        known = [r.groups[group] for r in self.ranks if group in r.groups]
        if OTHER_WORLD in group:
            return tuple(sorted(set(itertools.chain.from_iterable(known))))
        everyone = tuple(range(self.job.world_size))
        if any(known) or group in DEFAULT_GROUPS:
            return next(filter(None, known), everyone)
        calls = {r.rank: [c for c in r.collectives if c.process_group == group] for r in self.ranks}
        is_smaller = any(c.size < len(everyone) for found in calls.values() for c in found)
        return tuple(rank for rank, found in calls.items() if found) if is_smaller else everyone

    @property
    def parallel(self) -> str:
        """How the model was shared, as the ranks recorded it, else as the test's fixtures request."""
        return next((r.parallel for r in self.ranks if r.parallel), self.job.parallel)
