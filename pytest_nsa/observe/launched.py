"""A job that was started without our tracer: what /proc shows of its ranks, the dumps and logs that they leave, py-spy's stacks.

It only reads: no rank is signalled, and nothing is written where the ranks find it.
"""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_nsa.diagnosis.foreign import build_evidence, missing_for_more, suspect
from pytest_nsa.diagnosis.verdict import Finding
from pytest_nsa.evidence.board import BoardSnapshot, make_board
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.foreign.find import read_job
from pytest_nsa.foreign.values import MOST_RANKS, ForeignJob, ForeignRank
from pytest_nsa.observe.finders import read_variables
from pytest_nsa.observe.second_look import dump_by_py_spy
from pytest_nsa.report.terminal import number_ranks
from pytest_nsa.system.clock import monotonic, wall_clock
from pytest_nsa.system.descendants import TICKS
from pytest_nsa.system.procfs import began, count_waits, is_alive, list_written_files, look_at
from pytest_nsa.wire.files import open_to_read, write_atomically

LAST, LEAST, MOST_LOGS = 16 << 20, 1 << 16, 256  # bytes of all logs that are read, and of one
WINDOW_S = 1.0  # between two looks
BUSY, WAITS = 0.1, 2.0  # of a core; a second, of a main thread that does a little at a time
OLD_S = 10.0  # a dump is of another moment if a rank has moved so long after it
STACKS_AT_S, MOST_STACKS, STACK_LIMIT_S = 3.0, 8, 5.0
MOST_UNREAD = 5
LAST_WORDS_S = 10.0  # of a launcher, after its ranks have ended
ENDED = ("watchdog", "monitored barrier", "ends of processes")  # kinds of lines which state that a job could not go on
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
NEXT_LAUNCH = (
    "at the next launch set TORCH_FR_BUFFER_SIZE=2000 and TORCH_FR_DUMP_TEMP_FILE=DIR/dump_, and send the output to files, "
    "or set NSA_TRACE_DIR=DIR"
)


@dataclass
class _Log:
    """A log that ``ranks`` write: what follows ``start`` is of this job."""

    descriptor: int
    start: int
    ranks: set[int]
    size: int = 0

    def has_grown(self) -> bool:
        before, self.size = self.size, os.fstat(self.descriptor).st_size
        return self.size != before

    def read_last(self, most: int) -> bytes:
        size = os.fstat(self.descriptor).st_size
        self.start = self.start if self.start <= size else 0  # it was cut
        return os.pread(self.descriptor, most, max(self.start, size - most))


@dataclass
class _Process:
    """The process of a rank, as a board that moves while it works, or while a file of it grows."""

    job: LaunchedJob
    rank: int
    pid: int
    variables: dict[str, str] = field(init=False)
    moves: int = 0
    _looked_at: float = 0.0
    _cpu_s: float = 0.0
    _waits: int = 0

    def __post_init__(self) -> None:
        self.variables, self.began = read_variables(self.pid), began(self.pid)
        self.folder = os.path.realpath(f"/proc/{self.pid}/cwd")

    @property
    def is_alive(self) -> bool:
        return is_alive(self.pid, self.began)

    def list_dumps(self) -> list[Path]:
        """Return where torch writes a dump of this rank, by the variables it was started with."""
        home = self.variables.get("HOME", "/tmp")
        given = next((self.variables[name] for name in _PREFIXES if self.variables.get(name)), None)
        prefixes = [given] if given else [f"{home}/.cache/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"]
        return [Path(self.folder, f"{prefix}{self.rank}") for prefix in prefixes]

    def find_pipe(self) -> str:
        """Return the pipe by which torch is asked for a dump, '' without one."""
        prefix = self.variables.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "")
        path = Path(self.folder, f"{prefix}{self.rank}.pipe")
        return str(path) if prefix and path.is_fifo() else ""

    def read(self) -> BoardSnapshot:
        is_alive, now = self.is_alive, monotonic()
        if is_alive and now - self._looked_at >= WINDOW_S:
            self._look(now)
        # What is known of the present stall is read by then.
        values = self.job.get_values(self.rank) if self.job.stalled_s >= STACKS_AT_S else ForeignRank()
        frames = [*values.stack, *(frame for call in values.pending[:1] for frame in call.frames)]
        line = next((frame.describe() for frame in frames if frame.is_user), "")
        phase = "done" if not is_alive else f"in {values.pending[0].op}" if values.pending else "runs"
        numbers = {"pid": float(self.pid), "world_size": float(self.job.world_size), "progress": float(self.moves)}
        return make_board(numbers, phase=phase, line=line)

    def _look(self, now: float) -> None:
        state, waits, passed = look_at(self.pid), count_waits(self.pid), now - self._looked_at
        if state is None:
            return
        cpu_s = state.cpu_s + state.below_cpu_s
        is_busy = cpu_s - self._cpu_s >= BUSY * passed and self.rank not in self.job.stuck
        if self._looked_at and (is_busy or waits - self._waits >= WAITS * passed):
            self.moves += 1
            self.job.worked_at = wall_clock()
        self._looked_at, self._cpu_s, self._waits = now, cpu_s, waits


class LaunchedJob:
    """The job of the processes ``ranks`` (rank -> pid), and of ``launcher``, which may be one of them.

    ``folder`` is private to this object: the ends of logs, and stacks, are written there.
    """

    def __init__(self, ranks: Mapping[int, int], launcher: int, folder: Path) -> None:
        self.folder, self.launcher = folder, launcher
        self.found = ForeignJob()
        self.stuck: set[int] = set()  # ranks inside an old call, by their dumps: these may spin
        self.worked_at = 0.0  # when a rank worked last, in seconds since the epoch
        self.stalled_s = 0.0  # set by the caller: since when no rank moves
        self.readers = {rank: _Process(self, rank, pid) for rank, pid in ranks.items()}
        sizes = (of.variables.get("WORLD_SIZE", "") for of in self.readers.values())
        largest = max([1 + max(ranks), *(int(size) for size in sizes if size.isdecimal())])
        self.world_size = min(MOST_RANKS, largest)
        self._logs: dict[tuple[int, int], _Log] = {}
        self._dumps: dict[Path, float] = {}
        self._looked_at = 0.0
        self._alive_at = self._read_at = self._stacks_at = -math.inf
        self._evidence: Evidence | None = None

    def alive(self) -> dict[int, int]:
        """Return the process ids of the ranks that have not ended, by rank."""
        return {rank: of.pid for rank, of in self.readers.items() if of.is_alive}

    def get_values(self, rank: int) -> ForeignRank:
        """Return what the evidence shows of a rank."""
        return self.found.ranks.get(rank, ForeignRank())

    def has_ended(self) -> bool:
        """Return whether all ranks have ended, and their launcher, which states why, or has had the time to."""
        alive = self.alive()
        self._alive_at = monotonic() if alive else self._alive_at
        launches = self.launcher not in {of.pid for of in self.readers.values()} and is_alive(self.launcher)
        return not alive and not (launches and monotonic() - self._alive_at < LAST_WORDS_S)

    def look(self) -> None:
        """Find dumps and logs, once a second: a rank has moved where one of its files has changed."""
        if monotonic() - self._looked_at < WINDOW_S:
            return
        is_first, self._looked_at = not self._looked_at, monotonic()
        self._find_logs(self.launcher, set())
        for rank, of in self.readers.items():
            self._find_logs(of.pid, {rank})
        grown = [log for log in self._logs.values() if log.has_grown()]
        if is_first and grown:  # what ranks have written since a dump shows that they went on
            self.worked_at = max(os.fstat(log.descriptor).st_mtime for log in grown)
        moved = {rank for log in grown for rank in log.ranks}
        before, self._dumps = self._dumps, dict(self._find_dumps())
        if before != self._dumps:
            moved |= set(self.readers)
            written = max(self._dumps.values(), default=0.0)
            by_rank = read_job(self._dumps).ranks.items()
            self.stuck = {r for r, values in by_rank if any(0 < c.created < written - OLD_S for c in values.pending)}
        for rank in moved:
            self.readers[rank].moves += 1

    def read(self) -> Evidence:
        """Return the evidence of the dumps, logs and stacks of this stall, which is read once more when it has stacks."""
        stalled_at = monotonic() - self.stalled_s
        wants_stacks = self.stalled_s >= STACKS_AT_S and self._stacks_at < stalled_at
        if self._evidence is not None and self._read_at >= stalled_at and not wants_stacks:
            return self._evidence
        self._read_at = monotonic()
        for path in self.folder.iterdir():
            if path.suffix == ".log" or self._stacks_at < stalled_at:
                path.unlink()
        for number, log in enumerate(self._logs.values()):
            place = f"rank{min(log.ranks)}" if len(log.ranks) == 1 else "shared"
            text = log.read_last(max(LEAST, LAST // len(self._logs)))
            write_atomically(self.folder / f"{place}_of_{number}.log", text)
        if wants_stacks:
            self._stacks_at = self._read_at
            self._write_stacks()
        self.found = read_job([*self._dumps, *sorted(self.folder.iterdir())])
        alive = self.alive()
        for rank, values in self.found.ranks.items():
            if values.error and (rank in alive or not self._is_at_an_end(values.error)):
                values.error = ""  # the rank went on: it had caught the exception
        self._evidence = build_evidence(self.found, f"process {self.launcher}", sources=True)
        return self._evidence

    def read_again(self) -> Evidence:
        """Return the evidence of a job that has ended."""
        self._evidence = None
        return self.read()

    def suspect(self, evidence: Evidence) -> Finding | None:
        """Return what the rules find; None where it concerns ranks of another machine, of which nothing is known here."""
        found = suspect(self.found, evidence)
        return found if found is not None and {*found.ranks} <= {*self.readers, *self.found.ranks} else None

    def has_stated_its_end(self) -> bool:
        """Return whether a log states why the job could not go on."""
        return any(word in kind for kind in self.found.kinds for word in ENDED)

    def describe(self) -> list[str]:
        """Return a line per kind of evidence, what is missing for more, and how to get a dump."""
        lines = [*self.found.kinds, *(f"cannot read {text}" for text in self.found.unread[:MOST_UNREAD])]
        if not lines and self.stalled_s >= STACKS_AT_S:
            places = " or ".join(map(str, next(iter(self.readers.values())).list_dumps()))
            lines.append(f"nothing to read: no dump is at {places}, {len(self._logs)} logs show no wait; {NEXT_LAUNCH}")
        elif lines and (more := missing_for_more(self.found)):
            lines.append(f"lacks {more}")
        pipe = next(filter(None, (of.find_pipe() for of in self.readers.values())), "")
        if pipe and not self._dumps:
            lines.append(f"torch writes a rank's dump when you write into its pipe: echo 1 > {pipe}")
        if elsewhere := sorted(set(range(self.world_size)) - set(self.readers)):
            lines.append(f"{number_ranks(elsewhere)}: not on this machine, or without a launcher's variables")
        return lines

    def close(self) -> None:
        """Close the logs."""
        for log in self._logs.values():
            os.close(log.descriptor)
        self._logs.clear()

    def _find_logs(self, pid: int, ranks: set[int]) -> None:
        """Open the files that a process writes as output, errors or *.log."""
        restarted = read_variables(pid).get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        for path, target, flags in list_written_files(pid):
            if path.name not in ("1", "2") and not target.endswith(".log"):
                continue
            try:
                status = path.stat()
                log = self._logs.get((status.st_dev, status.st_ino))
                if log is None and len(self._logs) < MOST_LOGS:
                    opened, size = open_to_read(path, follow=True)
                    # Of a file that is appended to, or that a restarted job shares, the first part is of another job.
                    log = _Log(opened, size if restarted or flags & os.O_APPEND else 0, set())
                    self._logs[status.st_dev, status.st_ino] = log
            except OSError:  # no regular file, or closed by now
                continue
            if log is not None:
                log.ranks |= ranks

    def _find_dumps(self) -> Iterator[tuple[Path, float]]:
        """Yield the dumps of this job with the times at which they were written, none from before ranks have moved."""
        booted = wall_clock() - time.clock_gettime(time.CLOCK_BOOTTIME)
        for of in self.readers.values():
            for path in of.list_dumps():
                try:
                    status = path.stat()
                except (OSError, ValueError):
                    continue
                is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
                if is_own and status.st_mtime >= max(booted + of.began / TICKS, self.worked_at - OLD_S):
                    yield path, status.st_mtime

    def _is_at_an_end(self, error: str) -> bool:
        """Return whether an exception is at the end of a log."""
        text = error.partition(": ")[2][:80].encode()
        return any(text in log.read_last(4096) for log in self._logs.values())

    def _write_stacks(self) -> None:
        alive = self.alive()
        wanted = sorted(alive, key=lambda rank: self.get_values(rank).has_pending)  # a dump shows the line of a call
        for rank in wanted[:MOST_STACKS]:
            text, _ = dump_by_py_spy(alive[rank], "--nonblocking", "--full-filenames", limit_s=STACK_LIMIT_S)
            if text:
                write_atomically(self.folder / f"stack_{rank}.txt", text)
