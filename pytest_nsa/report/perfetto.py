"""``perfetto.json`` in a test's folder: phases and collectives per rank, in the trace event format, for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_nsa.evidence.values import Evidence, RankEvidence
from pytest_nsa.wire.files import write_json

NAME = "perfetto.json"
_PHASES, _COLLECTIVES = 0, 1


def build_trace(evidence: Evidence) -> dict[str, Any]:
    """Return the trace: microseconds since the ranks were started; a process per rank, a track per kind, and an arrow from each
    rank's collective to the same one of the next rank.
    """
    events = [e for rank in evidence.ranks for e in _rank_events(rank, evidence)]
    return {"traceEvents": [*events, *_flows(evidence)], "displayTimeUnit": "ms"}


def write_trace(folder: Path, evidence: Evidence) -> None:
    """Write the trace into the folder of the evidence."""
    write_json(folder / NAME, build_trace(evidence))


def _flows(evidence: Evidence) -> Iterator[dict[str, Any]]:
    """Yield the arrows, in the order in which the ranks entered."""
    places: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for rank in evidence.ranks:
        for c in rank.collectives:
            if c.peer == -1:
                places.setdefault(c.place, []).append((c.entered, rank.rank))
    for number, (place, entered) in enumerate(places.items(), 1):
        for index, (at, pid) in enumerate(sorted(entered) if len(entered) > 1 else ()):
            kind = "s" if index == 0 else "f" if index == len(entered) - 1 else "t"
            ends = {"bp": "e"} if kind == "f" else {}
            ts = round(1e6 * (at - evidence.started)) + 1
            yield {
                "ph": kind,
                "id": number,
                "pid": pid,
                "tid": _COLLECTIVES,
                "name": f"#{place[1]}",
                "cat": "collective",
                "ts": ts,
                **ends,
            }


def _rank_events(rank: RankEvidence, evidence: Evidence) -> Iterator[dict[str, Any]]:
    pid, begin = rank.rank, evidence.started
    end = rank.exit_time or evidence.stop_time or max((b["time"] for b in rank.heartbeats), default=begin)
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"rank {rank.rank}"}}
    for track, name in ((_PHASES, "phases"), (_COLLECTIVES, "collectives")):
        yield {"ph": "M", "pid": pid, "tid": track, "name": "thread_name", "args": {"name": name}}
    for start, stop, phase, step in phase_spans(rank, end):
        yield _slice(pid, _PHASES, phase, start - begin, stop - start, {"step": step})
    for c in rank.collectives:
        facts = {"group": c.group, "sequence": c.sequence, "site": c.site, "step": c.step, "left": not c.is_inside}
        yield _slice(
            pid, _COLLECTIVES, c.describe(), c.entered - begin, (c.left or max(end, c.entered)) - c.entered, facts
        )


def _slice(pid: int, tid: int, name: str, start: float, duration: float, facts: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(1e6 * start), "dur": max(1, round(1e6 * duration))}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, "args": facts}


def first_seen(rank: RankEvidence) -> float:
    """Return when the heartbeat wrote its first line, or the rank entered its first call, if that was before; infinity if never."""
    calls = (c.entered for c in rank.collectives if c.sequence == 1 and c.entered)
    return min((*(b["time"] for b in rank.heartbeats[:1]), *calls), default=float("inf"))


def phase_spans(rank: RankEvidence, end: float) -> Iterator[tuple[float, float, str, int]]:
    """Yield (start, stop, phase, step) of consecutive phases, from the heartbeat's lines; the last one lasts until ``end``.

    The first one begins where the rank was first seen.
    """
    current: tuple[float, str, int] | None = None
    for beat in rank.heartbeats:
        if current is None:  # of a short test the last phase may be the only one that was written
            current = (first_seen(rank), "body" if beat["phase"] == "done" else beat["phase"], beat["step"])
        if (beat["phase"], beat["step"]) != current[1:]:
            yield current[0], beat["time"], current[1], current[2]
            current = (beat["time"], beat["phase"], beat["step"])
    if current is not None and current[1] != "done":
        yield current[0], max(end, current[0]), current[1], current[2]
