"""Read a test's folder, with what native code left in it, as values. Damaged parts are tolerated; nothing is interpreted."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_nsa.evidence.board import BoardReader, BoardSnapshot, get_world
from pytest_nsa.evidence.collectives import parse_ranks
from pytest_nsa.evidence.shapes import OWN_WORDS, has, is_counted, is_number, read_beats, read_events, read_reports
from pytest_nsa.evidence.source import LOCATION, Sources, read_sources, record_sources
from pytest_nsa.evidence.stacks import Origin, ThreadStack, parse_children, parse_dump
from pytest_nsa.evidence.values import (
    STILL_LOOKS,
    EventLoop,
    Evidence,
    Fact,
    Handled,
    KeyUse,
    MissingGradients,
    RaisedException,
    RankEvidence,
    ThreadError,
)
from pytest_nsa.evidence.waiting import SAMPLED_S, latest_sample
from pytest_nsa.evidence.wrapped import Wrapped
from pytest_nsa.wire.files import parse, read_bytes, read_end, read_text
from pytest_nsa.wire.messages import Job

END = 1 << 16  # bytes of an output
_FATAL = "Fatal Python error: "
_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV, "Aborted": signal.SIGABRT, "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL, "Floating point exception": signal.SIGFPE,
}  # fmt: skip

# `    at::native::add (libtorch_cpu.so)`, `    forward (model.py:12)`
_FRAME = re.compile(r"^\s+(?P<symbol>\S.*?) \((?P<place>[^()]*)\)$")
# What the runtime of C++ (libstdc++, libc++) prints of an exception that nothing catches, and assert() of C, before they abort.
_ABORT = re.compile(
    r"terminate called after throwing an instance of '(?P<type>[^'\n]+)'"
    r"(?:\n(?:terminate called recursively\n)?\s*what\(\): +(?P<what>[^\n]+))?"
    r"|terminating due to uncaught exception of type (?P<kind>\S+?)(?:: (?P<why>[^\n]+))?$"
    r"|^(?P<check>[^\n]{1,300}: Assertion [`'][^\n]{1,300}' failed\.)$",
    re.MULTILINE,
)


def innermost_symbol(text: str) -> str:
    """Return 'symbol in library' of the main thread's innermost frame; '' if that is no native frame."""
    in_main = False
    for line in text.splitlines():
        if line.startswith("Thread "):
            in_main = "MainThread" in line
        elif in_main and (match := _FRAME.match(line)):
            if ".py" in match["place"] or match["place"].startswith("<"):
                return ""
            return f"{match['symbol'][:120]} in {match['place']}"
    return ""


def fatal_signal(dump: str) -> int:
    """Return the signal that ended a process, by the first line of faulthandler's dump; 0 without one."""
    first = dump.partition("\n")[0].removeprefix(_FATAL)
    return _SIGNALS.get(first.replace("-", " ").strip(), 0) if dump.startswith(_FATAL) else 0


def read_abort_message(output: Path, ended_by: int) -> str:
    """Return `abort_message` of a file with a process's output; '' unless SIGABRT is the signal that ended it."""
    return abort_message(read_end(output, END)) if ended_by == signal.SIGABRT else ""


def abort_message(output: str) -> str:
    """Return the message of the abort that ended a process, from its output: 'gloo::EnforceNotMet: ...'; '' without one."""
    found = next(reversed(list(_ABORT.finditer(output.replace("\r\n", "\n")))), None)
    if found is None:
        return ""
    kind, text = found["type"] or found["kind"] or "", found["what"] or found["why"] or found["check"] or ""
    return ": ".join(part.strip() for part in (kind, text) if part)


TERMINATED = "terminated.txt"
BEAT_S = 0.05  # between two heartbeats, at least


def mark_first_gone(ranks: Sequence[RankEvidence]) -> tuple[RankEvidence, ...]:
    """Return the ranks; if some recorded their end, those that did not are ``gone`` since their last heartbeat.

    At SIGTERM, by which a launcher ends the remaining ranks, a rank writes its stacks; at a lost connection it raises. A rank with
    neither, and without an end, was killed before the others ended.
    """
    ended = {r.rank for r in ranks if r.exceptions or r.signal or read_text(r.folder / TERMINATED, 1)}
    return tuple(
        r if not ended or r.rank in ended or r.finished or r.gone else replace(r, gone=last_beat(r.board))
        for r in ranks
    )


def last_beat(board: BoardSnapshot | None) -> float:
    """Return when a rank's heartbeat last beat, 0.0 if it never did."""
    numbers = board.numbers if board is not None else {}
    return numbers.get("beat_time") or numbers.get("phase_time", 0.0)


def stalled_until_the_end(ranks: Sequence[RankEvidence]) -> float:
    """Return for how many seconds no rank that had not finished moved before its end, by what their heartbeats saw; 0.0 for less
    than a stall.
    """
    looks = [r.board.numbers.get("still_looks", 0.0) for r in ranks if not r.finished and r.board is not None]
    return min(looks) * BEAT_S if looks and min(looks) >= STILL_LOOKS else 0.0


COUNTERS_FILE = "counters.json"
COUNTERS = 4 << 20  # bytes


def read_counters(folder: Path, board: BoardSnapshot | None, until: float) -> Any:
    """Return what counters.json has; None where the rank has entered a call since it was written, and before ``until``."""
    counters = parse(read_text(folder / COUNTERS_FILE, COUNTERS))
    written = counters.get("time") if isinstance(counters, dict) else None
    if board is None or not is_number(written):
        return counters
    return None if any(written < c.entered <= until for c in board.collectives[-1:]) else counters


def reported(counters: Any, name: str, check: Callable[[Any], bool]) -> list[Mapping[str, Any]]:
    """Return the ``frames`` that a rank reported when its test was ended, or the ``files`` that it looked for; [] without any."""
    found = counters.get(name) if isinstance(counters, dict) else None
    return found if isinstance(found, list) and all(map(check, found)) else []


def counted(frames: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, Mapping[str, int]], ...]:
    return tuple((f["at"], {k: v for k, v in f["counters"].items() if isinstance(v, int)}) for f in frames)


AT_THE_END = ("warning", "left_running", "left_thread", "quit_debugger")  # events of how a rank ended
LATEST = 16  # calls of a rank for which the sources of the callers are kept
JOB, DUMP = 4 << 20, 8 << 20  # bytes that are read of job.json, and of a dump of stacks


def load(folder: Path, *others: Path) -> Evidence:
    """Read a test's or a training's folder; ``others`` are the folders of further nodes of the same run, with their ranks.

    Damaged parts are skipped, and listed in `Evidence.unread`. Raises FileNotFoundError if ``folder`` has no job.json,
    ValueError if that cannot be read.
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
        (_with_present_names(e) for f in folders for e in read_events(f / "host.jsonl", job.world_size, unread)),
        key=lambda e: e["time"],
    )
    of_all: list[dict[str, Any]] = []
    of_rank: dict[int, list[dict[str, Any]]] = {}
    for event in host:  # once, and not once a rank
        (of_rank.setdefault(event["rank"], []) if "rank" in event else of_all).append(event)
    seen = _by_kind(of_all)
    stall, ended = _last(seen["stall"]), _first(seen["ended"])
    stop = _first(seen["stop"]) or stall
    began = _first(seen["started"]).get("time", 0.0)
    started = began or job.created
    refused = _first(seen["refused"]).get("reason", "")
    with _collector_paused():
        ranks = tuple(
            _load_rank(_find_folder(folders, r), r, [*of_all, *of_rank.get(r, ())], sources, job, unread)
            for r in range(job.world_size)
        )
    ranks = ranks if host else mark_first_gone(ranks)  # no process watches a training
    has_ended = bool(ended) if host else all(r.finished for r in ranks)
    return Evidence(
        job=job,
        ranks=with_job_numbers(ranks),
        stop=stop.get("reason", "host_died" if refused or not has_ended else ""),
        stopped_by=stop.get("by", ""),
        stalled_s=stop.get("stalled_s", 0.0) if host else stalled_until_the_end(ranks),
        moved_at_stop=stop.get("moved", False),
        duration_s=ended.get("duration_s", max((e["time"] for e in host), default=started) - started),
        started=started,
        stop_time=stop.get("time", 0.0),
        waits_s=stall.get("waits_s", 0.0),
        refused="" if began else refused,
        lost=refused if began else "",
        folder=folder,
        sources=sources,
        unread=tuple(unread),
        external=tuple(Fact(rank=e["of"], kind=e["kind"], file=e["file"], text=e["says"]) for e in seen["told"]),
        xids=tuple((e["gpu"], e["xid"]) for e in seen["xid"]),
    )


def _by_kind(events: Iterable[dict[str, Any]]) -> Mapping[str, list[dict[str, Any]]]:
    """Return events by their kind, in their order; [] for a kind without any."""
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        found[event["event"]].append(event)
    return found


def _first(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first of some events; {} without any."""
    return events[0] if events else {}


def _last(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last of some events; {} without any."""
    return events[-1] if events else {}


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector while evidence is read: with thousands of ranks it would scan all of it repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _find_folder(folders: Sequence[Path], rank: int) -> Path:
    return next((f / f"rank{rank}" for f in folders if (f / f"rank{rank}").is_dir()), folders[0] / f"rank{rank}")


def _in_short(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{type(error).__name__}: {reason}"[:200]


def _load_rank(
    folder: Path, rank: int, host: list[dict[str, Any]], sources: Sources, job: Job, unread: list[str]
) -> RankEvidence:
    """Read a rank's evidence. Malformed data that no check covers makes only this rank's evidence unread."""
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
    seen = _by_kind(host)
    exit_event, sampled, stall = _first(seen["exit"]), _first(seen["sampled"]), _last(seen["stall"])
    stop = _first(seen["stop"]) or stall
    # The signal that requests a stack may wake the very call that hung: what the rank did after it is no evidence.
    woken = sampled.get("time", float("inf"))
    events = [e for e in events if e["time"] <= woken or e["event"] in AT_THE_END]
    of = _by_kind(events)
    start, parameters = _first(of["start"]), _last(of["parameters"])
    # The end of a process that the rank has forked is not the rank's; nor is its own, where its process then fails.
    done = _first([e for e in of["done"] if e.get("pid") == start.get("pid") or "pid" not in e])
    fell = not exit_event.get("by_us") and bool(exit_event.get("signal") or exit_event.get("code"))
    if fell and done.get("passed"):
        done = {}
    origin = Origin(job.body, tuple(start.get("libraries", ())))
    raised = tuple(_exception(e, origin) for e in of["exception"])
    # A future's exception that its caller has raised too.
    retrieved = {e["future"] for e in of["future_asked"] if e["future"]}
    # What the rank wrote of itself while it was stalled, unless it has moved since.
    own = _own_words(folder, stop.get("time", 0.0), stop.get("stalled_s", 0.0))
    board = BoardReader(folder / "board.bin").read()
    if board is not None and raised and not board.numbers.get("blocked_in"):
        board = replace(board, numbers={**board.numbers, "blocked_in": board.numbers.get("failed_in", 0)})
    counters, dump = read_counters(folder, board, woken), _text(folder / "stacks.txt")
    fatal = _text(folder / "fatal.txt")
    frames = reported(counters, "frames", is_counted)
    machine = str(start.get("machine", ""))
    return RankEvidence(
        rank=rank,
        exit_code=exit_event.get("code") if not exit_event.get("signal") and not exit_event.get("by_us") else None,
        signal=exit_event.get("signal", 0) if exit_event else fatal_signal(fatal),
        exit_time=exit_event.get("time", 0.0) if exit_event or not fatal else last_beat(board),
        by_us=exit_event.get("by_us", False),
        finished=bool(done),
        passed=done.get("passed", False),
        peaks={name: done[name] for name in ("peak_mib", "added_mib", "peak_gpu_mib") if name in done},
        skipped=_first(of["skipped"]).get("reason"),
        left=next((e for e in events if e["event"] in ("skipped", "xfailed")), {}),
        xfailed=_first(of["xfailed"]).get("reason"),
        exceptions=raised,
        parameter_names=tuple(parameters.get("names", ())),
        board=board,
        beat_age_s=(sampled or stall).get("beat_age_s", {}).get(str(rank)),
        moved_at_stop=rank in stop.get("moved_ranks", ()),
        process=latest_sample(seen["process"], stop.get("stalled_s", SAMPLED_S)),
        threads=_threads(dump, own.get("stacks", ""), origin),
        native_symbol=innermost_symbol(_text(folder / "native.txt")),
        native_absent=_first(seen["native"]).get("absent", ""),
        abort_message=read_abort_message(folder / "output.log", exit_event.get("signal", 0)),
        children_threads=parse_children(dump),
        fatal=parse_dump(fatal, origin),
        reports=tuple(read_reports(folder / "reports.jsonl")),
        heartbeats=tuple(read_beats(folder.parent / f"heartbeat_rank{rank}.jsonl")),
        notes=tuple(start.get("notes", ())),
        warnings=tuple(of["warning"]),
        left_threads=tuple((e["name"], e["where"]) for e in of["left_thread"]),
        left_running=tuple(e["command"] for e in of["left_running"]),
        pid=start.get("pid", 0),
        signals_sent=tuple((e["pid"], e["signal"], e["where"]) for e in of["sends_signal"]),
        oom_kills=exit_event.get("oom_kills", 0),
        pytest_exit=_first(of["pytest_exit"]),
        quit_debugger=bool(of["quit_debugger"]),
        gone=_first(seen["gone"]).get("time", 0.0),
        appeared={e["path"]: e["written"] for e in seen["appeared"]},
        anomalies=tuple(of["anomaly"]),
        modules=_path(board, parameters.get("modules", ())),
        checksums=folder / "checksums.jsonl",
        parallel=_last(of["parallel"]).get("kind"),
        groups={e["name"]: list_members(e["ranks"], job.world_size) for e in of["group"]},
        numbers={get_world(e["name"]): e["number"] for e in of["group"] if "number" in e},
        folder=folder,
        sources=sources,
        backend=job.backend,
        machine=machine,
        memory_mib=start.get("memory_mib", 0.0),
        counters=(raised[0].counters if raised else ()) or counted(frames),
        streams=tuple(place for frame in frames for place in frame.get("streams", ())),
        kept_errors=tuple((e["name"], e["says"], e["at"]) for frame in frames for e in frame.get("errors", ())),
        lines_seen=tuple(own.get("lines", ())),
        keys_set=_key_uses(of["key_set"], own.get("keys", ())),
        handles=Handled(held["says"], held["at"], held["in"]) if (held := own.get("handles")) else None,
        loop=_loop(own.get("asyncio")),
        thread_errors=tuple(
            ThreadError(e["time"], e["whose"], e["type"], e["message"], e["where"], e["raised_in"])
            for e in of["thread_exception"]
            if e["future"] not in retrieved
        ),
        gradients_missing=tuple(
            MissingGradients(e["step"], tuple(e["names"]), e["where"]) for e in of["gradients_missing"] if e["names"]
        ),
        ready_orders={e["step"]: e["order"] for e in of["gradients_ready"]},
        wrapped=tuple(Wrapped.of(e, list_members(e["ranks"], job.world_size)) for e in of["wrapped"]),
        needs_every_gradient=any(e.get("needs_every_gradient", False) for e in of["parallel"]),
        gpu=_find_gpu(machine, _first(seen["gpus"]).get("gpus", [])),
    )


def _key_uses(events: Sequence[Mapping[str, Any]], latest: Sequence[Sequence[Any]]) -> tuple[KeyUse, ...]:
    """Return the keys of a store that each line of a rank set."""
    found = dict.fromkeys([*((e["key"], e["where"]) for e in events), *((key, where) for key, where, *_ in latest)])
    return tuple(KeyUse(key, site, callers) for key, where in found for site, _, callers in [where.partition(" < ")])


def _loop(loop: Mapping[str, Any] | None) -> EventLoop | None:
    if not loop:
        return None
    failed = tuple((e["says"], e["at"]) for e in loop.get("failed", ()))
    return EventLoop(tuple(loop["tasks"]), loop["timers"], loop["files"], failed)


def _exception(e: Mapping[str, Any], origin: Origin) -> RaisedException:
    """Return an exception that a rank raised."""
    return RaisedException(
        **{k: e[k] for k in ("time", "when", "type", "message", "file", "line", "function")},
        module=e.get("module", ""),
        raised_in=e.get("raised_in", ""),
        chain=tuple((*entry, "", "")[:3] for entry in e.get("chain", ())),  # earlier versions left no type
        in_loader=e.get("in_loader", False),
        network=e.get("network", ""),
        missing=e.get("missing", ""),
        frames=tuple(origin.frame(*place) for place in reversed(e.get("stack", ()))),
        counters=counted(e.get("counters", ())),
    )


def with_job_numbers(ranks: tuple[RankEvidence, ...]) -> tuple[RankEvidence, ...]:
    """Return the ranks, with peers and roots of calls in other worlds translated to the job's numbers where these are known."""
    of_world: dict[str, dict[int, int]] = {}
    for rank in ranks:
        for world, number in rank.numbers.items():
            of_world.setdefault(world, {})[number] = rank.rank
    return tuple(replace(rank, board=_renumbered(rank.board, of_world)) for rank in ranks) if of_world else ranks


def _renumbered(board: BoardSnapshot | None, of_world: Mapping[str, Mapping[int, int]]) -> BoardSnapshot | None:
    if board is None:
        return None
    calls = [(c, of_world.get(get_world(c.group), {})) for c in board.collectives]
    renumbered = tuple(replace(c, peer=of.get(c.peer, c.peer), root=of.get(c.root, c.root)) for c, of in calls)
    return replace(board, decode_ring=lambda: renumbered)


def list_members(ranks: str | list[int], world_size: int) -> tuple[int, ...]:
    """Return the ranks of a group; earlier versions left a list."""
    return parse_ranks(ranks, world_size) if isinstance(ranks, str) else tuple(r for r in ranks if 0 <= r < world_size)


def _find_gpu(machine: str, gpus: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the driver's report of the GPU that a rank's machine names ('node5, GPU 2')."""
    _, named, number = machine.partition(", GPU ")
    return next((gpu for gpu in gpus if named and str(gpu.get("index")) == number), {})


def _path(board: BoardSnapshot | None, names: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that the current forward has called, by name."""
    return tuple(names[i] if i < len(names) else "another module" for i in board.path) if board is not None else ()


def _with_present_names(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event of host.jsonl with the names of verdict schema 2: older folders have `standing` and `stood_still_s`."""
    if event["event"] == "standing":
        event["event"] = "stall"
    if "stood_still_s" in event:
        event["stalled_s"] = event.pop("stood_still_s")
    return event


def _own_words(folder: Path, until: float, stalled_s: float) -> dict[str, Any]:
    """Return what the rank's heartbeat wrote of its stall; {} if it wrote that of an earlier stall. ``until``: when the ranks
    were stopped; 0 without a stop.
    """
    # Until verdict schema 2 it was standing.json.
    own = parse(_text(folder / "stall.json") or _text(folder / "standing.json"))
    if not isinstance(own, dict) or not has(own, OWN_WORDS):
        return {}
    return own if own["time"] >= until - stalled_s - 1.0 else {}


def _threads(dump: str, own: str, origin: Origin) -> tuple[ThreadStack, ...]:
    """Return the threads of the requested dump; those that the rank wrote itself if a kill has cut the dump off."""
    found = parse_dump(dump, origin)
    if any(stack.is_main and not stack.is_ours for stack in found):
        return found
    return parse_dump(own, origin) or found


def _text(path: Path) -> str:
    return read_text(path, DUMP)


def with_sources(evidence: Evidence, *, below: Path | None = None, keep: bool = True) -> Evidence:
    """Return evidence with the sources that it names; with ``keep``, write them into its folder before they change.

    ``below``: the folder that they must be in; None if the evidence is this user's.
    """
    found = record_sources(evidence.folder, _locations(evidence), evidence.sources, below=below, keep=keep)
    return replace(evidence, sources=found, ranks=tuple(replace(rank, sources=found) for rank in evidence.ranks))


def _locations(evidence: Evidence) -> Iterator[tuple[str, int]]:
    """Yield the locations in the user's code: of stacks, exceptions and calls of collectives, and the callers of the latest.

    Then those in packages on the ranks' stacks, such as a trainer's loop, in which one rank may be in a callback.
    """
    files: dict[str, str] = {}  # of a caller, only the file's name is known
    callers: set[str] = set()
    for rank in evidence.ranks:
        children = (stack for stacks in rank.children_threads for stack in stacks)
        raised = (error.frames for error in rank.exceptions)
        for frames in (*(stack.frames for stack in (*rank.threads, *rank.fatal, *children)), *raised):
            for frame in frames:
                if frame.is_user:
                    files[frame.file.rpartition("/")[2]] = frame.file
                    yield frame.file, frame.line
        yield from ((error.file, error.line) for error in rank.exceptions)
        sites = {c.site for c in rank.collectives} | {*rank.lines_seen, *rank.streams}
        sites.update((rank.handles.at, rank.handles.inside) if rank.handles is not None else ())
        sites.update(rank.loop.tasks if rank.loop is not None else ())
        for match in map(LOCATION.match, sorted(sites)):
            if match is not None:
                files.setdefault(match["file"].rpartition("/")[2], match["file"])
                yield match["file"], int(match["line"])
        callers.update(place for call in rank.collectives[-LATEST:] for place in call.way[1:])
    for match in map(LOCATION.match, sorted(callers)):
        if match is not None and match["file"] in files:
            yield files[match["file"]], int(match["line"])
    stacks = dict.fromkeys(rank.stack for rank in evidence.ranks if rank.stack is not None)
    yield from dict.fromkeys((f.file, f.line) for stack in stacks for f in stack.test_frames if f.is_in_package)
    # Functions of torch in which ranks are at different lines, as a schedule's of a pipeline.
    lines: dict[tuple[str, str], set[int]] = defaultdict(set)
    for frame in {f for stack in stacks for f in stack.test_frames if not (f.is_user or f.is_ours)}:
        lines[frame.file, frame.function].add(frame.line)
    yield from ((file, line) for (file, _), at in sorted(lines.items()) if len(at) > 1 for line in sorted(at))


def find_test_folders(folder: Path) -> list[Path]:
    """Return ``folder`` itself if it is a test's, else the tests' folders in it; without links, which may lead anywhere."""
    if (folder / "job.json").is_file():
        return [folder]
    return sorted(p.parent for p in folder.glob("*/job.json") if p.is_file() and not p.parent.is_symlink())
