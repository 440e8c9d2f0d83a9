"""A training's figures as small pictures: loss, gates, selection, memory; read from the files in a folder."""

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pytest_nsa.report.markup import Markup
from pytest_nsa.report.plain import escape
from pytest_nsa.wire.files import read_bytes, read_lines, read_text

Series = dict[str, list[tuple[float, float]]]
WIDTH, HEIGHT, MARGIN = 420, 170, 44
COLOURS = ("--forward", "--backward", "--optimizer", "--data")
DUMP = 4 << 20  # bytes of a dump of memory
FEWEST = 10  # steps of a curve: fewer suggest a trend that is none
POINTS = 400  # drawn per curve, at most


def curves(folder: Path) -> Markup:
    """Return a row of SVG pictures of the figures that ``folder`` has; '' without any."""
    pictures = [_picture(title, unit, series) for title, unit, read in _FIGURES if (series := _read(read, folder))]
    return Markup(f'<div class="curves">{"".join(pictures)}</div>' if pictures else "")


def _read(read: Callable[[Path], Series], folder: Path) -> Series:
    """Return the curves that have numbers over at least `FEWEST` steps; {} if a file cannot be read."""
    try:
        found = read(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error):
        return {}
    whole = {name: [point for point in points if all(map(_is_number, point))] for name, points in found.items()}
    return {
        name: points for name, points in whole.items() if len(points) > 1 and points[-1][0] - points[0][0] >= FEWEST - 1
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _loss(folder: Path) -> Series:
    return {"loss": [(line["step"], line["loss"]) for line in _of_steps(folder / "metrics.jsonl")]}


def _gates(folder: Path) -> Series:
    found: Series = defaultdict(list)
    for line in _of_steps(folder / "gate_health.jsonl"):
        for branch, mean in line["means"].items():
            found[branch].append((line["step"], mean))
    return found


def _selection(folder: Path) -> Series:
    """Return the distance of the selected blocks, and its entropy, each as the mean over the layers."""
    found: dict[str, dict[float, list[float]]] = {"distance": defaultdict(list), "entropy": defaultdict(list)}
    for path in sorted(folder.glob("k_stats*.csv")):
        for row in csv.DictReader(read_text(path).splitlines()):
            for name, column in (("distance", "distance_mean"), ("entropy", "entropy")):
                if row.get(column):
                    found[name][float(row["step"])].append(float(row[column]))
    return {name: [(step, sum(v) / len(v)) for step, v in sorted(steps.items())] for name, steps in found.items()}


def _memory(folder: Path) -> Series:
    found: Series = defaultdict(list)
    for path in folder.glob("mem*_step*_rank*.json"):
        dump = json.loads(read_bytes(path, DUMP))
        found[f"rank {dump['rank']}"].append((dump["step"], dump.get("cuda_allocated_mib", dump["rss_mib"])))
    if not found:
        found["peak"] = [(line["step"], line["peak_mib"]) for line in _of_steps(folder / "metrics.jsonl")]
    return {name: sorted(points) for name, points in sorted(found.items())}


_FIGURES: tuple[tuple[str, str, Callable[[Path], Series]], ...] = (
    ("loss", "nats a token", _loss), ("mean gate", "", _gates), ("selected blocks", "blocks back; nats", _selection),
    ("memory", "MiB", _memory),
)  # fmt: skip


def _of_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; if a step occurs twice, the later line."""
    if path.is_file():
        yield from {line["step"]: line for line in read_lines(path)}.values()


def _picture(title: str, unit: str, series: Series) -> str:
    steps = [x for points in series.values() for x, _ in points]
    values = [y for points in series.values() for _, y in points]
    low_x, high_x, low, high = min(steps), max(steps), min(values), max(values)
    span_x, span = (high_x - low_x) or 1.0, (high - low) or 1.0

    def at(x: float, y: float) -> str:
        return (
            f"{MARGIN + (x - low_x) / span_x * (WIDTH - MARGIN - 8):.1f},"
            f"{HEIGHT - 24 - (y - low) / span * (HEIGHT - 56):.1f}"
        )

    lines, key = [], []
    for (name, points), colour in zip(series.items(), COLOURS, strict=False):
        drawn = points[:: max(1, len(points) // POINTS)]
        path = " ".join(at(x, y) for x, y in drawn)
        lines.append(f'<polyline points="{path}" fill="none" stroke="var({colour})" stroke-width="1.5"/>')
        key.append(f'<tspan fill="var({colour})">{escape(name)}</tspan>')
    name = f"{title}{f', {unit}' if unit else ''}"
    text = f"{name}, steps {low_x:.0f} to {high_x:.0f}: from {low:.4g} to {high:.4g}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(text)}">'
        f'<text x="{MARGIN}" y="14">{escape(name)} {" ".join(key) if len(series) > 1 else ""}</text>'
        f'<text x="{MARGIN - 4}" y="36" text-anchor="end">{high:.3g}</text>'
        f'<text x="{MARGIN - 4}" y="{HEIGHT - 22}" text-anchor="end">{low:.3g}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 6}">step {low_x:.0f}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">{high_x:.0f}</text>'
        f"{''.join(lines)}</svg>"
    )
