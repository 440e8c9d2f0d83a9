"""Numbers that are wrong: a loss that is none, gradients and parameters that ought to be equal on all ranks and are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pytest_nsa.artifacts import read_lines
from pytest_nsa.diagnosis.facts import exception_fact
from pytest_nsa.diagnosis.verdict import Fact, Finding, describe_ranks
from pytest_nsa.evidence import Evidence

TOLERANCE = 1e-6  # relative, of a tensor's norm
_WHAT = {
    "gradient": "after their reduction, the gradients of",
    "parameter": "after the optimizer's step, the values of",
}


def nan_loss(evidence: Evidence) -> Finding | None:
    """A test that failed by an assertion or an exception, after a loss that is no finite number."""
    odd = [(r, e) for r in evidence.ranks for e in r.oddities if e["kind"] == "not_finite"]
    errors = [(r, e) for r in evidence.ranks for e in r.exceptions]
    if not odd or not errors:
        return None
    step = min(e["step"] for _, e in odd)
    ranks = tuple(sorted({r.rank for r, e in odd if e["step"] == step}))
    value = next(e["value"] for _, e in odd if e["step"] == step)
    rank, error = next(((r, e) for r, e in errors if r.rank in ranks), errors[0])
    if error.time < min(e["time"] for _, e in odd):
        return None  # what failed before has other reasons
    text = error.message.strip().splitlines()[0][:120] if error.message.strip() else error.type
    return Finding(
        cause="nan_loss",
        ranks=ranks,
        where=error.where,
        reason=f"the loss of step {step} is {value} on {describe_ranks(ranks, evidence.job.world_size)}; then {error.type}: {text}",
        certain=True,
        confidence=0.9,
        facts=(exception_fact(rank, error),),
    )


def silent_divergence(evidence: Evidence) -> Finding | None:
    """The first gradient or parameter that differs between ranks though DDP keeps it equal. Reads the ranks' checksums."""
    if not evidence.job.check_divergence:
        return None
    streams = {r.rank: read_lines(r.checksums) for r in evidence.ranks if r.checksums.is_file()}
    if len(streams) < max(2, len(evidence.ranks)):
        return None
    names: list[str] = []
    for records in zip(*_of_all(streams), strict=False):
        by_rank = dict(zip(streams, records, strict=True))
        first = records[0]
        names = first.get("names", names)
        if any(
            (r["kind"], r["step"], len(r["norms"])) != (first["kind"], first["step"], len(first["norms"]))
            for r in records
        ):
            return None  # other models or other steps on other ranks: nothing can be compared
        index = _first_difference(by_rank)
        if index is not None:
            return _diverged(evidence, by_rank, index, names)
    return None


def _of_all(streams: Mapping[int, Iterator[dict[str, Any]]]) -> list[Iterator[dict[str, Any]]]:
    return list(streams.values())


def _first_difference(records: Mapping[int, dict[str, Any]]) -> int | None:
    for index, values in enumerate(zip(*(r["norms"] for r in records.values()), strict=True)):
        if not _are_equal(values):
            return index
    return None


def _are_equal(values: tuple[float | None, ...]) -> bool:
    if any(v is None for v in values) or any(v != v for v in values):
        return len({str(v) for v in values}) == 1
    low, high = min(v for v in values if v is not None), max(v for v in values if v is not None)
    return low == high or high - low <= TOLERANCE * abs(high)


def _diverged(evidence: Evidence, records: Mapping[int, dict[str, Any]], index: int, names: list[str]) -> Finding:
    values = {rank: r["norms"][index] for rank, r in records.items()}
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        near = next((k for k, ranks in groups.items() if _are_equal((value, values[ranks[0]]))), str(value))
        groups.setdefault(near, []).append(rank)
    largest = max(groups.values(), key=len)
    minority = tuple(r for r in values if r not in largest)
    ranks = minority if len(largest) > len(values) / 2 else tuple(values)
    first = next(iter(records.values()))
    name = names[index] if index < len(names) else f"parameter {index}"
    shown = ", ".join(f"rank {r}: {v:.6g}" if v is not None else f"rank {r}: none" for r, v in values.items())
    return Finding(
        cause="silent_divergence",
        ranks=ranks,
        module=name.rpartition(".")[0],
        reason=f"{_WHAT[first['kind']]} {name} differ between ranks from step {first['step']} on (L2 norms: {shown})",
        certain=True,
        confidence=0.95,
        facts=tuple(
            Fact(rank=r, kind="checksum", file=f"rank{r}/checksums.jsonl", says=f"{name}: {v}")
            for r, v in values.items()
        ),
    )
