"""report.html: one self-contained file: the sentence, the table, and for each scenario one lane per rank over time."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from pytest_nsa.diagnosis.decision import Decision
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.load import load
from pytest_nsa.evidence.values import Evidence, RankEvidence
from pytest_nsa.report.curves import curves
from pytest_nsa.report.perfetto import NAME as TRACE
from pytest_nsa.report.perfetto import phase_spans, write_trace
from pytest_nsa.report.plain import escape
from pytest_nsa.report.summary import Entry
from pytest_nsa.report.terminal import frame_lines, number_ranks, short_place

PHASES = ("start", "body", "data", "forward", "backward", "optimizer", "done")
LANE_WIDTH, LANE_HEIGHT, LEFT = 860, 26, 64
TICKS = 60  # collectives that are drawn

_STYLE = resources.files("pytest_nsa.report").joinpath("report.css")
# Over a phase that stopped moving: the colour stays, the stripes show that nothing happened.
_HATCH = (
    '<defs><pattern id="still" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="4" height="8" fill="var(--paper)" fill-opacity="0.55"/></pattern></defs>'
)


def render(run: Path, entries: list[Entry], decision: Decision, *, interrupted: bool) -> str:
    """Return the whole page. Reads the folders of ``entries`` under ``run``."""
    key = "".join(f'<span><i style="background:var(--{p})"></i>{p}</span>' for p in PHASES[:-1])
    key += "<span>ticks: collectives, joined between ranks, red where ranks disagree</span>"
    key += "<span>striped: stalled</span><span>◀ and red line: the culprit, when it last moved</span>"
    body = "".join(_scenario(run, entry) for entry in entries)
    path = "".join(f"<li>{escape(step)}</li>" for step in decision.path)
    state = "<p><strong>INTERRUPTED</strong>: what follows is what had run until then.</p>" if interrupted else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head><body>\n"
        f"{state}<h1>{escape(short_place(decision.sentence))}</h1>\n<p>{escape(decision.action)}</p>\n"
        f"{_table(entries)}\n<h2>Path through the plan's tree</h2><ol>{path}</ol>\n"
        f'<h2>Ranks over time</h2><p class="key quiet">{key}</p>\n{body}</body></html>\n'
    )


def _table(entries: list[Entry]) -> str:
    rows = []
    for entry in entries:
        v = entry.verdict
        ranks = ", ".join(map(str, v.ranks)) if v.failed else ""
        where = f"<code>{escape(short_place(v.where))}</code>" if v.where else ""
        name = f'<a href="#{escape(entry.folder)}">{escape(entry.name)}</a>' if entry.folder else escape(entry.name)
        result = _tag(v.outcome) + (" (expected)" if v.expected else "")
        rows.append(
            f"<tr><td>{name}</td><td>{result}</td><td>{escape(v.cause)}</td><td>{ranks}</td>"
            f"<td>{where}</td><td>{v.duration_s:.1f} s</td></tr>"
        )
    head = "<tr><th>scenario</th><th>result</th><th>cause</th><th>rank</th><th>where</th><th>time</th></tr>"
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _tag(outcome: str) -> str:
    return f'<span class="tag" style="color:var(--{outcome})">{outcome}</span>'


def _scenario(run: Path, entry: Entry) -> str:
    if not entry.folder:
        return ""
    v = entry.verdict
    try:
        evidence = load(run / entry.folder)
    except (OSError, ValueError):
        return f'<h3 id="{escape(entry.folder)}">{escape(entry.name)} {_tag(v.outcome)}</h3><p>Its evidence cannot be read.</p>'
    who = v.reason if v.failed else ""
    meaning = f'<p class="quiet">The plan reads it as: {escape(v.reads_as)}</p>' if v.failed and v.reads_as else ""
    stacks = "".join(_stacks(evidence, v.ranks))
    write_trace(run / entry.folder, evidence)
    trace = f'<p class="quiet"><a href="{quote(entry.folder)}/{TRACE}">{TRACE}</a> opens in ui.perfetto.dev</p>'
    return (
        f'<h3 id="{escape(entry.folder)}">{escape(entry.name)} {_tag(v.outcome)} '
        f'<span class="quiet">{v.duration_s:.1f} s</span></h3>'
        f"<p>{escape(short_place(who))}</p>{meaning}"
        f'<div class="scroll">{_lanes(evidence, v.ranks if v.failed else ())}</div>{stacks}{curves(run / entry.folder)}{trace}'
    )


def _lanes(evidence: Evidence, culprits: tuple[int, ...]) -> str:
    """One lane per rank: phases as bars, steps as ticks, a mark at its location when it was stopped."""
    beats = [b["time"] for r in evidence.ranks for b in r.heartbeats]
    ends = [*beats, evidence.stop_time, *(r.exit_time for r in evidence.ranks)]
    begin = min(beats, default=evidence.started)
    end = max(max(ends, default=begin), begin + 1e-3)
    scale = LANE_WIDTH / (end - begin)
    height = len(evidence.ranks) * (LANE_HEIGHT + 8) + 22
    parts = []
    for index, rank in enumerate(evidence.ranks):
        y = index * (LANE_HEIGHT + 8) + 4
        mark = " ◀" if rank.rank in culprits else ""
        parts.append(f'<text x="0" y="{y + 17}">rank {rank.rank}{mark}</text>')
        for start, stop, phase, step in _spans(rank, evidence, end):
            x, width = LEFT + (start - begin) * scale, max(1.0, (stop - start) * scale)
            title = f"rank {rank.rank}: {phase}, step {step}, {stop - start:.3f} s"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE_HEIGHT}" fill="var(--{phase})">'
                f"<title>{escape(title)}</title></rect>"
            )
        for at, step in _steps(rank):
            x = LEFT + (at - begin) * scale
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 2}" y2="{y + LANE_HEIGHT + 2}" stroke="var(--ink)"/>'
            )
            parts.append(f'<text x="{x + 3:.1f}" y="{y + 17}">{step}</text>')
        last_moved = _last_moved(rank)
        if evidence.stop and rank.by_us and last_moved:
            x, width = LEFT + (last_moved - begin) * scale, max(0.0, ((rank.exit_time or end) - last_moved) * scale)
            place = short_place(_place(rank))
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE_HEIGHT}" fill="url(#still)">'
                f"<title>{escape(f'stalled for {evidence.stop_time - last_moved:.1f} s at {place}')}</title></rect>"
            )
            if width > 300:
                parts.append(f'<text x="{x + 24:.1f}" y="{y + 17}" class="place">{escape(place[:110])}</text>')
        if rank.rank in culprits:
            at = rank.exit_time if rank.signal and not rank.by_us else last_moved or end
            x = LEFT + (at - begin) * scale
            parts.append(f'<path d="M{x:.1f} {y - 3} v{LANE_HEIGHT + 6}" stroke="var(--FAIL)" stroke-width="3"/>')
    parts += _ticks(evidence, begin, end, scale)
    axis = height - 6
    parts.append(f'<text x="{LEFT}" y="{axis}">0 s</text>')
    parts.append(f'<text x="{LEFT + LANE_WIDTH}" y="{axis}" text-anchor="end">{end - begin:.2f} s</text>')
    label = f"{len(evidence.ranks)} ranks over {end - begin:.1f} seconds"
    return f'<svg viewBox="0 0 {LEFT + LANE_WIDTH + 8} {height}" role="img" aria-label="{label}">{_HATCH}{"".join(parts)}</svg>'


def _spans(rank: RankEvidence, evidence: Evidence, end: float) -> Iterator[tuple[float, float, str, int]]:
    last = max((b["time"] for b in rank.heartbeats), default=0.0)
    for start, stop, phase, step in phase_spans(rank, min(end, rank.exit_time or evidence.stop_time or last)):
        yield start, stop, phase if phase in PHASES else "body", step


def _ticks(evidence: Evidence, begin: float, end: float, scale: float) -> Iterator[str]:
    """Yield the last collectives: a tick where a rank entered one, joined to the same one of the next rank; red where one is
    missing.
    """
    by_place: dict[tuple[str, int], dict[int, Collective]] = {}
    for index, rank in enumerate(evidence.ranks):
        for c in rank.board.collectives if rank.board is not None else ():
            if c.peer == -1 and begin <= c.entered <= end:
                by_place.setdefault(c.place, {})[index] = c
    latest = sorted(by_place.values(), key=lambda found: max(c.entered for c in found.values()))[-TICKS:]
    for found in latest:
        whole = len(found) >= next(iter(found.values())).size
        odd = len({c.shape for c in found.values()}) > 1 or not whole
        colour = "var(--FAIL)" if odd else "var(--tick)"
        before: tuple[float, float] | None = None
        for index, c in sorted(found.items()):
            x, y = LEFT + (c.entered - begin) * scale, index * (LANE_HEIGHT + 8) + 4
            missing = "" if whole else ", not entered by every rank"
            title = escape(f"rank {evidence.ranks[index].rank}: {c.describe()}{missing}")
            yield (
                f'<path d="M{x:.1f} {y + LANE_HEIGHT - 7} v7" stroke="{colour}" stroke-width="2"><title>{title}</title></path>'
            )
            if before is not None:
                yield f'<path d="M{before[0]:.1f} {before[1]:.1f} L{x:.1f} {y:.1f}" stroke="{colour}" stroke-width="0.7"/>'
            before = (x, y + LANE_HEIGHT)


def _steps(rank: RankEvidence) -> list[tuple[float, int]]:
    """When each step began; at most twenty are drawn."""
    starts: dict[int, float] = {}
    for beat in rank.heartbeats:
        if beat["step"]:
            starts.setdefault(beat["step"], beat["time"])
    every = max(1, len(starts) // 20)
    return [(at, step) for step, at in starts.items() if step % every == 0 or step == 1]


def _last_moved(rank: RankEvidence) -> float:
    """When the rank last entered a phase or a collective."""
    if rank.board is None:
        return 0.0
    return max(rank.board.numbers["phase_time"], *(c.entered for c in rank.board.collectives), 0.0)


def _place(rank: RankEvidence) -> str:
    """Return the rank's location, as well as it is known."""
    frame = rank.stack.user_frame if rank.stack is not None else None
    return frame.describe() if frame is not None else rank.board.line if rank.board is not None else ""


def _stacks(evidence: Evidence, culprits: tuple[int, ...]) -> Iterator[str]:
    """Yield the last stacks, equal ones once, the culprits' first and unfolded."""
    merged: dict[str, list[int]] = {}
    for rank in sorted(evidence.ranks, key=lambda r: (r.rank not in culprits, r.rank)):
        if rank.stack is not None:
            merged.setdefault("\n".join(frame_lines(rank.stack)), []).append(rank.rank)
        elif rank.board is not None and rank.board.line and rank.rank in culprits and not rank.exceptions:
            yield f"<p>rank {rank.rank} was last seen at <code>{escape(short_place(rank.board.line))}</code></p>"
    for frames, ranks in merged.items():
        state = " open" if set(ranks) & set(culprits) else ""
        yield f"<details{state}><summary>last stack of {number_ranks(ranks)}</summary><pre>{escape(frames)}</pre></details>"
