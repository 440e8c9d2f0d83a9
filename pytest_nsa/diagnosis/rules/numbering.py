"""How ranks call themselves where they make a default group: a number twice, or sizes of the world that are not the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_nsa.diagnosis.facts import all_facts
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.board import NEW_GROUP
from pytest_nsa.evidence.values import Evidence, RankEvidence

_CLAIM = re.compile(r"[^:]*: rank (?P<number>-?\d+) of (?P<size>-?\d+), by (?P<place>.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """That a rank calls itself ``number`` of ``size`` at ``place``, a store's.

    ``is_inside`` while that group is not made, and its rank has tried no other since.
    """

    number: int
    size: int
    place: str
    site: str
    is_inside: bool


def numbered_apart(evidence: Evidence) -> Finding | None:
    """Find that ranks which meet in one store do not have numbers 0 to size - 1, each once: then their group never forms.

    torch takes RANK and WORLD_SIZE, or arguments of ``init_process_group``, as they are. Ranks that call themselves by one number
    overwrite each other's addresses; where it is 0, each of them wants to serve the store.
    """
    for claims in _meetings(evidence).values():
        if not any(c.is_inside for c in claims.values()):
            continue  # the group was made
        finding = _of_sizes(evidence, claims) or _of_numbers(evidence, claims) or _of_too_few(evidence, claims)
        if finding is not None:
            return finding
    return None


def _meetings(evidence: Evidence) -> dict[tuple[str, int], dict[int, Claim]]:
    """Return what ranks call themselves, by the store in which they meet, and how often they have met there."""
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
    """Find ranks that expect another number of ranks than the others: the fewer ones, or those that do not expect all there are."""
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
    return _finding(evidence, claims, culprits, f"the ranks do not agree on the size of their group: {shown}")


def _expect(ranks: list[int]) -> str:
    return "expects" if len(ranks) == 1 else "expect"


def _of_numbers(evidence: Evidence, claims: Mapping[int, Claim]) -> Finding | None:
    """Find ranks of the same number: those of them that are not the rank of this number, where one of them is."""
    by_number: dict[int, list[int]] = {}
    for rank, claim in claims.items():
        by_number.setdefault(claim.number, []).append(rank)
    twice = {number: sorted(ranks) for number, ranks in by_number.items() if len(ranks) > 1}
    if not twice:
        return None
    culprits = tuple(sorted(r for n, ranks in twice.items() for r in (set(ranks) - {n} if n in ranks else ranks)))
    shown = "; ".join(
        f"{describe_ranks(tuple(ranks), evidence.job.world_size)} call themselves rank {n} of {claims[ranks[0]].size}"
        for n, ranks in sorted(twice.items())
    )
    return _finding(evidence, claims, culprits, f"{shown} where their group is made")


def _of_too_few(evidence: Evidence, claims: Mapping[int, Claim]) -> Finding | None:
    """Find that a group is to have more ranks than there are."""
    size, there = next(iter(claims.values())).size, evidence.job.world_size
    if size <= there or len(claims) < there:
        return None
    ranks = tuple(sorted(claims))
    return _finding(evidence, claims, ranks, f"the group is to have {size} ranks, and there are {there}")


def _finding(evidence: Evidence, claims: Mapping[int, Claim], culprits: tuple[int, ...], reason: str) -> Finding:
    return Finding(
        cause="init_timeout",
        ranks=culprits,
        where=claims[culprits[0]].site,
        reason=reason,
        certain=True,
        confidence=0.95,
        facts=all_facts(evidence.ranks),
    )
