"""A test's figures, by which runs are compared: time per step, memory, loss. They are kept with its verdict."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from pytest_nsa.evidence.shapes import is_number
from pytest_nsa.evidence.values import Evidence, RankEvidence
from pytest_nsa.wire.files import read_lines

METRICS = "metrics.jsonl"  # of a training in the test's folder
MOST = 40  # figures of a test


def read_figures(evidence: Evidence) -> dict[str, float]:
    """Return those of these figures that are known:

    - ``steps``, ``step_ms`` (the median over the steps, of the slowest rank), its quartiles ``step_ms_low`` and ``step_ms_high``;
    - ``peak_mib``, ``added_mib`` (beyond what a rank had at its start), ``peak_gpu_mib``: the largest of any rank;
    - ``loss`` (the last), ``tokens_per_s`` (the median);
    - ``ready_orders``: in how many orders the gradients of a step became ready on the ranks, if that trace was requested;
    - ``property.NAME``: numbers that the test recorded with `record_property`.
    """
    found: dict[str, float] = {}
    steps = step_times(evidence)
    if len(steps) > 1:
        low, middle, high = (
            statistics.quantiles(steps, n=4) if len(steps) > 2 else (min(steps), sum(steps) / 2, max(steps))
        )
        found |= {"steps": len(steps), "step_ms": 1e3 * middle, "step_ms_low": 1e3 * low, "step_ms_high": 1e3 * high}
    for name in ("peak_mib", "added_mib", "peak_gpu_mib"):
        peaks = [rank.peaks[name] for rank in evidence.ranks if rank.peaks.get(name)]
        if peaks:
            found[name] = max(peaks)
    metrics = list(read_lines(evidence.folder / METRICS))
    losses, rates = ([line[name] for line in metrics if is_number(line.get(name))] for name in ("loss", "tokens_per_s"))
    if losses:
        found["loss"] = losses[-1]
    if len(rates) > 1:
        found["tokens_per_s"] = statistics.median(rates[1:])  # the first step builds and compiles
    orders = ready_orders(evidence)
    if orders:
        found["ready_orders"] = orders
    for name, value in _properties(evidence.ranks[0]) if evidence.ranks else ():
        found[f"property.{name}"] = value
    return {name: round(float(value), 6) for name, value in itertools.islice(found.items(), MOST)}


def ready_orders(evidence: Evidence) -> int:
    """Return in how many orders gradients became ready on the ranks, in the step with the most orders; 0 if unknown."""
    orders = [rank.ready_orders for rank in evidence.ranks]
    steps = set.intersection(*map(set, orders)) if len(orders) > 1 else set()
    return max((len({order[step] for order in orders}) for step in steps), default=0)


def step_times(evidence: Evidence) -> list[float]:
    """Return the seconds of each step that all ranks finished, on its slowest rank; not of the first, which builds and compiles."""
    by_step: dict[int, list[float]] = {}
    for rank in evidence.ranks:
        starts: dict[int, float] = {}
        for beat in rank.heartbeats:
            starts.setdefault(beat["step"], beat["time"])
        for (step, begin), (following, end) in itertools.pairwise(sorted(starts.items())):
            if step > 1 and following == step + 1:
                by_step.setdefault(step, []).append(end - begin)
    return [max(times) for times in by_step.values() if len(times) == len(evidence.ranks)]


def _properties(rank: RankEvidence) -> list[tuple[str, float]]:
    pairs: list[Any] = [pair for entry in rank.reports for pair in entry["report"].get("user_properties") or ()]
    pairs = [pair for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2 and is_number(pair[1])]
    return [(str(name)[:80], float(value)) for name, value in pairs]
