"""Ranks that wait for keys of a store: a few wait for another key than most, or a rank went on without setting its key."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping

from pytest_nsa.diagnosis.explain.locations import user_frames
from pytest_nsa.diagnosis.explain.program import Order, compare_ranks
from pytest_nsa.diagnosis.facts import all_facts, awaited, last_seen
from pytest_nsa.diagnosis.rules.one_sided import extra, skipped
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence, RankEvidence

_SHOWN = 8  # number of keys that a reason names
_LONGEST = 18  # most digits of a number that is compared


def waits_for(rank: RankEvidence) -> str:
    """Return in words that a rank waits for a key."""
    key = key_of(rank)
    return f"waits for a key of a store that no rank has set{f': {key}' if key else ''}"


def _some(keys: list[str]) -> str:
    return ", ".join([*keys[:_SHOWN], f"and {len(keys) - _SHOWN} more"] if len(keys) > _SHOWN else keys)


def _who_waits(ranks: tuple[int, ...], world_size: int) -> str:
    return f"{describe_ranks(ranks, world_size)} {'wait' if len(ranks) > 1 else 'waits'}"


def key_of(rank: RankEvidence) -> str:
    """Return the keys that a rank waits for in a store, separated by ', '; '' where they are unknown."""
    is_main = rank.stack is not None and rank.stack.is_main  # the keys of another thread are not kept
    return rank.board.key if rank.board is not None and is_main else ""


def of_keys(evidence: Evidence, alive: list[RankEvidence], waiting: list[RankEvidence]) -> Finding | None:
    """Find the cause where every rank of ``alive`` waits, the ranks of ``waiting`` for keys of a store; None where it
    is unknown.
    """
    n, ranks = evidence.job.world_size, tuple(r.rank for r in waiting)
    waits = {r.rank: c for r in alive if (c := awaited(r)) is not None}
    context = f"; {_who_waits(ranks, n)} for a key of a store"
    found = _past_a_call(evidence, ranks, waits, context) or _not_set_by_its_owner(evidence, waiting)
    if len(waiting) == len(alive):
        found = found or _out_of_its_series(evidence, waiting)
    if found is not None:
        return found
    # A polling loop has several lines.
    functions = {re.sub(r":\d+ in ", " ", last_seen(r)) for r in waiting}
    others = len(evidence.ranks) - len(waiting)  # in another call, or at the end of their test
    are_most = len(alive) == len(waiting) or 2 * len(waiting) > len(alive)
    if len(functions) == 1 and others and (are_most or _is_the_other_s(evidence, waiting)):
        return _went_past(evidence, waiting)
    return _at_another(evidence, waiting) if len(waiting) == len(alive) > 2 else None


def _past_a_call(
    evidence: Evidence, ranks: tuple[int, ...], waits: Mapping[int, Collective], context: str
) -> Finding | None:  # fmt: skip
    """Find that ``ranks``, which wait for keys, are past the collective in which all others wait, by the counters of
    their loops.

    The smaller of the two sides is the culprit.
    """
    others = [rank for rank in waits if rank not in ranks]
    if not others or len({waits[r].place for r in others}) != 1 or waits[others[0]].peer != -1:
        return None
    call = waits[others[0]]
    if any(c.place == call.place for r in ranks for c in evidence.ranks[r].collectives):
        return None
    seen = [compare_ranks(evidence.sources, evidence.ranks[r], evidence.ranks[others[0]]) for r in ranks]
    if not all(c.order is Order.AFTER and c.is_counted for c in seen):
        return None
    if len(others) < len(ranks):
        return extra(evidence, tuple(sorted(others)), call, f"which the others have gone past{context}")
    who = describe_ranks(ranks, evidence.job.world_size)
    reason = f"{who} went on without {call.describe()}, in which the others wait (call skipped){context}"
    return skipped(evidence, tuple(sorted(ranks)), call, reason)


def _went_past(evidence: Evidence, waiting: list[RankEvidence]) -> Finding:
    """Return the finding that most ranks wait for a key at one line, and the others went on without setting it."""
    n, ranks = evidence.job.world_size, tuple(r.rank for r in waiting)
    gone = tuple(sorted({r.rank for r in evidence.ranks} - set(ranks)))
    call = next((c for r in gone if (board := evidence.ranks[r].board) and (c := board.waits_in)), None)
    went = f"went on to {call.describe()}" if call is not None else "went on"
    if all(evidence.ranks[r].finished for r in gone):
        went = "ended its test" if len(gone) == 1 else "ended their tests"
    where = last_seen(waiting[0])
    keys = sorted({key for r in waiting if (key := key_of(r))})
    usual = _where_such_are_set(evidence.ranks[gone[0]], keys)
    went += f", and has set such keys at {usual}" if usual else ""
    if not usual and _is_the_other_s(evidence, waiting):
        usual = _where_such_are_set(waiting[0], keys)
        went += f", and such keys are set at {usual}"
    named = f": {_some(keys)}" if keys else ""
    who = _who_waits(ranks, n)
    reason = f"{describe_ranks(gone, n)} {went}; {who} for a key of a store that is not set{named}, at {where}"
    return Finding(
        cause="missing_collective",
        ranks=gone,
        where=usual or where,
        reason=reason,
        confidence=0.7,
        facts=all_facts(evidence.ranks),
    )


def _not_set_by_its_owner(evidence: Evidence, waiting: list[RankEvidence]) -> Finding | None:
    """Find the owners of the keys that ranks wait for: each rank has set such keys with its own number in one place."""
    known = {key for r in evidence.ranks for key, _ in r.keys_set}
    wanted = {r.rank: _unset(r, known) for r in waiting}
    owners = {rank: {_owner_of(evidence, key): key for key in keys} for rank, keys in wanted.items()}
    sure = {rank: of for rank, of in owners.items() if of and None not in of}
    # A rank that waits for another's key before it sets its own blocks others only as a consequence.
    of_all = {
        o: key
        for of in sure.values()
        for o, key in of.items()
        if o is not None and set(owners.get(o, {o: key})) <= {o, None}
    }
    culprits = tuple(sorted(of_all))
    # Only a culprit may wait for keys of an unknown owner, of a kind that no other rank has set.
    if not culprits or not owners.keys() - sure.keys() <= of_all.keys():
        return None
    n, key = evidence.job.world_size, of_all[culprits[0]]
    usual = _where_such_are_set(evidence.ranks[culprits[0]], [key])
    who, waits = describe_ranks(culprits, n), _who_waits(tuple(sorted(owners)), n)
    has_set = f"{who} {'has' if len(culprits) == 1 else 'have'} set such keys at {usual}"
    return Finding(
        cause="missing_collective",
        ranks=culprits,
        where=usual or last_seen(waiting[0]),
        reason=f"{waits} for a key of a store that is not set: {key}; {has_set}, and went on without this one",
        confidence=0.75,
        facts=all_facts(evidence.ranks),
    )


def _out_of_its_series(evidence: Evidence, waiting: list[RankEvidence]) -> Finding | None:
    """Find, where each rank waits for another's key, the only owner that has set a later key than the awaited one; or,
    without such an owner, the only one that is more than one key behind.
    """
    known = {key for r in evidence.ranks for key, _ in r.keys_set}
    # By owner: the waiting rank, its key, and the distance of the owner's latest key from it.
    series: dict[int, tuple[RankEvidence, str, int]] = {}
    for rank in waiting:
        for key in _unset(rank, known):
            owner = _owner_of(evidence, key)
            ahead = _ahead(evidence.ranks[owner], key) if owner is not None and owner != rank.rank else None
            if owner is not None and ahead is not None:
                series.setdefault(owner, (rank, key, ahead))
    past = [owner for owner, (_, _, ahead) in series.items() if ahead > 0]
    culprits = past or [owner for owner, (_, _, ahead) in series.items() if ahead < -1]
    if len(culprits) != 1:
        return None
    owner = culprits[0]
    rank, key, _ = series[owner]
    latest, usual = _latest_such(evidence.ranks[owner], [key])
    waits = _who_waits((rank.rank,), evidence.job.world_size)
    return Finding(
        cause="missing_collective",
        ranks=(owner,),
        where=usual,
        reason=f"{waits} for a key of a store that is not set: {key}; rank {owner} has set such keys at {usual}, {latest} last",
        confidence=0.75,
        facts=all_facts(evidence.ranks),
    )


def _latest_such(rank: RankEvidence, keys: list[str]) -> tuple[str, str]:
    """Return (key, line) of the latest key that a rank has set and that differs only in numbers from one of ``keys``;
    ('', '') without one.
    """
    wanted = {_without_numbers(key) for names in keys for key in names.split(", ")}
    return next((found for found in reversed(rank.keys_set) if _without_numbers(found[0]) in wanted), ("", ""))


def _ahead(rank: RankEvidence, key: str) -> int | None:
    """Return by how much the number in a rank's latest key exceeds that in ``key``; None where not exactly one number
    differs.
    """
    latest, _ = _latest_such(rank, [key])
    differing = [pair for pair in zip(_numbers(latest), _numbers(key), strict=False) if pair[0] != pair[1]]
    if len(differing) != 1 or max(map(len, differing[0])) > _LONGEST:
        return None
    mine, wanted = differing[0]
    return int(mine) - int(wanted)


def _unset(rank: RankEvidence, known: Collection[str]) -> list[str]:
    """Return the keys that a rank waits for and that no rank is known to have set."""
    return [key for key in key_of(rank).split(", ") if key and key not in known]


def _owner_of(evidence: Evidence, key: str) -> int | None:
    """Return the rank that sets keys like this one: each rank has set such keys, with its own number in one place.

    None where no place distinguishes the ranks, or where two places disagree.
    """
    kind, numbers = _without_numbers(key), _numbers(key)
    own: dict[int, set[tuple[str, ...]]] = {}
    for rank in evidence.ranks:
        found = {_numbers(name) for name, _ in rank.keys_set if _without_numbers(name) == kind}
        if found:
            own[rank.rank] = found
    if len(own) < 2:
        return None
    owners = set()
    for place, number in enumerate(numbers):
        by_number = {found[place]: rank for rank, keys in own.items() for found in keys}
        if len(by_number) == len(own) == sum(len({found[place] for found in keys}) for keys in own.values()):
            owners.add(by_number.get(number))
    return owners.pop() if len(owners) == 1 else None


def _numbers(key: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", key))


def _is_the_other_s(evidence: Evidence, waiting: list[RankEvidence]) -> bool:
    """Return whether one of two ranks waits for a key of a kind that the ranks have set, and the other has gone on in
    the same round of their loops, so that no third rank could set it.
    """
    if len(evidence.ranks) != 2 or len(waiting) != 1 or not key_of(waiting[0]):
        return False
    other = evidence.ranks[1 - waiting[0].rank]
    is_known = any(_where_such_are_set(rank, [key_of(waiting[0])]) for rank in evidence.ranks)
    return is_known and compare_ranks(evidence.sources, waiting[0], other).is_counted


def _where_such_are_set(rank: RankEvidence, keys: list[str]) -> str:
    """Return the line at which a rank has set keys that differ only in numbers from ``keys``; '' where it has set none."""
    return _latest_such(rank, keys)[1]


def _without_numbers(key: str) -> str:
    return re.sub(r"\d+", "#", key)


def _at_another(evidence: Evidence, waiting: list[RankEvidence]) -> Finding | None:
    """Find that all ranks wait at one line, most of them for one key, and the others for another."""
    keys = {r.rank: key_of(r) for r in waiting}
    # A polling loop has several lines.
    ways = {
        (*(f.describe() for f in frames[:-1]), *(f.function for f in frames[-1:]))
        for frames in map(user_frames, waiting)
    }
    (usual, number), *more = Counter(keys.values()).most_common()
    if not more or not all(keys.values()) or len(ways) > 1 or 2 * number <= len(keys):
        return None
    n, odd = evidence.job.world_size, tuple(r for r, key in sorted(keys.items()) if key != usual)
    theirs = sorted({keys[r] for r in odd})
    who = _who_waits(odd, n)
    what = f"the key {theirs[0]} of a store" if len(theirs) == 1 else f"different keys of a store ({_some(theirs)})"
    return Finding(
        cause="missing_collective",
        ranks=odd,
        where=last_seen(waiting[0]),
        reason=f"{who} for {what}, where the others wait for {usual}",
        confidence=0.8,
        facts=all_facts(evidence.ranks),
    )
