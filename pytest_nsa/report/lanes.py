"""A failure's pictures: one lane per rank over time, as SVG (phases, steps, collectives, the stall, who waits for whom; of many
ranks a heat map), and the table of collectives: a row per rank, a column per number, a missing or differing call marked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence, RankEvidence
from pytest_nsa.report.markup import Markup, tag
from pytest_nsa.report.terminal import number_ranks, short_place
from pytest_nsa.wire.files import write_json

TRACE = "perfetto.json"
_PHASES, _COLLECTIVES = 0, 1


def build_trace(evidence: Evidence) -> dict[str, Any]:
    """Return the trace: microseconds since the ranks were started; a process per rank, a track per kind, and an arrow from each
    rank's collective to the same one of the next rank.
    """
    events = [e for rank in evidence.ranks for e in _rank_events(rank, evidence)]
    return {"traceEvents": [*events, *_flows(evidence)], "displayTimeUnit": "ms"}


def write_trace(folder: Path, evidence: Evidence) -> None:
    """Write the trace into the folder of the evidence."""
    write_json(folder / TRACE, build_trace(evidence))


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


COLUMNS = 10  # the last of a group
MOST_GROUPS = 6

Column = dict[int, Collective]  # by rank


def make_columns(evidence: Evidence) -> dict[str, dict[int, Column]]:
    """Return collectives by group, number and rank; sends and receives are excluded, as they pair by peer and tag."""
    found: dict[str, dict[int, Column]] = {}
    for rank in evidence.ranks:
        for c in rank.collectives:
            if c.peer == -1:
                found.setdefault(c.group, {}).setdefault(c.sequence, {})[rank.rank] = c
    return found


def is_whole(column: Column) -> bool:
    """Return whether all ranks of the group made the call, with equal operation and arguments."""
    first = next(iter(column.values()))
    return len(column) >= first.size and len({c.shape for c in column.values()}) == 1


def call_tables(evidence: Evidence) -> Iterator[Markup]:
    """Yield a table per group in which ranks differ, else the one of the group that was used last."""
    groups = make_columns(evidence)
    uneven = [name for name, columns in groups.items() if not all(map(is_whole, columns.values()))]
    latest = max(groups, key=lambda n: max(c.entered for col in groups[n].values() for c in col.values()), default=None)
    for name in uneven[:MOST_GROUPS] or ([latest] if latest is not None else []):
        yield _table(evidence, name, groups[name])
    if len(uneven) > MOST_GROUPS:
        yield tag("p", f"{len(uneven) - MOST_GROUPS} other groups differ, too.", class_="quiet")


def _table(evidence: Evidence, group: str, columns: dict[int, Column]) -> Markup:
    numbers = sorted(columns)[-COLUMNS:]
    members = [r for r in evidence.members(group) if r < len(evidence.ranks)]
    rows: dict[tuple[str, ...], list[int]] = {}
    cells: dict[tuple[str, ...], list[Markup]] = {}
    for rank in members:
        row = [_cell(columns[n], rank) for n in numbers]
        key = tuple(str(cell) for cell in row)
        rows.setdefault(key, []).append(rank)  # equal rows once: 64 ranks have two or three different ones
        cells[key] = row
    head = tag("tr", tag("th", "rank", scope="col"), *(tag("th", f"#{n}", scope="col") for n in numbers))
    body = [
        tag("tr", tag("th", number_ranks(ranks).partition(" ")[2], scope="row"), *cells[key])
        for key, ranks in rows.items()
    ]
    caption = f"collectives of {'the default group' if group in ('', 'default', '0') else f'group {group}'}"
    return tag(
        "div",
        tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body), class_="calls"),
        class_="scroll",
    )


def _cell(column: Column, rank: int) -> Markup:
    usual = _usual(column)
    c = column.get(rank)
    if c is None:
        return tag("td", "not entered", class_="hole", title=f"rank {rank} did not enter it")
    odd = c.shape != usual.shape
    state = "inside" if c.is_inside else ""
    label = [c.op, tag("br"), tag("small", f"{c.dtype} × {c.count}" if c.dtype else "")]
    if c.is_inside:
        label.append(tag("small", " waits", class_="waits"))
    return tag("td", *label, class_=f"{'odd ' if odd else ''}{state}".strip() or None, title=c.describe())


def _usual(column: Column) -> Collective:
    """Return the call that most ranks made at this place."""
    shapes = [c.shape for c in column.values()]
    most = max(shapes, key=shapes.count)
    return next(c for c in column.values() if c.shape == most)


def find_waits(evidence: Evidence) -> dict[int, set[int]]:
    """Return, by rank, the ranks that it waits for: members of the group of its call that have not entered this call."""
    groups = make_columns(evidence)
    found: dict[int, set[int]] = {}
    for rank in evidence.ranks:
        for c in rank.board.inside if rank.board is not None and not rank.finished else ():
            if c.peer >= 0:
                found.setdefault(rank.rank, set()).add(c.peer)
            elif c.peer == -1:
                there = groups[c.group].get(c.sequence, {})
                missing = {m for m in evidence.members(c.group) if m not in there or there[m].shape != c.shape}
                if missing:
                    found.setdefault(rank.rank, set()).update(missing - {rank.rank})
    return found


PHASES = ("start", "body", "data", "forward", "backward", "optimizer", "done")
WIDTH, LEFT, RIGHT = 860, 76, 44
FOLDED = 46  # the width of a start that is folded
TICKS = 60  # the last collectives, which are drawn
SPANS = 400  # the last phases of a rank, which are drawn
FEW_SPANS = 80  # the same in a test that passed
ARROWS = 12
HEAT = 24  # from so many ranks on, a lane is a stripe without text


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Converts seconds to x coordinates. The start before ``fold`` (imports, building, forming the group) is drawn narrow."""

    begin: float
    end: float
    fold: float

    @property
    def width(self) -> float:
        """The width of the part after the fold."""
        return WIDTH - (FOLDED if self.fold > self.begin else 0)

    def x(self, time: float) -> float:
        """Return the x coordinate of a time."""
        if self.fold > self.begin and time < self.fold:
            return LEFT + FOLDED * max(0.0, time - self.begin) / (self.fold - self.begin)
        after = max(self.begin, self.fold)
        time = max(time, after)
        return LEFT + WIDTH - self.width + self.width * min(1.0, (time - after) / max(1e-3, self.end - after))


def make_axis(evidence: Evidence) -> Axis:
    """Return the axis of a test: from its first call or heartbeat to its last sign of life; a long start is folded."""
    beats = [b["time"] for r in evidence.ranks for b in r.heartbeats]
    ends = [*beats, evidence.stop_time, *(r.exit_time for r in evidence.ranks)]
    seen = min(map(first_seen, evidence.ranks), default=math.inf)
    begin = evidence.started if math.isinf(seen) else seen
    end = max(max(ends, default=begin), begin + 1e-3)
    firsts = [b["time"] for r in evidence.ranks for b in r.heartbeats if b["phase"] not in ("start", "body", "done")]
    firsts += [c.entered for r in evidence.ranks for c in r.collectives if c.entered >= begin]
    if not firsts:
        firsts = [b["time"] for r in evidence.ranks for b in r.heartbeats if b["phase"] != "start"]
    first = min(firsts, default=begin)
    is_long = first - begin > max(0.3, 0.15 * (end - begin))
    return Axis(begin=begin, end=end, fold=first if is_long else begin)


def lanes(evidence: Evidence, culprits: Sequence[int]) -> Markup:
    """Return the drawing."""
    axis, count = make_axis(evidence), len(evidence.ranks)
    height, gap = (26, 8) if count <= 8 else (13, 3) if count < HEAT else (5, 1)
    whole = count * (height + gap) + 24
    parts: list[Markup] = []
    for index, rank in enumerate(evidence.ranks):
        y = index * (height + gap) + 4
        is_culprit = rank.rank in culprits
        drawn = tag("g", *_lane(rank, evidence, axis, y, height, is_culprit=is_culprit), data_lane=rank.rank)
        parts.append(drawn)
        if count < HEAT or is_culprit or index % 8 == 0:  # above the lane: on a phone it is wider than its column
            label = f"rank {rank.rank}{' ◀' if is_culprit else ''}"
            parts.append(tag("text", label, x=0, y=y + min(17, height + 2), class_="culprit" if is_culprit else None))
    if count < HEAT:
        parts += _ticks(evidence, axis, height, gap)
    waits = find_waits(evidence)
    parts += _arrows(evidence, waits, height, gap)
    parts += _scale(axis, whole - 6)
    label = f"{count} ranks over {axis.end - axis.begin:.1f} seconds"
    drawing = tag(
        "svg", _DEFINITIONS, *parts, viewBox=f"0 0 {LEFT + WIDTH + RIGHT} {whole}", role="img", aria_label=label,
        class_="lanes" if count <= 8 else "lanes many",
    )  # fmt: skip
    return tag("div", drawing, *_in_words(waits), _legend(evidence, axis), class_="zoomable", tabindex=0)


def _legend(evidence: Evidence, axis: Axis) -> Markup:
    """Return what the colours and marks of the drawing mean."""
    drawn = {phase for rank in evidence.ranks for _, _, phase, _ in _spans(rank, evidence, axis.end)}
    colours = [tag("span", tag("i", style=f"background:var(--{p})"), p) for p in PHASES if p in drawn]
    marks = (
        "ticks: collectives, joined between ranks, red where ranks differ", "striped: stalled",
        "◀ and red line: the culprit, when it last moved", "arrows: who waits for whom",
    )  # fmt: skip
    return tag("p", *colours, *(tag("span", mark) for mark in marks), class_="key quiet")


_DEFINITIONS = tag(
    "defs",
    tag(
        "pattern", tag("rect", width=4, height=8, fill="var(--paper)", fill_opacity="0.55"), id="still", width=8, height=8,
        patternUnits="userSpaceOnUse", patternTransform="rotate(45)",
    ),
    tag(
        "marker", tag("path", d="M0 0 L7 3.5 L0 7 z", fill="var(--HANG)"), id="head", markerWidth=7, markerHeight=7, refX=6,
        refY=3.5, orient="auto",
    ),
)  # fmt: skip


def _lane(
    rank: RankEvidence, evidence: Evidence, axis: Axis, y: float, height: float, *, is_culprit: bool
) -> Iterator[Markup]:
    most = SPANS if evidence.stop or not rank.passed else FEW_SPANS
    for start, stop, phase, step in _spans(rank, evidence, axis.end)[-most:]:
        x = axis.x(start)
        title = f"rank {rank.rank}: {phase}, step {step}, {stop - start:.3f} s"
        yield tag(
            "rect",
            tag("title", title),
            x=x,
            y=y,
            width=max(1.0, axis.x(stop) - x),
            height=height,
            fill=f"var(--{phase})",
        )
    for at, step in _steps(rank) if height > 20 else ():
        x = axis.x(at)
        yield tag("line", x1=x, x2=x, y1=y - 2, y2=y + height + 2, stroke="var(--ink)")
        yield tag("text", step, x=x + 3, y=y + 17)
    moved = last_moved(rank)
    if evidence.stop and rank.by_us and moved:
        x, width = axis.x(moved), max(0.0, axis.x(rank.exit_time or axis.end) - axis.x(moved))
        place = short_place(find_place(rank))
        title = f"rank {rank.rank} stalled for {max(0.0, evidence.stop_time - moved):.1f} s at {place}"
        yield tag("rect", tag("title", title), x=x, y=y, width=width, height=height, fill="url(#still)")
        if width > 300 and height > 20:
            yield tag("text", place[:110], x=x + 24, y=y + 17, class_="place")
    if is_culprit:
        x = axis.x(rank.exit_time if rank.fatal_signal else moved or axis.end)
        yield tag("path", d=f"M{x:.1f} {y - 3:.1f} v{height + 6:.1f}", stroke="var(--FAIL)", stroke_width=3)


def _spans(rank: RankEvidence, evidence: Evidence, end: float) -> list[tuple[float, float, str, int]]:
    last = max((b["time"] for b in rank.heartbeats), default=0.0)
    spans = phase_spans(rank, min(end, rank.exit_time or evidence.stop_time or last))
    return [(start, stop, phase if phase in PHASES else "body", step) for start, stop, phase, step in spans]


def _ticks(evidence: Evidence, axis: Axis, height: float, gap: float) -> Iterator[Markup]:
    """Yield the last collectives: a tick where a rank entered one, joined to the next rank's; red where they differ."""
    index_of = {rank.rank: index for index, rank in enumerate(evidence.ranks)}
    columns = [c for group in make_columns(evidence).values() for c in group.values()]
    columns = [c for c in columns if all(axis.begin <= call.entered <= axis.end for call in c.values())]
    for column in sorted(columns, key=_latest)[-TICKS:]:
        whole = is_whole(column)
        colour = "var(--tick)" if whole else "var(--FAIL)"
        before: tuple[float, float] | None = None
        for rank, c in sorted(column.items()):
            x, y = axis.x(c.entered), index_of[rank] * (height + gap) + 4
            missing = "" if len(column) >= c.size else ", not entered by every rank"
            title = tag("title", f"rank {rank}: {c.describe()}{missing}")
            yield tag("path", title, d=f"M{x:.1f} {y + height - 7:.1f} v7", stroke=colour, stroke_width=2)
            if before is not None:
                yield tag(
                    "path", d=f"M{before[0]:.1f} {before[1]:.1f} L{x:.1f} {y:.1f}", stroke=colour, stroke_width=0.7
                )
            before = (x, y + height)


def _latest(column: Column) -> float:
    return max(c.entered for c in column.values())


def _arrows(evidence: Evidence, waits: Mapping[int, set[int]], height: float, gap: float) -> Iterator[Markup]:
    """Yield an arrow from each lane that waits to the one that it waits for; a cycle is seen as one."""
    index_of = {rank.rank: index for index, rank in enumerate(evidence.ranks)}
    pairs = [(a, b) for a, waited in sorted(waits.items()) for b in sorted(waited) if b in index_of]
    for number, (a, b) in enumerate(pairs[:ARROWS]):
        y1, y2 = (index_of[r] * (height + gap) + 4 + height / 2 for r in (a, b))
        x = LEFT + WIDTH + 4
        bow = x + 14 + 22 * (number % 3) / 2
        title = tag("title", f"rank {a} waits for rank {b}")
        yield tag(
            "path", title, d=f"M{x} {y1:.1f} C{bow:.1f} {y1:.1f} {bow:.1f} {y2:.1f} {x} {y2:.1f}", fill="none",
            stroke="var(--HANG)", stroke_width=1.5, marker_end="url(#head)", class_="arrow",
        )  # fmt: skip


def _in_words(waits: Mapping[int, set[int]]) -> Iterator[Markup]:
    """Yield who waits for whom as text, equal ones together: for readers who cannot see the arrows, and for many ranks."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, waited in waits.items():
        found.setdefault(tuple(sorted(waited)), []).append(rank)
    for others, ranks in found.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        yield tag("p", f"{number_ranks(ranks).capitalize()} {verb} for {number_ranks(list(others))}.", class_="quiet")


def _scale(axis: Axis, y: float) -> Iterator[Markup]:
    if axis.fold > axis.begin:
        x = axis.x(axis.fold)
        yield tag("text", f"start {axis.fold - axis.begin:.1f} s", x=LEFT, y=y, class_="axis small")
        yield tag("path", d=f"M{x:.1f} 0 V{y - 12:.1f}", stroke="var(--line)", stroke_dasharray="3 3")
    else:
        yield tag("text", "0 s", x=LEFT, y=y, class_="axis")
    yield tag("text", f"{axis.end - axis.begin:.2f} s", x=LEFT + WIDTH, y=y, text_anchor="end", class_="axis")


def _steps(rank: RankEvidence) -> list[tuple[float, int]]:
    """Return when each step began; about twenty steps, evenly spaced, and the first."""
    starts: dict[int, float] = {}
    for beat in rank.heartbeats:
        if beat["step"]:
            starts.setdefault(beat["step"], beat["time"])
    every = max(1, len(starts) // 20)
    return [(at, step) for step, at in starts.items() if step % every == 0 or step == 1]


def last_moved(rank: RankEvidence) -> float:
    """Return when the rank last entered a phase or a collective; 0 without a board."""
    if rank.board is None:
        return 0.0
    return max(rank.board.numbers["phase_time"], *(c.entered for c in rank.board.collectives), 0.0)


def find_place(rank: RankEvidence) -> str:
    """Return the rank's location by its stack, else by its board; '' without both."""
    frame = rank.stack.user_frame if rank.stack is not None else None
    return frame.describe() if frame is not None else rank.board.line if rank.board is not None else ""
