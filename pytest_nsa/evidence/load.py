"""A test's folder as values. Reads what is there, tolerates what is torn or missing, and holds no opinion."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_nsa.evidence.board import BoardReader, BoardSnapshot
from pytest_nsa.evidence.native import innermost_symbol
from pytest_nsa.evidence.shapes import has, is_number, is_text, read_beats, read_events, read_reports
from pytest_nsa.evidence.source import LOCATION, Sources, read_sources, record_sources
from pytest_nsa.evidence.stacks import ThreadStack, parse_children, parse_dump, telling_thread
from pytest_nsa.evidence.waiting import computes, in_recorded_call, torch_s_wait, waits_for_a_key, waits_for_a_result
from pytest_nsa.wire.files import parse, read_bytes, read_text
from pytest_nsa.wire.messages import Job

SILENT_S = 0.6  # the heartbeat beats every 0.05 s
JOB, DUMP = 4 << 20, 8 << 20  # bytes that are read of job.json, and of a dump of stacks
STILL_LOOKS = 16  # beats that found the rank where it was: 0.8 s


@dataclass(frozen=True, kw_only=True, slots=True)
class RaisedException:
    """An exception as the rank recorded it. ``where`` is the innermost line of the user's code.

    ``raised_in`` is the file of the innermost frame of all; ``chain`` has (message, raised_in, type) of its causes. ``in_loader``:
    while it took a batch from a data loader's worker. ``network``: what of the network cannot be used, as the rank found.
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

    @property
    def where(self) -> str:
        """``file:line in function``."""
        return f"{self.file}:{self.line} in {self.function}" if self.file else ""

    @property
    def headline(self) -> str:
        """The first line of its message, '' where it has none."""
        return next(iter(self.message.strip().splitlines()), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEvidence:
    """What is known of one rank. ``signal`` is 0 unless one ended it; ``by_us``: the host sent it. ``anomalies`` are steps
    that did not go their usual way, ``modules`` those that the current forward had called, in their order; ``ddp`` are DDP's
    own numbers, the last that were read; ``groups`` the ranks of those it is in; ``left`` is where it skipped, or expected to
    fail, and after what; ``gone``: its process is no more, and how it ended was not observed; ``beat_age_s`` is how
    long the heartbeat had been silent when the host looked at the stall.
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
    reports: tuple[dict[str, Any], ...]
    heartbeats: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    warnings: tuple[dict[str, Any], ...]
    left_running: tuple[str, ...]
    left_threads: tuple[tuple[str, str], ...]
    quit_debugger: bool
    gone: float
    anomalies: tuple[dict[str, Any], ...]
    modules: tuple[str, ...]
    checksums: Path
    parallel: str | None
    ddp: dict[str, Any]
    groups: dict[str, tuple[int, ...]]
    folder: Path
    sources: Sources
    backend: str = ""
    machine: str = ""
    gpu: Mapping[str, Any] = field(default_factory=dict)  # what the driver reports of its GPU at the stall

    @property
    def stack(self) -> ThreadStack | None:
        """The thread that shows the rank's location, from the dump of the stall or of the crash."""
        return telling_thread(self.threads) or telling_thread(self.fatal)

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for others: inside a call that the board records, or in a function of torch that waits.

        Not while its main thread computes, is stopped, or waits for a disk: whatever it is inside of, it is at work.
        """
        if self.process.get("state") in ("T", "t", "D"):
            return False
        board, stack = self.board, telling_thread(self.threads)
        if stack is None:
            # A silent rank does not mark a collective that has completed behind its back; what blocks it, it marked before.
            silent = self.beat_age_s is not None and self.beat_age_s > SILENT_S
            return board is not None and (board.blocked is not None if silent else bool(board.inside))
        if board is not None and board.inside and self._is_in_one_call_on_a_device:
            return True
        if computes(self.process):
            return False
        if not torch_s_wait(stack.frames):
            return board is not None and bool(board.inside) and waits_for_a_result(stack.frames, self._line(stack))
        return board is None or board.blocked is not None or not stack.is_main or not in_recorded_call(stack.frames)

    @property
    def _is_in_one_call_on_a_device(self) -> bool:
        """Whether the main thread stays in one native call where collectives run on a device: the host's thread may spin there."""
        if self.board is None or not (self.board.numbers.get("on_device") or self.backend not in ("", "gloo")):
            return False
        n = self.board.numbers
        return n.get("still_looks", 0.0) >= STILL_LOOKS and n.get("still_moves", 0.0) <= 1

    @property
    def waits_for_a_key(self) -> bool:
        """Whether the rank waits for a key of a store."""
        stack = telling_thread(self.threads)
        return stack is not None and waits_for_a_key(stack.frames, self._line(stack))  # a store of files is polled

    def _line(self, stack: ThreadStack) -> str:
        frame = stack.user_frame
        return self.sources.line(frame.file, frame.line) if frame is not None else ""

    @property
    def missing(self) -> tuple[str, ...]:
        """Parameters whose gradient had not arrived in the last backward begun."""
        if self.board is None or len(self.board.arrived) < len(self.parameter_names):
            return ()
        return tuple(n for n, seen in zip(self.parameter_names, self.board.arrived, strict=False) if not seen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What is known of a test on ranks. ``stop`` is why the host ended it, '' when all ranks ended by
    themselves; ``refused`` why no ranks could be started, ``lost`` why those that ran could be followed no longer."""

    job: Job
    ranks: tuple[RankEvidence, ...]
    stop: str
    stood_still_s: float
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

    @property
    def was_ended_at_a_stall(self) -> bool:
        """Whether all ranks of a training that is only watched have gone together, after they had stalled: someone ended it."""
        left = [r for r in self.ranks if not r.finished]
        return bool(left and self.stood_still_s) and all(r.gone > self.stop_time for r in left)

    @property
    def was_stalled(self) -> bool:
        """Whether the ranks were stalled at the end. Where the host was killed that is not given: they may have been in motion."""
        if self.stop != "host_died":
            return True
        boards = [r.board.numbers for r in self.ranks if not r.finished and r.board is not None]
        if self.stood_still_s:  # the host saw it, then; a rank whose heartbeat went on must not have moved since
            boards = [n for n in boards if n["beat_time"] > self.stop_time]
        elif not boards:
            return False
        # A rank that was silent already, stopped or without the interpreter's lock, gives no evidence of whether it moved.
        newest = max((n["beat_time"] for n in boards), default=0.0)
        boards = [n for n in boards if n["beat_time"] > newest - SILENT_S]
        return all(n.get("still_looks", 0.0) >= STILL_LOOKS for n in boards)

    def members(self, group: str) -> tuple[int, ...]:
        """Return the ranks of a group; all of them where it was not recorded."""
        told = next((r.groups[group] for r in self.ranks if group in r.groups), ())
        return told or tuple(range(self.job.world_size))

    @property
    def parallel(self) -> str:
        """How the model was shared, as the ranks recorded it, else as the test's fixtures request."""
        return next((r.parallel for r in self.ranks if r.parallel), self.job.parallel)


def load(folder: Path, *others: Path) -> Evidence:
    """Read a test's or a training's folder; ``others`` are those of further nodes of the same run, with their ranks.

    What is damaged in it is passed over, and named in `Evidence.unread`. Raises FileNotFoundError when ``folder`` holds no
    job.json, ValueError when that cannot be read.
    """
    try:
        job = Job.from_stranger(json.loads(read_bytes(folder / "job.json", JOB)))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / 'job.json'}: {_in_short(error)}") from None
    folders, sources = (folder, *others), Sources([s for f in (folder, *others) for s in read_sources(f).snippets])
    unread: list[str] = []
    host = sorted(
        (e for f in folders for e in read_events(f / "host.jsonl", job.world_size, unread)), key=lambda e: e["time"]
    )
    of_all: list[dict[str, Any]] = []
    of_rank: dict[int, list[dict[str, Any]]] = {}
    for event in host:  # once, and not once a rank
        (of_rank.setdefault(event["rank"], []) if "rank" in event else of_all).append(event)
    standing: dict[str, Any] = next((e for e in reversed(of_all) if e["event"] == "standing"), {})
    stop = next((e for e in of_all if e["event"] == "stop"), standing)
    ended = next((e for e in host if e["event"] == "ended"), {})
    began = next((e["time"] for e in host if e["event"] == "started"), 0.0)
    started = began or job.created
    refused = next((e["reason"] for e in host if e["event"] == "refused"), "")
    return Evidence(
        job=job,
        ranks=tuple(
            _load_rank(_folder_of(folders, r), r, [*of_all, *of_rank.get(r, ())], sources, job, unread)
            for r in range(job.world_size)
        ),
        stop=stop.get("reason", "host_died" if refused or not ended else ""),
        stopped_by=stop.get("by", ""),
        stood_still_s=stop.get("stood_still_s", 0.0),
        moved_at_stop=stop.get("moved", False),
        duration_s=ended.get("duration_s", max((e["time"] for e in host), default=started) - started),
        started=started,
        stop_time=stop.get("time", 0.0),
        waits_s=standing.get("waits_s", 0.0),
        refused="" if began else refused,
        lost=refused if began else "",
        folder=folder,
        sources=sources,
        unread=tuple(unread),
        xids=tuple((e["gpu"], e["xid"]) for e in of_all if e["event"] == "xid"),
    )


def _folder_of(folders: Sequence[Path], rank: int) -> Path:
    return next((f / f"rank{rank}" for f in folders if (f / f"rank{rank}").is_dir()), folders[0] / f"rank{rank}")


def _in_short(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{type(error).__name__}: {reason}"[:200]


def _load_rank(
    folder: Path, rank: int, host: list[dict[str, Any]], sources: Sources, job: Job, unread: list[str]
) -> RankEvidence:
    """Read what a rank left. What a stranger may have written, and no check foresaw, costs this rank's own evidence alone."""
    try:
        if folder.is_symlink():
            raise ValueError("a link, which may lead out of the folder")
        return _read_rank(folder, rank, host, sources, job, unread)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        unread.append(f"{folder.name}: {_in_short(error)}")
        return _read_rank(folder / "unread", rank, [], sources, job, [])


def _read_rank(
    folder: Path, rank: int, host: list[dict[str, Any]], sources: Sources, job: Job, unread: list[str]
) -> RankEvidence:
    odd: list[str] = []
    events = list(read_events(folder / "events.jsonl", job.world_size, odd))
    unread += [f"{folder.name}/{what}" for what in odd]
    exit_event = next((e for e in host if e["event"] == "exit" and e["rank"] == rank), {})
    sampled = next((e for e in host if e["event"] == "sampled"), {})
    # The signal that requests a stack may wake the very call that hung: what the rank did from then on is not evidence.
    woken = sampled.get("time", float("inf"))
    events = [
        e
        for e in events
        if e["time"] <= woken or e["event"] in ("warning", "left_running", "left_thread", "quit_debugger")
    ]
    done = next((e for e in events if e["event"] == "done"), None)
    standing: dict[str, Any] = next((e for e in reversed(host) if e["event"] == "standing"), {})
    stop = next((e for e in host if e["event"] == "stop"), standing)
    # What the rank wrote of itself while it was stalled, unless its stacks were requested since, or it has moved.
    own = _own_words(folder, stop.get("time", 0.0), stop.get("stood_still_s", 0.0))
    board = BoardReader(folder / "board.bin").read()
    machine = next((str(e.get("machine", "")) for e in events if e["event"] == "start"), "")
    return RankEvidence(
        rank=rank,
        exit_code=exit_event.get("code") if not exit_event.get("signal") and not exit_event.get("by_us") else None,
        signal=exit_event.get("signal", 0),
        exit_time=exit_event.get("time", 0.0),
        by_us=exit_event.get("by_us", False),
        finished=done is not None,
        passed=bool(done and done["passed"]),
        skipped=next((e["reason"] for e in events if e["event"] == "skipped"), None),
        left=next((e for e in events if e["event"] in ("skipped", "xfailed")), {}),
        xfailed=next((e["reason"] for e in events if e["event"] == "xfailed"), None),
        exceptions=tuple(
            RaisedException(
                **{k: e[k] for k in ("time", "when", "type", "message", "file", "line", "function")},
                module=e.get("module", ""),
                raised_in=e.get("raised_in", ""),
                chain=tuple((*entry, "", "")[:3] for entry in e.get("chain", ())),  # earlier versions left no type
                in_loader=e.get("in_loader", False),
                network=e.get("network", ""),
            )
            for e in events
            if e["event"] == "exception"
        ),
        parameter_names=next((tuple(e["names"]) for e in reversed(events) if e["event"] == "parameters"), ()),
        board=board,
        beat_age_s=(sampled or standing).get("beat_age_s", {}).get(str(rank)),
        moved_at_stop=rank in stop.get("moved_ranks", ()),
        process=next((e for e in reversed(host) if e["event"] == "process" and e["rank"] == rank), {}),
        threads=parse_dump(_text(folder / "stacks.txt") or own.get("stacks", ""), job.body),
        native_symbol=innermost_symbol(_text(folder / "native.txt")),
        native_absent=next((e["absent"] for e in host if e["event"] == "native" and e["rank"] == rank), ""),
        children_threads=parse_children(_text(folder / "stacks.txt")),
        fatal=parse_dump(_text(folder / "fatal.txt"), job.body),
        reports=tuple(read_reports(folder / "reports.jsonl")),
        heartbeats=tuple(read_beats(folder.parent / f"heartbeat_rank{rank}.jsonl")),
        notes=next((tuple(e.get("notes", ())) for e in events if e["event"] == "start"), ()),
        warnings=tuple(e for e in events if e["event"] == "warning"),
        left_threads=tuple((e["name"], e["where"]) for e in events if e["event"] == "left_thread"),
        left_running=tuple(e["command"] for e in events if e["event"] == "left_running"),
        quit_debugger=any(e["event"] == "quit_debugger" for e in events),
        gone=next((e["time"] for e in host if e["event"] == "gone" and e["rank"] == rank), 0.0),
        anomalies=tuple(e for e in events if e["event"] == "anomaly"),
        modules=_path(board, next((e.get("modules", ()) for e in reversed(events) if e["event"] == "parameters"), ())),
        checksums=folder / "checksums.jsonl",
        parallel=next((e["kind"] for e in reversed(events) if e["event"] == "parallel"), None),
        ddp=next((e for e in reversed(events) if e["event"] == "ddp"), {}),
        groups={e["name"]: tuple(e["ranks"]) for e in events if e["event"] == "group"},
        folder=folder,
        sources=sources,
        backend=job.backend,
        machine=machine,
        gpu=_gpu_of(machine, next((e["gpus"] for e in host if e["event"] == "gpus"), [])),
    )


def _gpu_of(machine: str, gpus: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return what is known of the GPU that a rank's machine names ('node5, GPU 2')."""
    _, named, number = machine.partition(", GPU ")
    return next((gpu for gpu in gpus if named and str(gpu.get("index")) == number), {})


def _path(board: BoardSnapshot | None, names: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that the current forward has called, by name."""
    return tuple(names[i] if i < len(names) else "another module" for i in board.path) if board is not None else ()


def _own_words(folder: Path, until: float, stood_still: float) -> dict[str, Any]:
    """Return what the rank's heartbeat wrote of its stall; {} when that was an earlier one. ``until`` 0: nothing was observed
    later.
    """
    own = parse(_text(folder / "standing.json"))
    if not isinstance(own, dict) or not has(own, {"time": is_number, "stacks?": is_text, "beat_age_s?": is_number}):
        return {}
    return own if own["time"] >= until - stood_still - 1.0 else {}


def _text(path: Path) -> str:
    return read_text(path, DUMP)


def with_sources(evidence: Evidence) -> Evidence:
    """Keep the sources that the evidence names in its folder, while they are as the ranks ran them; the evidence with them."""
    found = record_sources(evidence.folder, _locations(evidence), evidence.sources)
    return replace(evidence, sources=found, ranks=tuple(replace(rank, sources=found) for rank in evidence.ranks))


def _locations(evidence: Evidence) -> Iterator[tuple[str, int]]:
    """Yield where the user's code was: in stacks, exceptions and calls of collectives."""
    for rank in evidence.ranks:
        children = (stack for stacks in rank.children_threads for stack in stacks)
        for stack in (*rank.threads, *rank.fatal, *children):
            yield from ((frame.file, frame.line) for frame in stack.frames if frame.is_user)
        yield from ((error.file, error.line) for error in rank.exceptions)
        sites = {c.site for c in rank.board.collectives} if rank.board is not None else set()
        for match in map(LOCATION.match, sorted(sites)):
            if match is not None:
                yield match["file"], int(match["line"])


def find_test_folders(folder: Path) -> list[Path]:
    """Return ``folder`` itself when it is a test's, else the tests' folders in it."""
    if (folder / "job.json").is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/job.json"))
