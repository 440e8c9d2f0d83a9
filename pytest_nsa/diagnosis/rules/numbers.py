"""Wrong numbers: a loss that is not finite, gradients and parameters that differ between ranks, snapshots with several
values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_nsa.diagnosis.explain.source import loss_location
from pytest_nsa.diagnosis.facts import exception_fact
from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.rules.training_states import are_equal, grouped, with_origin
from pytest_nsa.diagnosis.rules.unreduced import find_unreduced
from pytest_nsa.diagnosis.verdict import Fact, Finding, describe_ranks
from pytest_nsa.evidence.values import Evidence, RankEvidence
from pytest_nsa.wire.files import read_lines, with_numbers

TOLERANCE = 1e-6  # relative, of a tensor's norm
Model = tuple[tuple[int, ...], int, int]  # its ranks, the joins before, its index among their models
_WHAT = {
    "unwrapped": "the model was called past its DDP wrapper, so nothing was reduced",
    "unreduced": "DDP has reduced nothing (no_sync)",
    "by_hand": "the program reduces the gradients by itself; they differ after its update",
    "gradient": "its gradients differ after their reduction",
    "parameter": "its values differ after the optimizer's step",
}


def nan_loss(evidence: Evidence) -> Finding | None:
    """Find that a test failed by an assertion or an exception after a loss that is not finite."""
    errors = [(r, e) for r in evidence.ranks for e in r.exceptions if not is_victim(e)]
    odd = [(r, e) for r in evidence.ranks for e in r.anomalies if _is_not_finite(e, r)]
    if not errors or not odd:
        return None
    step = min(e["step"] for _, e in odd)
    ranks = tuple(sorted({r.rank for r, e in odd if e["step"] == step}))
    if any(evidence.ranks[r].passed for r in ranks):
        return None  # a rank passes with such a loss: the test expects it
    value = next(e.get("value", "not finite") for _, e in odd if e["step"] == step)
    site = next((e["site"] for _, e in odd if e["step"] == step and e.get("site")), "")
    rank, error = next(((r, e) for r, e in errors if r.rank in ranks), errors[0])
    # A step without backward is recorded at its end: an exception of the test comes before.
    first = min((e["time"] for _, e in odd if e["kind"] == "not_finite"), default=0.0)
    if error.time < first:
        return None  # an earlier failure has another cause
    text = error.headline[:120] or error.type
    return Finding(
        cause="nan_loss", ranks=ranks, where=loss_location(evidence.sources, site) or site or error.where,
        reason=f"the loss of step {step} is {value} on {describe_ranks(ranks, evidence.job.world_size)}; then {error.type}: {text}",
        certain=True, confidence=0.9, facts=(exception_fact(rank, error),),
    )  # fmt: skip


def _is_not_finite(event: dict[str, Any], rank: RankEvidence) -> bool:
    """Return whether a loss is not finite; or an output, in the step in which the test ended without a backward."""
    ended_there = rank.board is not None and rank.board.numbers["step"] == event["step"]
    return event["kind"] == "not_finite" or (event["kind"] == "no_backward" and not event["finite"] and ended_there)


def trained_away(evidence: Evidence) -> Finding | None:
    """Find a model that ends with non-finite parameters in a test that passed. Reads the ranks' checksums.

    Equality does not find these: NaN is not equal to NaN. A loss that is not finite proves nothing by itself: mixed
    precision skips such steps, and the parameters stay finite.
    """
    for by_rank in _streams(evidence).values():
        for rank, records in by_rank.items():
            last = next((r for r in reversed(records) if r["kind"] not in ("gradient", "alone")), None)
            if last is not None and any(_is_lost(v) for v in last["norms"]):
                return _lost(evidence, rank, records)
    return None


def _is_lost(norm: float | None) -> bool:
    return norm is not None and not math.isfinite(norm)


def _lost(evidence: Evidence, seen_by: int, records: list[dict[str, Any]]) -> Finding:
    """Return the finding for a model's records, the last of which has a non-finite norm."""
    first = next(r for r in records if any(_is_lost(v) for v in r["norms"]))
    names: list[str] = next((r["names"] for r in records if "names" in r), [])
    lost = [name for name, v in zip(names, records[-1]["norms"], strict=False) if _is_lost(v)]
    odd = [(r.rank, e) for r in evidence.ranks for e in r.anomalies if e["kind"] == "not_finite"]
    step = min((e["step"] for _, e in odd), default=0)
    ranks = tuple(sorted({rank for rank, e in odd if e["step"] == step}))
    before = ""
    if odd and step <= first["step"]:
        value = next(e.get("value", "not finite") for _, e in odd if e["step"] == step)
        before = f"the loss of step {step} is {value} on {describe_ranks(ranks, evidence.job.world_size)}; "
    else:
        ranks = tuple(first["ranks"])
    what = (
        f"parameter {lost[0]} is"
        if len(lost) == 1
        else f"{len(lost)} parameters ({lost[0]}, ...) are"
        if lost
        else "parameters are"
    )
    return Finding(
        cause="nan_loss",
        ranks=ranks,
        where=first.get("site", ""),
        reason=f"{before}from step {first['step']} on {what} not finite, though the test passed",
        certain=True,
        confidence=0.9,
        facts=(
            Fact(
                rank=seen_by, kind="checksum", file=f"rank{seen_by}/checksums.jsonl",
                text=f"the first {first['kind']} that is not finite is of step {first['step']}",
            ),
        ),
    )  # fmt: skip


def silent_divergence(evidence: Evidence) -> Finding | None:
    """Find the first gradient or parameter that differs between ranks though DDP keeps it equal. Reads the ranks'
    checksums.
    """
    found = (
        _diverging(evidence, by_rank)
        for (members, *_), by_rank in _streams(evidence).items()
        if len(by_rank) == len(members) > 1
    )
    return next((finding for finding in found if finding is not None), None)


def differed_earlier(evidence: Evidence) -> Finding | None:
    """Find that ranks diverged before the test's own assertions failed, where nothing else failed: a possible cause of
    the failure.
    """
    errors = [e for r in evidence.ranks for e in r.exceptions if not is_victim(e)]
    if not errors or any(e.type != "AssertionError" for e in errors) or any(r.fatal_signal for r in evidence.ranks):
        return None
    found = silent_divergence(evidence) or find_unreduced(evidence, of_a_failure=True)
    if found is None:
        return None
    first = min(errors, key=lambda e: e.time)
    return replace(found, reason=f"{found.reason}; then {first.type}: {first.headline[:120]} at {first.where}")


def _streams(evidence: Evidence) -> dict[Model, dict[int, list[dict[str, Any]]]]:
    """Return the checksums of each model, by rank; none where the test does not request them."""
    streams: dict[Model, dict[int, list[dict[str, Any]]]] = {}
    for rank in evidence.ranks if evidence.job.check_divergence else ():
        for key, records in _by_model(rank, evidence.job.world_size).items():
            streams.setdefault(key, {})[rank.rank] = records
    return streams


def _by_model(rank: RankEvidence, world_size: int) -> dict[Model, list[dict[str, Any]]]:
    """Return a rank's checksums by model: the ranks that DDP keeps equal, the number of joins before, and the model's
    index among them.
    """
    found: dict[Model, list[dict[str, Any]]] = {}
    numbers: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for record in map(with_numbers, read_lines(rank.checksums) if rank.checksums.is_file() else ()):
        key = tuple(record.get("ranks", range(world_size))), record.get("joins", 0)
        models = numbers.setdefault(key, [])
        if record.get("model", 0) not in models:
            models.append(record.get("model", 0))
        found.setdefault((*key, models.index(record.get("model", 0))), []).append(record)
    return found


def _diverging(evidence: Evidence, streams: dict[int, list[dict[str, Any]]]) -> Finding | None:
    """Find the first tensor of a model that differs between its ranks."""
    names: list[str] = next((r["names"] for r in next(iter(streams.values()), []) if "names" in r), [])
    past = {rank: [r for r in records if r["kind"] == "unwrapped"] for rank, records in streams.items()}
    alone = [rank for rank, records in past.items() if records]
    if len(alone) < len(streams):  # the other ranks have no such updates
        streams = {rank: [r for r in records if r["kind"] != "unwrapped"] for rank, records in streams.items()}
    # Ranks reduce gradients together. Between two reductions each may have updated its parameters or not.
    parts = {rank: _between_reductions(records) for rank, records in streams.items()}
    equal: Mapping[int, dict[str, Any]] = {}
    for part in zip(*parts.values(), strict=False):
        if not _are_alike(part):
            part = tuple(records[:1] for records in part)  # a step that some ranks skipped shows in the next one
            if not _are_alike(part):
                return None  # different models on different ranks cannot be compared
        for records in zip(*part, strict=False):
            by_rank = dict(zip(streams, records, strict=True))
            index = _first_difference(by_rank)
            if index is not None:
                found = _diverged(by_rank, index, names)
                if 0 < len(alone) < len(streams):
                    who, site = describe_ranks(tuple(alone), evidence.job.world_size), past[alone[0]][0]["site"]
                    bypass = f"{who} alone updated the model past its DDP wrapper, at {site}"
                    ranks = tuple(alone) if len(found.ranks) == len(streams) else found.ranks
                    return replace(found, ranks=ranks, where=site, reason=f"{found.reason}; {bypass}")
                return with_origin(found, evidence.job.world_size, streams, by_rank, equal)
            if records[0]["kind"] != "gradient":
                equal = by_rank
    return None


def _are_alike(part: Sequence[list[dict[str, Any]]]) -> bool:
    """Return whether the ranks have records of the same kinds with the same number of tensors."""
    return len({tuple((r["kind"], len(r["norms"])) for r in records) for records in part}) == 1


def _between_reductions(records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the records in parts that each begin with reduced gradients, except possibly the first."""
    parts: list[list[dict[str, Any]]] = []
    for record in records:
        if record["kind"] in ("gradient", "by_hand") or not parts:
            parts.append([])
        parts[-1].append(record)
    return parts


def _first_difference(records: Mapping[int, dict[str, Any]]) -> int | None:
    for index, values in enumerate(zip(*(r["norms"] for r in records.values()), strict=True)):
        if not are_equal(values, TOLERANCE):
            return index
    return None


def _diverged(records: Mapping[int, dict[str, Any]], index: int, names: list[str]) -> Finding:
    values = {rank: r["norms"][index] for rank, r in records.items()}
    largest = max(grouped(values, TOLERANCE), key=len)
    minority = tuple(r for r in values if r not in largest)
    ranks = minority if len(largest) > len(values) / 2 else tuple(values)
    first = next(iter(records.values()))
    name = names[index] if index < len(names) else f"parameter {index}"
    shown = ", ".join(f"rank {r}: {v:.6g}" if v is not None else f"rank {r}: none" for r, v in values.items())
    return Finding(
        cause="silent_divergence",
        ranks=ranks,
        where=records[ranks[0]].get("site", ""),  # where the difference was observed
        module=name.rpartition(".")[0],
        reason=f"{name} differs between ranks from step {first['step']} on; {_WHAT[first['kind']]}; L2 norms: {shown}",
        certain=True,
        confidence=0.95,
        facts=tuple(
            Fact(rank=r, kind="checksum", file=f"rank{r}/checksums.jsonl", text=f"{name}: {v}")
            for r, v in values.items()
        ),
    )
