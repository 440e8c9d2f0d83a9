"""Which ranks a group is made of, as each rank names them where it makes the group."""

from __future__ import annotations

import functools
import re

from pytest_nsa.evidence.board import NEW_GROUP, Collective
from pytest_nsa.evidence.collectives import ranks_of
from pytest_nsa.evidence.values import Evidence, RankEvidence

ITSELF = re.compile(r"(?<=: )rank -?\d+ of -?\d+(, by )?")


def members_of_new(call: Collective, world_size: int) -> frozenset[int]:
    """Return the ranks that a new group's note names ('2: 0-3,8'); all of them where it names none."""
    return _named_in(call.note.partition(": ")[2], world_size)


@functools.lru_cache(maxsize=256)
def _named_in(text: str, world_size: int) -> frozenset[int]:
    return frozenset(ranks_of(text, world_size) or range(world_size))  # a frozenset's hash is worked out once


def is_numbered(call: Collective) -> bool:
    """Return whether torch numbers a group, which all ranks make then, in one order; one that its members alone make has a hash for
    a name.
    """
    return call.note.partition(":")[0].isdigit()


def is_cut(call: Collective) -> bool:
    """Return whether a group has more ranks than its record holds: who they are is not known."""
    return call.note.endswith("…")


def made_by(rank: RankEvidence) -> list[Collective]:
    """Return the makings of numbered groups that a rank has entered, in their order."""
    return [c for c in rank.collectives if c.op == NEW_GROUP and is_numbered(c) and not is_cut(c)]


def all_members(calls: list[Collective], world_size: int) -> set[frozenset[int]]:
    return {members_of_new(call, world_size) for call in calls}


def of_other_members(evidence: Evidence) -> set[str]:
    """Return the names that stand for other members on some ranks than on the others: who is in such a call has not met there."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for rank in evidence.ranks:
        for name, members in rank.groups.items():
            found.setdefault(name, set()).add(members)
        for call in made_by(rank):
            name, _, ranks = call.note.partition(": ")
            if ranks and not ITSELF.search(call.note):
                found.setdefault(name, set()).add(tuple(sorted(_named_in(ranks, evidence.job.world_size))))
    return {name for name, kinds in found.items() if len(kinds) > 1}
