"""Why replicas differ: what ranks loaded or set their optimizer to, and the line that changed parameters or gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pytest_nsa.diagnosis.verdict import Finding, by_ranks, describe_ranks

TOLERANCE = 1e-9  # relative, of a norm or a sum of norms: equal tensors give the same bits on one device
Records = list[dict[str, Any]]
Loads = list[tuple[str, str, float, str]]  # what was loaded, where, its norm, and the error that it raised


def with_origin(
    finding: Finding, world_size: int, streams: Mapping[int, Records], diverged: Mapping[int, dict[str, Any]],
    equal: Mapping[int, dict[str, Any]],
) -> Finding:  # fmt: skip
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
    states = list(_states(known, loads, has_begun=bool(equal)))
    is_kept = bool(equal) or any(what == "begun" for what, *_ in states)
    found = _loaded_by_some(world_size, loads, is_kept=is_kept)
    if found is None and states:
        _, values, text, where = states[0]
        shown = {rank: f"{v:.6g}" if isinstance(v, float) else f"{v}" for rank, v in values.items()}
        found = text.replace("{}", by_ranks(shown, world_size)), where
    if found is None:
        return changed_earlier(finding, world_size, streams, diverged, equal, known)
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


def _loaded_by_some(world_size: int, loads: Mapping[int, Loads], *, is_kept: bool) -> tuple[str, str] | None:
    """Return in words which ranks loaded a state, or did not, in contrast to the others, and the line.

    Where few ranks load a model, its parameters are broadcast from there: such a load counts where it ``is_kept``, that is,
    where the parameters differed after it.
    """
    done = {rank: {(what, site) for what, site, _, error in of_rank if not error} for rank, of_rank in loads.items()}
    for what, site in dict.fromkeys(load for of_rank in done.values() for load in sorted(of_rank)):
        without = tuple(rank for rank, of_rank in done.items() if (what, site) not in of_rank)
        who, others = (
            describe_ranks(ranks, world_size) for ranks in (without, tuple(r for r in done if r not in without))
        )
        if what == "model" and 2 * len(without) >= len(done):
            if is_kept:
                return f"{others} loaded a model's parameters at {site}, and the others did not", site
        elif without:
            error = next((e for r in without for w, s, _, e in loads[r] if (w, s) == (what, site) and e), "")
            detail = f" ({error})" if error else ""
            return f"{who} did not load the {what} that {others} loaded at {site}{detail}", site
    return None


def _states(
    known: Mapping[int, Mapping[str, Any]], loads: Mapping[int, Loads], *, has_begun: bool
) -> Iterator[tuple[str, dict[int, Any], str, str]]:
    """Yield each state in which ranks differ: its kind, the value on each rank, a sentence with a place for the values, and
    the line.

    The states are what ranks loaded at one line, a model's parameters at its first call (unless it ``has_begun`` with equal
    ones), and the settings of the optimizer.
    """
    done = {rank: [load for load in of_rank if not load[3]] for rank, of_rank in loads.items()}
    if len({tuple((what, site) for what, site, *_ in of_rank) for of_rank in done.values()}) == 1:
        for calls in zip(*done.values(), strict=True):
            norms, (what, site) = {rank: call[2] for rank, call in zip(done, calls, strict=True)}, calls[0][:2]
            if _odd(norms):
                text = f"the {what} that was loaded at {site} is not the same on all ranks (L2 norms: {{}})"
                yield "loaded", norms, text, site
    begun = {rank: k["begun"] for rank, k in known.items() if "begun" in k}
    if not has_begun and len(begun) == len(known) and len({len(b["norms"]) for b in begun.values()}) == 1:
        where = next((b["site"] for b in begun.values() if b["site"]), "")
        for of_ranks in zip(*(b["norms"] for b in begun.values()), strict=True):
            if _odd(norms := dict(zip(begun, of_ranks, strict=True))):
                text = (
                    f"they were not equal when the model was first called (L2 norms of one: {{}}), as made at {where}"
                )
                yield "begun", norms, text, where
    groups = {rank: k.get("settings", []) for rank, k in known.items()}
    if len({len(of_rank) for of_rank in groups.values()}) != 1:
        return
    for settings in zip(*groups.values(), strict=True):
        for name in settings[0]:
            values = {rank: group.get(name) for rank, group in zip(groups, settings, strict=True)}
            if odd := _odd(values):
                where = next((at for rank in (*odd, *values) if (at := known[rank].get("set_at", ""))), "")
                set_at = f", as set at {where}" if where else ""
                text = f"the optimizer's {name} differs ({{}}){set_at}"
                yield "set", {r: str(v) for r, v in values.items()}, text, where


def _odd(values: Mapping[int, Any]) -> tuple[int, ...]:
    """Return the ranks with another value than most; without a majority, all but those that share the first rank's
    value.
    """
    most = max(grouped(values), key=len)
    return tuple(rank for rank in values if rank not in most)


def grouped(values: Mapping[int, Any], tolerance: float = TOLERANCE) -> list[list[int]]:
    """Return lists of ranks with equal values; each value is compared with the first of a list."""
    groups: list[list[int]] = []
    for rank, value in values.items():
        ranks = next((ranks for ranks in groups if are_equal((value, values[ranks[0]]), tolerance)), None)
        if ranks is None:
            groups.append(ranks := [])
        ranks.append(rank)
    return groups


def are_equal(values: Collection[Any], tolerance: float = TOLERANCE) -> bool:
    """Return whether values are equal: numbers within a relative tolerance, NaN to itself."""
    if not all(isinstance(v, int | float) and v == v for v in values):
        return len(set(map(str, values))) == 1
    low, high = min(values), max(values)
    return bool(low == high or high - low <= tolerance * abs(high))


_PARAMETER, _GRADIENT = "parameter", "gradient"


def changed_earlier(
    finding: Finding, world_size: int, streams: Mapping[int, Records], diverged: Mapping[int, dict[str, Any]],
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
    if not are_equal(parameters.values()):
        of, detail = _PARAMETER, "they were changed before that step, by no optimizer"
        last = {rank: _total(record) for rank, record in equal.items()}
        now = parameters
    elif not are_equal(gradients.values()) and next(iter(diverged.values()))["kind"] == _PARAMETER:
        of, detail = _GRADIENT, "gradients were changed after their reduction"
        last = {rank: _total(r) for rank in diverged if (r := _reduced(streams[rank], diverged[rank])) is not None}
        now = gradients
    else:
        return finding
    changers = tuple(rank for rank, total in last.items() if not are_equal((total, now[rank])))
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
