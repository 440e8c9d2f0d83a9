"""Groups that never form: created by some ranks alone, in another order, with other members, or by ranks that disagree
on their numbers or on the world size.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pytest_nsa.diagnosis.facts import STOPS, all_facts, awaited, doing, find_awaited
from pytest_nsa.diagnosis.rules.exits import have_own_errors
from pytest_nsa.diagnosis.verdict import Finding, by_ranks, describe_ranks, stated
from pytest_nsa.evidence.board import CUT, NEW_GROUP, Collective, get_world
from pytest_nsa.evidence.collectives import parse_ranks
from pytest_nsa.evidence.values import Evidence, RankEvidence

Difference = tuple[str, tuple[int, ...], str, str]  # cause, ranks at fault, line, reason


def groups_differ(evidence: Evidence) -> Finding | None:
    """Find that ranks create a group that other members do not create, where every rank waits.

    torch numbers groups in the order in which a rank creates them, and members meet under that number. A group that
    only some ranks create shifts the numbers of all later groups on these ranks.
    """
    if evidence.stop not in (*STOPS, "failed") or not evidence.was_stalled:
        return None
    if have_own_errors(evidence.ranks):
        return None
    alive = [r for r in evidence.ranks if not r.finished and not r.exceptions]
    waits = find_awaited(alive)
    making = {r: c for r, c in waits.items() if c.op == NEW_GROUP and c.note} or _made_unlike(evidence, waits)
    if not making or any(not r.is_waiting for r in alive):
        return None
    if any(c.note.endswith(CUT) for c in making.values()):
        return None  # its members are unknown
    elsewhere = {rank: c for rank, c in making.items() if get_world(c.group)}
    if elsewhere:
        return _group_of_another_world(evidence, elsewhere)
    n = evidence.job.world_size
    if all(len(members_of_new(c, n)) == n for c in making.values()) and any(r.rank not in making for r in alive):
        return None  # for a group of all ranks: no rank refuses it by waiting in another collective
    differing = _first_difference(evidence, making)
    if differing is not None:
        return _finding(evidence, *differing)
    call = next(iter(making.values()))
    outside = tuple(sorted(members_of_new(call, n) - set(making)))
    if outside:
        does = {m: f"{doing(evidence.ranks[m])}, without group {call.note}" for m in outside}
        reason = f"{by_ranks(does, n)}; the others wait for its creation at {call.site}"
        return _finding(evidence, "init_timeout", outside, call.site, reason)
    ranks = _minority(making)
    shown = by_ranks({r: f"in the creation of group {c.note} at {c.site}" for r, c in making.items()}, n)
    is_one = len({members_of_new(c, n) for c in making.values()}) == 1
    reason = "the ranks do not meet to create their group"
    if not is_one:
        reason = "the ranks create groups in different orders, or with different members"
    cause = "init_timeout" if is_one else "group_order_deadlock"
    return _finding(
        evidence, cause, ranks, making[ranks[0]].site, f"{reason}: {shown}", certain=not is_one or len(ranks) < len(making),
    )  # fmt: skip


def _made_unlike(evidence: Evidence, waits: Mapping[int, Collective]) -> dict[int, Collective]:
    """Return the creations of the numbered groups that ranks wait in, where ranks named other members under one number.

    Such groups share their keys in the store: their members cannot meet, and the first call in the group waits.
    """
    n = evidence.job.world_size
    made = {r.rank: {get_number(c): c for c in list_created_groups(r)} for r in evidence.ranks if r.board is not None}
    found: dict[int, Collective] = {}
    for group in {c.group for c in waits.values()}:
        created = {rank: groups[group] for rank, groups in made.items() if group in groups}
        if len({members_of_new(c, n) for c in created.values()}) > 1:
            found |= {rank: c for rank, c in created.items() if rank in waits and waits[rank].group == group}
    return found


def _finding(
    evidence: Evidence, cause: str, ranks: tuple[int, ...], where: str, reason: str, *, certain: bool = True
) -> Finding:
    return Finding(
        cause=cause, ranks=ranks, where=where, reason=reason,
        certain=certain and all(awaited(r) is not None for r in evidence.ranks if not r.finished), confidence=0.85,
        advice="let every rank create every group, its members or not, in the same order: torch numbers groups in that order",
        facts=all_facts(evidence.ranks),
    )  # fmt: skip


def _group_of_another_world(evidence: Evidence, making: Mapping[int, Collective]) -> Finding | None:
    """Find that a rank waits in the creation of a group of another world, which not all of its members have entered.

    Which members are missing is unknown: they may be processes that are no ranks of the job.
    """
    came = Counter(c.place for r in evidence.ranks for c in r.collectives if c.op == NEW_GROUP)
    short = {rank: c for rank, c in making.items() if came[c.place] < c.size}
    if not short:
        return None
    call = short[min(short)]
    ranks = tuple(sorted(r for r, c in short.items() if c.place == call.place))
    text = f"waits in the creation of group {call.note}, to which {came[call.place]} of {call.size} have come"
    finding = _finding(
        evidence, "init_timeout", ranks, call.site, stated(ranks, text, evidence.job.world_size), certain=False
    )
    advice = "let every process of the group create it, with the same store, name and size"
    return replace(finding, confidence=0.7, advice=advice)


def _first_difference(evidence: Evidence, making: Mapping[int, Collective]) -> Difference | None:
    """Return the first place in the order of creation at which ranks create different numbered groups, or some create
    none and wait in something else: the cause, the ranks at fault, the line and the reason.

    A group that others create later is in another order. A group that no other rank creates later is made by its makers
    alone; where these are the majority, the others omitted it. None where neither holds.
    """
    if not all(is_numbered(c) for c in making.values()):
        return None
    n, made = evidence.job.world_size, {r.rank: list_created_groups(r) for r in evidence.ranks if r.board is not None}
    for place in range(max(map(len, made.values()), default=0)):
        at = {rank: members_of_new(calls[place], n) for rank, calls in made.items() if place < len(calls)}
        without = [rank for rank in made if rank not in at and rank not in making]
        by_number = Counter(at.values()).most_common()
        if len(by_number) + bool(without) < 2:
            continue
        later = {rank: {members_of_new(c, n) for c in made[rank][place:]} for rank in at}
        usual, most = by_number[0]
        odd = tuple(sorted(rank for rank in at if at[rank] != usual))
        is_swapped = odd and all(any(at[r] in later[o] for o in at if o not in odd) for r in odd)
        # A rank that creates only its own groups skipped some; a rank that creates another's has another order.
        if is_swapped and len(odd) < most and all(usual in later[r] or r not in at[r] for r in odd):
            reason = (
                f"{describe_ranks(odd, n)} created groups in another order, and so under other numbers; "
                f"the group of {describe_ranks(tuple(sorted(at[odd[0]])), n)} where the others created that of "
                f"{describe_ranks(tuple(sorted(usual)), n)}"
            )
            return "group_order_deadlock", odd, made[odd[0]][place].site, reason
        is_split = all(later[r].isdisjoint(set(at.values()) - {at[r]}) for r in at)
        if is_split and 2 * most <= len(at) == n:
            reason = "one group has different members: "
            reason += by_ranks({r: f"created group {made[r][place].note}" for r in at}, n)
            return "group_order_deadlock", tuple(sorted(at)), made[0][place].site, reason
        for members, number in reversed(by_number):
            makers = tuple(sorted(rank for rank in at if at[rank] == members))
            if sum(members in groups for groups in later.values()) == number:
                return _made_alone(evidence, makers, made[makers[0]][place], making)
        return None
    return None


def _made_alone(
    evidence: Evidence, makers: tuple[int, ...], call: Collective, making: Mapping[int, Collective]
) -> Difference:
    """Return the difference that ``makers`` created a group which no other rank creates."""
    n, absent = evidence.job.world_size, tuple(r.rank for r in evidence.ranks if r.rank not in makers)
    at = f"group {call.note} at {call.site}"
    if len(makers) > len(absent):
        every = "every rank has to, its members or not, and later groups have other numbers"
        return "init_timeout", absent, call.site, f"{describe_ranks(absent, n)} did not create {at}: {every}"
    others = by_ranks({r: f"in the creation of group {c.note}" for r, c in making.items() if r not in makers}, n)
    reason = f"{describe_ranks(makers, n)} alone created {at}, so that later groups have other numbers there"
    return "init_timeout", makers, call.site, reason + (f": {others}" if others else "")


def _minority(making: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks that create the rarest group; all of them where none is rarer. A rank's own number in the note
    is ignored.
    """
    notes = {r: ITSELF.sub("", c.note) for r, c in making.items()}
    numbers = Counter(notes.values())
    fewest, most = min(numbers.values()), max(numbers.values())
    return tuple(sorted(r for r, note in notes.items() if fewest == most or numbers[note] == fewest))


ITSELF = re.compile(r"(?<=: )rank -?\d+ of -?\d+(, by )?")


def members_of_new(call: Collective, world_size: int) -> frozenset[int]:
    """Return the ranks that a new group's note names ('2: 0-3,8'); all ranks where it names none."""
    return _parse_members(call.note.partition(": ")[2], world_size)


@functools.lru_cache(maxsize=256)
def _parse_members(text: str, world_size: int) -> frozenset[int]:
    return frozenset(parse_ranks(text, world_size) or range(world_size))  # a frozenset caches its hash


def is_numbered(call: Collective) -> bool:
    """Return whether torch numbers a group, so that all ranks create it in one order. The name of a group that only its
    members create is a hash.
    """
    return get_number(call).isdigit()


def get_number(call: Collective) -> str:
    """Return the number or name under which a group is created."""
    return call.note.partition(":")[0]


def list_created_groups(rank: RankEvidence) -> list[Collective]:
    """Return the creations of numbered groups that a rank entered, in their order."""
    return [c for c in rank.collectives if c.op == NEW_GROUP and is_numbered(c) and not c.note.endswith(CUT)]


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
        finding = _of_sizes(evidence, claims) or _of_numbers(evidence, claims)
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
    """Find ranks that expect another world size than the others (the minority, or those that do not expect all ranks), or
    more ranks than exist.
    """
    by_size: dict[int, list[int]] = {}
    for rank, claim in sorted(claims.items()):
        by_size.setdefault(claim.size, []).append(rank)
    n = evidence.job.world_size
    if len(by_size) == 1 and (min(by_size) <= n or len(claims) < n):
        return None
    most = max(map(len, by_size.values()))
    usual = [size for size, ranks in by_size.items() if len(ranks) == most]
    right = usual[0] if len(usual) == 1 < len(by_size) else n
    culprits = tuple(sorted(r for size, ranks in by_size.items() if size != right for r in ranks))
    shown = "; ".join(stated(tuple(ranks), f"expects {size} ranks", n) for size, ranks in sorted(by_size.items()))
    reason = f"the ranks do not agree on the size of their group: {shown}"
    if len(by_size) == 1:
        reason = f"the group expects {usual[0]} ranks, but there are {n}"
    return _misnumbered(evidence, claims, culprits, reason)


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
        stated(tuple(ranks), f"claims to be rank {n} of {claims[ranks[0]].size}", evidence.job.world_size)
        for n, ranks in sorted(twice.items())
    )
    return _misnumbered(evidence, claims, culprits, f"{shown} where their group is made")


def _misnumbered(evidence: Evidence, claims: Mapping[int, Claim], culprits: tuple[int, ...], reason: str) -> Finding:
    return Finding(
        cause="init_timeout", ranks=culprits, where=claims[culprits[0]].site, reason=reason, certain=True, confidence=0.95,
        facts=all_facts(evidence.ranks),
    )  # fmt: skip
