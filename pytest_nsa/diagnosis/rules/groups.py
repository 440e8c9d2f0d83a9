"""Groups that never form: made by some ranks alone, in another order, or of other members."""

from __future__ import annotations

import re
from collections import Counter

from pytest_nsa.diagnosis.facts import all_facts
from pytest_nsa.diagnosis.rules.blame import rings
from pytest_nsa.diagnosis.rules.order import STOPS, awaited
from pytest_nsa.diagnosis.verdict import Finding, by_ranks, describe_ranks
from pytest_nsa.evidence.board import NEW_GROUP, Collective
from pytest_nsa.evidence.collectives import can_complete, ranks_of
from pytest_nsa.evidence.values import Evidence, RankEvidence

_ITSELF = re.compile(r"(?<=: )rank -?\d+ of -?\d+(, by )?")


def groups_apart(evidence: Evidence) -> Finding | None:
    """Find that ranks make a group that others of its members do not make, where every rank waits.

    torch numbers groups as a rank makes them, and members meet under that number: what some ranks make alone moves the number
    of every later group of theirs.
    """
    if evidence.stop not in STOPS or not evidence.was_stalled:
        return None
    alive = [r for r in evidence.ranks if not r.finished]
    making = {r.rank: c for r in alive if (c := awaited(r)) is not None and c.op == NEW_GROUP and c.note}
    if not making or any(not r.is_waiting for r in alive):
        return None
    order = _in_another_order(evidence)
    if order is not None:
        ranks, made, usual = order
        who = describe_ranks(ranks, evidence.job.world_size)
        return _finding(
            evidence, "group_order_deadlock", ranks, made.site,
            f"{who} made the group of {_named(made)} where the others made that of {_named(usual)}: in another order, and so under "
            "another number",
        )  # fmt: skip
    waits = {r.rank: awaited(r) for r in alive}
    if any(c is not None and _can_end(evidence, c, making) for c in waits.values()):
        return None
    local = _local_circle(evidence, making)
    if local:
        shown = by_ranks({r: f"in the making of {_named(c)}'s" for r, c in making.items()}, evidence.job.world_size)
        return _finding(
            evidence, "group_order_deadlock", local, making[local[0]].site,
            f"each waits for a member that makes another group first: {shown}",
        )  # fmt: skip
    made_alone = _made_by_some(evidence) if all(_is_numbered(c) for c in making.values()) else None
    if made_alone is not None:
        makers, call = made_alone
        who = describe_ranks(makers, evidence.job.world_size)
        absent = tuple(r.rank for r in evidence.ranks if r.rank not in makers)
        if len(makers) > len(absent):  # every rank has to make it, members or not: the few that do not are the odd ones
            return _finding(
                evidence, "init_timeout", absent, call.site,
                f"{describe_ranks(absent, evidence.job.world_size)} did not make group {call.note} at {call.site}: every rank "
                "has to, its members or not, and later groups have other numbers",
            )  # fmt: skip
        others = by_ranks(
            {r: f"in the making of group {c.note}" for r, c in making.items() if r not in makers},
            evidence.job.world_size,
        )
        return _finding(
            evidence, "init_timeout", makers, call.site,
            f"{who} alone made group {call.note} at {call.site}, and so number later groups differently"
            + (f": {others}" if others else ""),
        )  # fmt: skip
    call = next(iter(making.values()))
    members = _members(call, evidence.job.world_size)
    outside = tuple(m for m in members if m not in making and m in {r.rank for r in evidence.ranks})
    if outside:
        who = describe_ranks(outside, evidence.job.world_size)
        other = waits.get(outside[0])
        has_ended = evidence.ranks[outside[0]].finished
        does = (
            f" and waits in {other.describe()}" if other is not None else " and has ended its test" if has_ended else ""
        )
        return _finding(
            evidence, "init_timeout", outside, call.site,
            f"{who} does not make group {call.note}{does}; the others wait for it at {call.site}",
        )  # fmt: skip
    kinds = {_members(c, evidence.job.world_size) for c in making.values()}
    if len(kinds) == 1:
        ranks = _minority(making)
        shown = by_ranks({r: f"by {c.note}" for r, c in making.items()}, evidence.job.world_size)
        return _finding(
            evidence, "init_timeout", ranks, making[ranks[0]].site, f"the ranks do not meet to make their group: {shown}",
            certain=len(ranks) < len(making),
        )  # fmt: skip
    if len(kinds) > 1:
        shown = by_ranks(
            {r: f"in the making of group {c.note} at {c.site}" for r, c in making.items()}, evidence.job.world_size
        )
        ranks = _minority(making)
        return _finding(
            evidence, "group_order_deadlock", ranks, making[ranks[0]].site,
            f"the ranks make groups in different orders, or of different members: {shown}",
        )  # fmt: skip
    return None


def _finding(
    evidence: Evidence, cause: str, ranks: tuple[int, ...], where: str, reason: str, *, certain: bool = True
) -> Finding:
    return Finding(
        cause=cause,
        ranks=ranks,
        where=where,
        reason=reason,
        certain=certain and all(awaited(r) is not None for r in evidence.ranks if not r.finished),
        confidence=0.85,
        facts=all_facts(evidence.ranks),
    )


def _can_end(evidence: Evidence, call: Collective, making: dict[int, Collective]) -> bool:
    """Return whether all that a call needs are in it."""
    if call.op != NEW_GROUP:
        return call.peer != -1 or can_complete(call, rings(evidence))
    members = _members(call, evidence.job.world_size)
    # A group of all whose ranks do not meet has been under way for as long as the stall: that it will end is not to be expected.
    return len(members) < len(evidence.ranks) and all(m in making and making[m].note == call.note for m in members)


def _members(call: Collective, world_size: int) -> tuple[int, ...]:
    """Return the ranks that a new group's note names ('2: 0-3,8'); all of them where it names none."""
    return ranks_of(call.note.partition(": ")[2], world_size) or tuple(range(world_size))


def _made_by_some(evidence: Evidence) -> tuple[tuple[int, ...], Collective] | None:
    """Return the ranks that made a group which the others did not make, and its call; the fewer ranks of the two sides.

    Compared are the groups that ranks have made, in their order; one that comes later in another rank's order is no such. What
    they made before is past: the same members may meet anew.
    """
    made = {r.rank: _calls(r) for r in evidence.ranks if r.board is not None}
    if len(made) < 2:
        return None
    for place in range(max(map(len, made.values()))):
        at = {rank: calls[place] for rank, calls in made.items() if place < len(calls)}
        kinds: dict[tuple[int, ...], list[int]] = {}
        for rank, call in at.items():
            kinds.setdefault(_members(call, evidence.job.world_size), []).append(rank)
        if len(kinds) < 2:
            continue
        for members, ranks in sorted(kinds.items(), key=lambda kind: len(kind[1])):
            others = [r for r in at if r not in ranks]
            if all(members not in _all_members(made[r][place:], evidence.job.world_size) for r in others):
                return tuple(sorted(ranks)), at[ranks[0]]
        return None
    return None


def _in_another_order(evidence: Evidence) -> tuple[tuple[int, ...], Collective, Collective] | None:
    """Return the few ranks that made another group where most made one that these made later: their call, and the others'."""
    n, made = evidence.job.world_size, {r.rank: _calls(r) for r in evidence.ranks if r.board is not None}
    if not all(_is_numbered(c) for calls in made.values() for c in calls):
        return None  # groups that their members alone make have no order
    for place in range(max(map(len, made.values()), default=0)):
        at = {rank: calls[place] for rank, calls in made.items() if place < len(calls)}
        groups = Counter(_members(c, n) for c in at.values())
        if len(groups) < 2:
            continue
        (most, number), (_, next_most) = groups.most_common(2)
        odd = tuple(sorted(r for r, c in at.items() if _members(c, n) != most))
        if number == next_most or len(odd) >= number:
            return None
        theirs = {members for r in at if r not in odd for members in _all_members(made[r][place:], n)}
        # A rank that makes the groups alone that it is in has left some out; one that makes another's has another order.
        made_later = all(
            _members(at[r], n) in theirs and (most in _all_members(made[r][place:], n) or r not in _members(at[r], n))
            for r in odd
        )
        return (odd, at[odd[0]], next(c for r, c in at.items() if r not in odd)) if made_later else None
    return None


def _local_circle(evidence: Evidence, making: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks that wait for each other in a circle to make groups which their members alone make."""
    if any(_is_numbered(c) for c in making.values()):
        return ()
    n, way = evidence.job.world_size, [min(making)]
    while True:
        call = making[way[-1]]
        following = next((m for m in _members(call, n) if m in making and making[m].note != call.note), None)
        if following is None:
            return ()
        if following in way:
            return tuple(sorted(way[way.index(following) :]))
        way.append(following)


def _is_numbered(call: Collective) -> bool:
    """Return whether torch numbers a group, which all ranks make then; one that its members alone make has a hash for a name."""
    return call.note.partition(":")[0].isdigit()


def _named(call: Collective) -> str:
    return f"ranks {call.note.partition(': ')[2]}"


def _calls(rank: RankEvidence) -> list[Collective]:
    return [c for c in rank.collectives if c.op == NEW_GROUP and c.note]


def _all_members(calls: list[Collective], world_size: int) -> set[tuple[int, ...]]:
    return {_members(call, world_size) for call in calls}


def _minority(making: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks whose group fewer ranks make; all where none is rarer. What each calls itself is its own."""
    notes = {r: _ITSELF.sub("", c.note) for r, c in making.items()}
    numbers = Counter(notes.values())
    fewest, most = min(numbers.values()), max(numbers.values())
    return tuple(sorted(r for r, note in notes.items() if fewest == most or numbers[note] == fewest))
