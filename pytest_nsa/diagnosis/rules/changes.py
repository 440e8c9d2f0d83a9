"""Which line has changed parameters, or gradients after their reduction, on some ranks and not, or otherwise, on others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pytest_nsa.diagnosis.verdict import Finding, describe_ranks

TOLERANCE = 1e-9  # relative, of a sum of norms: of equal tensors it is the same to the bit, but for the device
Records = list[dict[str, Any]]
_PARAMETER, _GRADIENT = "parameter", "gradient"


def changed_before(
    finding: Finding, world_size: int, streams: Mapping[int, Records], diverged: Mapping[int, dict[str, Any]],
    equal: Mapping[int, dict[str, Any]], known: Mapping[int, Mapping[str, Any]],
) -> Finding:  # fmt: skip
    """Return the finding with what was changed before the update after which ranks differ, and the line that is known to do so.

    ``streams`` has the records of each rank, ``diverged`` those in which it was seen, ``equal`` the latest in which parameters were
    equal, {} where there is none, ``known`` what the records say of a rank's training.
    """
    before = _before(diverged)
    if not before:
        return finding
    parameters, gradients = ({rank: sums[i] for rank, sums in before.items()} for i in (0, 1))
    if not _are_equal(parameters.values()):
        of, told = _PARAMETER, "they were changed before that step, by no optimizer"
        last = {rank: _total(record) for rank, record in equal.items()}
        now = parameters
    elif not _are_equal(gradients.values()) and next(iter(diverged.values()))["kind"] == _PARAMETER:
        of, told = _GRADIENT, "gradients were changed after their reduction"
        last = {rank: _total(r) for rank in diverged if (r := _reduced(streams[rank], diverged[rank])) is not None}
        now = gradients
    else:
        return finding
    changers = tuple(rank for rank, total in last.items() if not _are_equal((total, now[rank])))
    changes = [c for rank in known for c in known[rank].get("changes", ()) if c[0] == of]
    # What all ranks do alike is seldom why: a condition may be true on some of them alone.
    is_by_some = 0 < len(changers) < len(diverged)
    of_a_rank = [c for c in changes if is_by_some and c[4:] == ["rank"]]
    may_differ = of_a_rank or [c for c in changes if c[3]] or changes
    ranks = changers if is_by_some and len(finding.ranks) == len(diverged) else finding.ranks
    who = f", by {describe_ranks(changers, world_size)}" if is_by_some else ""
    if not may_differ:
        return replace(finding, ranks=ranks, reason=f"{finding.reason}; {told}{who}")
    place, call = may_differ[0][1:3]
    at, called_from = (f"{place}, called at {call}", call) if place != call else (place, "")
    reason = f"{finding.reason}; {told}{who}: see {at}"
    return replace(finding, ranks=ranks, where=place, called_from=called_from, reason=reason)


def _before(records: Mapping[int, dict[str, Any]]) -> dict[int, list[float]]:
    """Return the sums that ranks' updates began with; {} where they are not known of all."""
    found = {rank: record["before"] for rank, record in records.items() if "before" in record}
    return found if len(found) == len(records) else {}


def _reduced(records: Records, last: dict[str, Any]) -> dict[str, Any] | None:
    """Return the latest record of a rank's reduced gradients up to one of its records."""
    found = None
    for record in records:
        if record is last:
            break
        found = record if record["kind"] == _GRADIENT else found
    return found


def _total(record: Mapping[str, Any]) -> float:
    return math.fsum(norm for norm in record["norms"] if norm is not None)


def _are_equal(values: Any) -> bool:
    low, high = min(values), max(values)
    return bool(low == high or high - low <= TOLERANCE * abs(high))
