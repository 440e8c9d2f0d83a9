"""Groups that never form: created by some ranks alone, in another order, with other members, or by ranks that disagree
on their numbers or on the world size.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_nsa.diagnosis.facts import STOPS, all_facts, awaited, doing
from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.verdict import Finding, by_ranks, describe_ranks
from pytest_nsa.evidence.board import NEW_GROUP, Collective
from pytest_nsa.evidence.collectives import ranks_of
from pytest_nsa.evidence.values import Evidence, RankEvidence


def groups_differ(evidence: Evidence) -> Finding | None:
    """Find that ranks create a group that other members do not create, where every rank waits.

    torch numbers groups in the order in which a rank creates them, and members meet under that number. A group that
    only some ranks create shifts the numbers of all later groups on these ranks.
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
            f"{describe_ranks(ranks, n)} created the group of {_named(made, n)} where the others created that of "
            f"{_named(usual, n)}: in another order, and so under another number",
        )  # fmt: skip
    made_alone = None
    if all(is_numbered(c) for c in making.values()):
        made_alone = _made_by_some(evidence) or _made_by_makers_alone(evidence, making)
    if made_alone is not None:
        makers, call = made_alone
        who = describe_ranks(makers, n)
        absent = tuple(r.rank for r in evidence.ranks if r.rank not in makers)
        if len(makers) > len(absent):  # every rank has to create it, members or not: the minority that does not is odd
            return _finding(
                evidence, "init_timeout", absent, call.site,
                f"{describe_ranks(absent, n)} did not create group {call.note} at {call.site}: every rank has to, its members or "
                "not, and later groups have other numbers",
            )  # fmt: skip
        others = by_ranks({r: f"in the creation of group {c.note}" for r, c in making.items() if r not in makers}, n)
        return _finding(
            evidence, "init_timeout", makers, call.site,
            f"{who} alone created group {call.note} at {call.site}, and so number later groups differently"
            + (f": {others}" if others else ""),
        )  # fmt: skip
    call = next(iter(making.values()))
    outside = tuple(sorted(members_of_new(call, n) - set(making)))
    if outside:
        does = {m: f"{doing(evidence.ranks[m])}, without group {call.note}" for m in outside}
        return _finding(
            evidence, "init_timeout", outside, call.site, f"{by_ranks(does, n)}; the others wait for its creation at {call.site}"
        )  # fmt: skip
    ranks = _minority(making)
    if len({members_of_new(c, n) for c in making.values()}) == 1:
        shown = by_ranks({r: f"by {c.note}" for r, c in making.items()}, n)
        return _finding(
            evidence, "init_timeout", ranks, making[ranks[0]].site, f"the ranks do not meet to create their group: {shown}",
            certain=len(ranks) < len(making),
        )  # fmt: skip
    shown = by_ranks({r: f"in the creation of group {c.note} at {c.site}" for r, c in making.items()}, n)
    return _finding(
        evidence, "group_order_deadlock", ranks, making[ranks[0]].site,
        f"the ranks create groups in different orders, or with different members: {shown}",
    )  # fmt: skip


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
        advice="let every rank create every group, its members or not, in the same order: torch numbers groups in that order",
        facts=all_facts(evidence.ranks),
    )


def _made_by_some(evidence: Evidence) -> tuple[tuple[int, ...], Collective] | None:
    """Return the ranks that created a group which the others did not create, and the call; the smaller of the two
    sides.

    The groups are compared in the order of their creation. A group that comes later in another rank's order is not such
    a group.
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
            if later[members] == len(ranks):  # no other rank creates it later
                return tuple(sorted(ranks)), at[ranks[0]]
        return None
    return None


def _made_by_makers_alone(
    evidence: Evidence, making: dict[int, Collective]
) -> tuple[tuple[int, ...], Collective] | None:
    """Return the ranks that created a group after which others, that now wait in something else, created none; and the
    call.
    """
    made = {r.rank: made_by(r) for r in evidence.ranks if r.board is not None}
    elsewhere = [rank for rank in made if rank not in making]
    fewest = min((len(made[rank]) for rank in elsewhere), default=0)
    makers = tuple(sorted(rank for rank in made if len(made[rank]) > fewest))
    if not elsewhere or set(makers) != set(making):
        return None
    return makers, made[makers[0]][fewest]


def _in_another_order(evidence: Evidence) -> tuple[tuple[int, ...], Collective, Collective] | None:
    """Return the few ranks that created another group where most created one that these created later: their call, and
    the others'.
    """
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
        # A rank that creates only its own groups skipped some; a rank that creates another's has another order.
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
    """Return the ranks that create the rarest group; all of them where none is rarer. A rank's own number in the note
    is ignored.
    """
    notes = {r: _common_note(c) for r, c in making.items()}
    numbers = Counter(notes.values())
    fewest, most = min(numbers.values()), max(numbers.values())
    return tuple(sorted(r for r, note in notes.items() if fewest == most or numbers[note] == fewest))


def _common_note(making: Collective) -> str:
    """Return a new group's note without the rank's own number."""
    return ITSELF.sub("", making.note)


ITSELF = re.compile(r"(?<=: )rank -?\d+ of -?\d+(, by )?")


def members_of_new(call: Collective, world_size: int) -> frozenset[int]:
    """Return the ranks that a new group's note names ('2: 0-3,8'); all ranks where it names none."""
    return _named_in(call.note.partition(": ")[2], world_size)


@functools.lru_cache(maxsize=256)
def _named_in(text: str, world_size: int) -> frozenset[int]:
    return frozenset(ranks_of(text, world_size) or range(world_size))  # a frozenset caches its hash


def is_numbered(call: Collective) -> bool:
    """Return whether torch numbers a group, so that all ranks create it in one order. The name of a group that only its
    members create is a hash.
    """
    return call.note.partition(":")[0].isdigit()


def is_cut(call: Collective) -> bool:
    """Return whether a group has more ranks than its record holds, so that its members are unknown."""
    return call.note.endswith("…")


def made_by(rank: RankEvidence) -> list[Collective]:
    """Return the creations of numbered groups that a rank entered, in their order."""
    return [c for c in rank.collectives if c.op == NEW_GROUP and is_numbered(c) and not is_cut(c)]


def all_members(calls: list[Collective], world_size: int) -> set[frozenset[int]]:
    return {members_of_new(call, world_size) for call in calls}


_CLAIM = re.compile(r"[^:]*: rank (?P<number>-?\d+) of (?P<size>-?\d+), by (?P<place>.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A rank's claim to be number ``number`` of ``size`` at the store ``place``.

    ``is_inside`` while that group has not formed and its rank has tried no other since.
    """

    number: int
    size: int
    place: str
    site: str
    is_inside: bool


def numbers_differ(evidence: Evidence) -> Finding | None:
    """Find that the ranks which meet in one store do not have the numbers 0 to size - 1, each once, so that their group
    never forms.

    torch takes RANK and WORLD_SIZE, or the arguments of ``init_process_group``, without a check. Ranks with the same
    number overwrite each other's addresses; with number 0, each tries to serve the store.
    """
    for claims in _meetings(evidence).values():
        if not any(c.is_inside for c in claims.values()):
            continue  # the group was created
        finding = _of_sizes(evidence, claims) or _of_numbers(evidence, claims) or _of_too_few(evidence, claims)
        if finding is not None:
            return finding
    return None


def _meetings(evidence: Evidence) -> dict[tuple[str, int], dict[int, Claim]]:
    """Return the ranks' claims by store and by the number of meetings there before."""
    found: dict[tuple[str, int], dict[int, Claim]] = {}
    for rank in evidence.ranks:
        counts: dict[str, int] = {}
        for claim in _claims(rank):
            counts[claim.place] = counts.get(claim.place, 0) + 1
            found.setdefault((claim.place, counts[claim.place]), {})[rank.rank] = claim
    return found


def _claims(rank: RankEvidence) -> list[Claim]:
    calls = [c for c in rank.collectives if c.op == NEW_GROUP]
    found = [(c, text) for c in calls if (text := _CLAIM.fullmatch(c.note)) is not None]
    return [
        Claim(
            number=int(text["number"]), size=int(text["size"]), place=text["place"], site=call.site,
            is_inside=call.is_inside and call is found[-1][0],
        )
        for call, text in found
    ]  # fmt: skip


def _of_sizes(evidence: Evidence, claims: Mapping[int, Claim]) -> Finding | None:
    """Find ranks that expect another world size than the others: the minority, or those that do not expect all ranks."""
    by_size: dict[int, list[int]] = {}
    for rank, claim in claims.items():
        by_size.setdefault(claim.size, []).append(rank)
    if len(by_size) < 2:
        return None
    most = max(map(len, by_size.values()))
    usual = [size for size, ranks in by_size.items() if len(ranks) == most]
    right = usual[0] if len(usual) == 1 else evidence.job.world_size
    culprits = tuple(sorted(r for size, ranks in by_size.items() if size != right for r in ranks))
    shown = "; ".join(
        f"{describe_ranks(tuple(sorted(ranks)), evidence.job.world_size)} {_expect(ranks)} {size} ranks"
        for size, ranks in sorted(by_size.items())
    )
    return _misnumbered(evidence, claims, culprits, f"the ranks do not agree on the size of their group: {shown}")


def _expect(ranks: list[int]) -> str:
    return "expects" if len(ranks) == 1 else "expect"


def _of_numbers(evidence: Evidence, claims: Mapping[int, Claim]) -> Finding | None:
    """Find ranks with the same number: those among them with another actual rank, where one of them has it."""
    by_number: dict[int, list[int]] = {}
    for rank, claim in claims.items():
        by_number.setdefault(claim.number, []).append(rank)
    twice = {number: sorted(ranks) for number, ranks in by_number.items() if len(ranks) > 1}
    if not twice:
        return None
    culprits = tuple(sorted(r for n, ranks in twice.items() for r in (set(ranks) - {n} if n in ranks else ranks)))
    shown = "; ".join(
        f"{describe_ranks(tuple(ranks), evidence.job.world_size)} claim to be rank {n} of {claims[ranks[0]].size}"
        for n, ranks in sorted(twice.items())
    )
    return _misnumbered(evidence, claims, culprits, f"{shown} where their group is made")


def _of_too_few(evidence: Evidence, claims: Mapping[int, Claim]) -> Finding | None:
    """Find that a group expects more ranks than exist."""
    size, there = next(iter(claims.values())).size, evidence.job.world_size
    if size <= there or len(claims) < there:
        return None
    ranks = tuple(sorted(claims))
    return _misnumbered(evidence, claims, ranks, f"the group expects {size} ranks, but there are {there}")


def _misnumbered(evidence: Evidence, claims: Mapping[int, Claim], culprits: tuple[int, ...], reason: str) -> Finding:
    return Finding(
        cause="init_timeout",
        ranks=culprits,
        where=claims[culprits[0]].site,
        reason=reason,
        certain=True,
        confidence=0.95,
        facts=all_facts(evidence.ranks),
    )
