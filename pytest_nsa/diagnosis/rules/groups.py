"""Groups that never form: made by some ranks alone, in another order, or of other members."""

from __future__ import annotations

from collections import Counter

from pytest_nsa.diagnosis.facts import STOPS, all_facts, awaited, doing
from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.rules.memberships import (
    ITSELF,
    all_members,
    is_cut,
    is_numbered,
    made_by,
    members_of_new,
)
from pytest_nsa.diagnosis.verdict import Finding, by_ranks, describe_ranks
from pytest_nsa.evidence.board import NEW_GROUP, Collective
from pytest_nsa.evidence.values import Evidence, RankEvidence


def groups_apart(evidence: Evidence) -> Finding | None:
    """Find that ranks make a group that others of its members do not make, where every rank waits.

    torch numbers groups as a rank makes them, and members meet under that number: what some ranks make alone moves the number
    of every later group of theirs.
    """
    if evidence.stop not in (*STOPS, "failed") or not evidence.was_stalled:
        return None
    if any(not is_victim(error) for r in evidence.ranks for error in r.exceptions):
        return None
    alive = [r for r in evidence.ranks if not r.finished and not r.exceptions]
    making = {r.rank: c for r in alive if (c := awaited(r)) is not None and c.op == NEW_GROUP and c.note}
    if not making or any(not r.is_waiting for r in alive):
        return None
    if any(is_cut(c) for c in making.values()):
        return None
    n = evidence.job.world_size
    order = _in_another_order(evidence)
    if order is not None:
        ranks, made, usual = order
        return _finding(
            evidence, "group_order_deadlock", ranks, made.site,
            f"{describe_ranks(ranks, n)} made the group of {_named(made, n)} where the others made that of {_named(usual, n)}: in "
            "another order, and so under another number",
        )  # fmt: skip
    made_alone = None
    if all(is_numbered(c) for c in making.values()):
        made_alone = _made_by_some(evidence) or _left_out(evidence, making)
    if made_alone is not None:
        makers, call = made_alone
        who = describe_ranks(makers, n)
        absent = tuple(r.rank for r in evidence.ranks if r.rank not in makers)
        if len(makers) > len(absent):  # every rank has to make it, members or not: the few that do not are the odd ones
            return _finding(
                evidence, "init_timeout", absent, call.site,
                f"{describe_ranks(absent, n)} did not make group {call.note} at {call.site}: every rank has to, its members or "
                "not, and later groups have other numbers",
            )  # fmt: skip
        others = by_ranks({r: f"in the making of group {c.note}" for r, c in making.items() if r not in makers}, n)
        return _finding(
            evidence, "init_timeout", makers, call.site,
            f"{who} alone made group {call.note} at {call.site}, and so number later groups differently"
            + (f": {others}" if others else ""),
        )  # fmt: skip
    call = next(iter(making.values()))
    outside = tuple(
        sorted(m for m in members_of_new(call, n) - set(making) if not _has_entered(evidence.ranks[m], call))
    )
    if outside:
        does = {m: f"{doing(evidence.ranks[m])}, without group {call.note}" for m in outside}
        return _finding(
            evidence, "init_timeout", outside, call.site, f"{by_ranks(does, n)}; the others wait in the making of it at {call.site}"
        )  # fmt: skip
    ranks = _minority(making)
    if len({members_of_new(c, n) for c in making.values()}) == 1:
        shown = by_ranks({r: f"by {c.note}" for r, c in making.items()}, n)
        return _finding(
            evidence, "init_timeout", ranks, making[ranks[0]].site, f"the ranks do not meet to make their group: {shown}",
            certain=len(ranks) < len(making),
        )  # fmt: skip
    shown = by_ranks({r: f"in the making of group {c.note} at {c.site}" for r, c in making.items()}, n)
    return _finding(
        evidence, "group_order_deadlock", ranks, making[ranks[0]].site,
        f"the ranks make groups in different orders, or of different members: {shown}",
    )  # fmt: skip


def _has_entered(rank: RankEvidence, making: Collective) -> bool:
    """Return whether a rank has been in the making of the same group."""
    note = _common_note(making)
    return any(c.op == NEW_GROUP and _common_note(c) == note for c in rank.collectives)


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


def _made_by_some(evidence: Evidence) -> tuple[tuple[int, ...], Collective] | None:
    """Return the ranks that made a group which the others did not make, and its call; the fewer ranks of the two sides.

    Compared are the groups that ranks have made, in their order; one that comes later in another rank's order is no such. What
    they made before is past: the same members may meet anew.
    """
    made = {r.rank: made_by(r) for r in evidence.ranks if r.board is not None}
    if len(made) < 2:
        return None
    for place in range(max(map(len, made.values()))):
        at = {rank: calls[place] for rank, calls in made.items() if place < len(calls)}
        kinds: dict[frozenset[int], list[int]] = {}
        for rank, call in at.items():
            kinds.setdefault(members_of_new(call, evidence.job.world_size), []).append(rank)
        if len(kinds) < 2:
            continue
        later = Counter(m for r in at for m in all_members(made[r][place:], evidence.job.world_size))
        for members, ranks in sorted(kinds.items(), key=lambda kind: len(kind[1])):
            if later[members] == len(ranks):  # no other rank makes it later
                return tuple(sorted(ranks)), at[ranks[0]]
        return None
    return None


def _left_out(evidence: Evidence, making: dict[int, Collective]) -> tuple[tuple[int, ...], Collective] | None:
    """Return the ranks that have made a group which others, that wait in something else now, have made no group after; its call."""
    made = {r.rank: made_by(r) for r in evidence.ranks if r.board is not None}
    elsewhere = [rank for rank in made if rank not in making]
    fewest = min((len(made[rank]) for rank in elsewhere), default=0)
    makers = tuple(sorted(rank for rank in made if len(made[rank]) > fewest))
    if not elsewhere or set(makers) != set(making):
        return None
    return makers, made[makers[0]][fewest]


def _in_another_order(evidence: Evidence) -> tuple[tuple[int, ...], Collective, Collective] | None:
    """Return the few ranks that made another group where most made one that these made later: their call, and the others'."""
    n, made = evidence.job.world_size, {r.rank: made_by(r) for r in evidence.ranks if r.board is not None}
    for place in range(max(map(len, made.values()), default=0)):
        at = {rank: calls[place] for rank, calls in made.items() if place < len(calls)}
        groups = Counter(members_of_new(c, n) for c in at.values())
        if len(groups) < 2:
            continue
        (most, number), (_, next_most) = groups.most_common(2)
        odd = tuple(sorted(r for r, c in at.items() if members_of_new(c, n) != most))
        if number == next_most or len(odd) >= number:
            return None
        theirs = {members for r in set(at) - set(odd) for members in all_members(made[r][place:], n)}
        # A rank that makes the groups alone that it is in has left some out; one that makes another's has another order.
        made_later = all(
            members_of_new(at[r], n) in theirs
            and (most in all_members(made[r][place:], n) or r not in members_of_new(at[r], n))
            for r in odd
        )
        return (odd, at[odd[0]], next(c for r, c in at.items() if r not in odd)) if made_later else None
    return None


def _named(call: Collective, world_size: int) -> str:
    return describe_ranks(tuple(sorted(members_of_new(call, world_size))), world_size)


def _minority(making: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks whose group fewer ranks make; all where none is rarer. What each calls itself is its own."""
    notes = {r: _common_note(c) for r, c in making.items()}
    numbers = Counter(notes.values())
    fewest, most = min(numbers.values()), max(numbers.values())
    return tuple(sorted(r for r, note in notes.items() if fewest == most or numbers[note] == fewest))


def _common_note(making: Collective) -> str:
    """Return a new group's note without what a rank calls itself."""
    return ITSELF.sub("", making.note)
