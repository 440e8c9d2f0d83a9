"""Why replicas differ: what ranks loaded or set their optimizer to, and the line that changed parameters or gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pytest_nsa.diagnosis.verdict import Finding, by_ranks, describe_ranks

TOLERANCE = 1e-9  # relative, of a state's norm
Records = list[dict[str, Any]]
Loads = list[tuple[str, str, float, str]]  # what was loaded, where, its norm, and the error that it raised


def with_origin(
    finding: Finding,
    world_size: int,
    streams: Mapping[int, Records],
    diverged: Mapping[int, dict[str, Any]],
    equal: Mapping[int, dict[str, Any]],
) -> Finding:
    """Return the finding with the source of a model's update, where ranks differ in it; its line is that of the
    difference.

    ``diverged`` has the record of each rank in which the difference was observed, from its ``streams``. ``equal`` has
    the latest records with equal parameters, {} without any: states loaded up to then are not the cause.
    """
    known = {rank: _known(records, diverged[rank]) for rank, records in streams.items()}
    added: list[Any] = next((k["added"] for k in known.values() if k.get("added")), [])
    if added:
        more = f" and {len(added) - 1} more" if len(added) > 1 else ""
        name, made = (added[0], "") if isinstance(added[0], str) else added[0]  # earlier versions recorded no line
        detail = f"DDP does not track {name}{more}: added after the model was wrapped" + (
            f", at {made}" if made else ""
        )
        finding = replace(finding, reason=f"{finding.reason}; {detail}", where=made or finding.where)
    loads = {rank: k.get("loads", []) for rank, k in known.items()}
    if equal:
        before = {rank: len(_known(records, equal[rank]).get("loads", ())) for rank, records in streams.items()}
        loads = {rank: of_rank[before[rank] :] for rank, of_rank in loads.items()}
    found = (
        _not_loaded(world_size, loads)
        or _loaded_otherwise(world_size, loads)
        or (_loaded_alone(world_size, loads) if equal else _begun_otherwise(world_size, known, loads))
        or _set_otherwise(world_size, known)
    )
    if found is None:
        return changed_before(finding, world_size, streams, diverged, equal, known)
    text, where = found
    return replace(finding, reason=f"{finding.reason}; {text}", where=where or finding.where)


def _known(records: Records, last: dict[str, Any]) -> dict[str, Any]:
    """Return what a rank's records state about its model's training up to one of them; each record has what changed."""
    known: dict[str, Any] = {}
    for record in records:
        known |= {
            name: record[name]
            for name in ("loads", "settings", "set_at", "added", "begun", "changes")
            if name in record
        }
        if record is last:
            break
    return known


def _not_loaded(world_size: int, loads: Mapping[int, Loads]) -> tuple[str, str] | None:
    """Return in words that some ranks did not load what others loaded, and the line.

    Most ranks must have loaded a model: where few have, its parameters are broadcast from there.
    """
    done = {rank: {(what, site) for what, site, _, error in of_rank if not error} for rank, of_rank in loads.items()}
    for what, site in dict.fromkeys(load for of_rank in done.values() for load in sorted(of_rank)):
        without = tuple(rank for rank, of_rank in done.items() if (what, site) not in of_rank)
        if not without or (what == "model" and 2 * len(without) >= len(done)):
            continue
        error = next((e for r in without for w, s, _, e in loads[r] if (w, s) == (what, site) and e), "")
        who, others = (
            describe_ranks(ranks, world_size) for ranks in (without, tuple(r for r in done if r not in without))
        )
        return f"{who} did not load the {what} that {others} loaded at {site}" + (f" ({error})" if error else ""), site
    return None


def _loaded_alone(world_size: int, loads: Mapping[int, Loads]) -> tuple[str, str] | None:
    """Return in words that few ranks loaded a model's parameters without a broadcast after it, and the line."""
    done = {rank: [load for load in of_rank if load[0] == "model" and not load[3]] for rank, of_rank in loads.items()}
    alone = tuple(rank for rank, of_rank in done.items() if of_rank)
    if not alone or len(alone) == len(done):
        return None
    site = done[alone[0]][-1][1]
    return f"{describe_ranks(alone, world_size)} loaded a model's parameters at {site}, and the others did not", site


def _loaded_otherwise(world_size: int, loads: Mapping[int, Loads]) -> tuple[str, str] | None:
    """Return in words that ranks loaded different numbers at one line, and that line."""
    done = {rank: [load for load in of_rank if not load[3]] for rank, of_rank in loads.items()}
    if len({tuple((what, site) for what, site, _, _ in of_rank) for of_rank in done.values()}) != 1:
        return None
    for calls in zip(*done.values(), strict=True):
        norms = dict(zip(done, (call[2] for call in calls), strict=True))
        if _odd(norms):
            what, site = calls[0][:2]
            detail = by_ranks({rank: f"{norm:.6g}" for rank, norm in norms.items()}, world_size)
            return f"the {what} that was loaded at {site} is not the same on all ranks (L2 norms: {detail})", site
    return None


def _begun_otherwise(
    world_size: int, known: Mapping[int, dict[str, Any]], loads: Mapping[int, Loads]
) -> tuple[str, str] | None:
    """Return in words that a model's parameters differed at its first call, and the line that created it."""
    begun = {rank: k["begun"] for rank, k in known.items() if "begun" in k}
    if len(begun) < len(known) or len({len(of_rank["norms"]) for of_rank in begun.values()}) != 1:
        return None
    for norms in zip(*(of_rank["norms"] for of_rank in begun.values()), strict=True):
        values = dict(zip(begun, norms, strict=True))
        if _odd(values) and (alone := _loaded_alone(world_size, loads)) is not None:
            return alone
        if _odd(values):
            where = next((of_rank["site"] for of_rank in begun.values() if of_rank["site"]), "")
            detail = by_ranks({rank: f"{norm:.6g}" for rank, norm in values.items()}, world_size)
            return (
                f"they were not equal when the model was first called (L2 norms of one: {detail}), as made at {where}",
                where,
            )
    return None


def _set_otherwise(world_size: int, known: Mapping[int, dict[str, Any]]) -> tuple[str, str] | None:
    """Return in words that a setting of the optimizer differs, and the line that set it last."""
    groups = {rank: k.get("settings", []) for rank, k in known.items()}
    if len({len(of_rank) for of_rank in groups.values()}) != 1:
        return None
    for of_ranks in zip(*groups.values(), strict=True):
        for name in of_ranks[0]:
            values = {rank: group.get(name) for rank, group in zip(groups, of_ranks, strict=True)}
            odd = _odd(values)
            if odd:
                where = next((at for rank in (*odd, *values) if (at := known[rank].get("set_at", ""))), "")
                detail = by_ranks({rank: f"{value}" for rank, value in values.items()}, world_size)
                return f"the optimizer's {name} differs ({detail})" + (f", as set at {where}" if where else ""), where
    return None


def _odd(values: Mapping[int, Any]) -> tuple[int, ...]:
    """Return the ranks with another value than most; without a majority, all but those that share the first rank's
    value.
    """
    most = max(grouped(values, _is_close), key=len)
    return tuple(rank for rank in values if rank not in most)


def grouped(values: Mapping[int, Any], are_equal: Callable[[Any, Any], bool]) -> list[list[int]]:
    """Return lists of ranks with equal values; each value is compared with the first of a list."""
    groups: list[list[int]] = []
    for rank, value in values.items():
        ranks = next((ranks for ranks in groups if are_equal(value, values[ranks[0]])), None)
        if ranks is None:
            groups.append(ranks := [])
        ranks.append(rank)
    return groups


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= TOLERANCE * max(abs(one), abs(other))
    return bool(one == other)


CHANGE_TOLERANCE = 1e-9  # relative, of a sum of norms: equal tensors give the same bits on one device
ChangeRecords = list[dict[str, Any]]
_PARAMETER, _GRADIENT = "parameter", "gradient"


def changed_before(
    finding: Finding, world_size: int, streams: Mapping[int, ChangeRecords], diverged: Mapping[int, dict[str, Any]],
    equal: Mapping[int, dict[str, Any]], known: Mapping[int, Mapping[str, Any]],
) -> Finding:  # fmt: skip
    """Return the finding with what was changed before the update after which ranks differ, and the line of the change.

    ``streams`` has the records of each rank, ``diverged`` those in which the difference was observed, ``equal`` the
    latest with equal parameters ({} without any), ``known`` what the records state about a rank's training.
    """
    before = _before(diverged)
    if not before:
        return finding
    parameters, gradients = ({rank: sums[i] for rank, sums in before.items()} for i in (0, 1))
    if not _are_equal(parameters.values()):
        of, detail = _PARAMETER, "they were changed before that step, by no optimizer"
        last = {rank: _total(record) for rank, record in equal.items()}
        now = parameters
    elif not _are_equal(gradients.values()) and next(iter(diverged.values()))["kind"] == _PARAMETER:
        of, detail = _GRADIENT, "gradients were changed after their reduction"
        last = {rank: _total(r) for rank in diverged if (r := _reduced(streams[rank], diverged[rank])) is not None}
        now = gradients
    else:
        return finding
    changers = tuple(rank for rank, total in last.items() if not _are_equal((total, now[rank])))
    changes = [c for rank in known for c in known[rank].get("changes", ()) if c[0] == of]
    # What all ranks do is seldom the cause; a condition may hold on only some of them.
    is_by_some = 0 < len(changers) < len(diverged)
    of_a_rank = [c for c in changes if is_by_some and c[4:] == ["rank"]]
    may_differ = of_a_rank or [c for c in changes if c[3]] or changes
    ranks = changers if is_by_some and len(finding.ranks) == len(diverged) else finding.ranks
    who = f", by {describe_ranks(changers, world_size)}" if is_by_some else ""
    if not may_differ:
        return replace(finding, ranks=ranks, reason=f"{finding.reason}; {detail}{who}")
    place, call = may_differ[0][1:3]
    at, called_from = (f"{place}, called at {call}", call) if place != call else (place, "")
    reason = f"{finding.reason}; {detail}{who}: see {at}"
    return replace(finding, ranks=ranks, where=place, called_from=called_from, reason=reason)


def _before(records: Mapping[int, dict[str, Any]]) -> dict[int, list[float]]:
    """Return the checksums with which the ranks' updates began; {} where they are not known for all ranks."""
    found = {rank: record["before"] for rank, record in records.items() if "before" in record}
    return found if len(found) == len(records) else {}


def _reduced(records: ChangeRecords, last: dict[str, Any]) -> dict[str, Any] | None:
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
    return bool(low == high or high - low <= CHANGE_TOLERANCE * abs(high))
