"""Keys of a store that ranks wait for: which rank sets such keys, by those that each rank set and awaited, with the terms
of an explanation.

Keys that differ only in numbers are of one kind. A number in them is the rank's, where each rank has its own number there;
the other numbers count rounds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pytest_nsa.diagnosis.explain.locations import user_frames
from pytest_nsa.diagnosis.explain.message_terms import TermOfAWait
from pytest_nsa.diagnosis.explain.messages import END, KEY, ended
from pytest_nsa.diagnosis.facts import last_seen
from pytest_nsa.evidence.board import CUT, Collective
from pytest_nsa.evidence.values import Evidence, KeyUse, RankEvidence

Numbers = tuple[str, ...]


def get_key(rank: RankEvidence) -> str:
    """Return the keys that a rank waits for in a store, separated by ', '; '' where they are unknown."""
    is_main = rank.stack is not None and rank.stack.is_main  # the keys of another thread are not kept
    return rank.board.key if rank.board is not None and is_main else ""


def get_call(rank: RankEvidence) -> Collective:
    """Return the call that represents a rank's wait for keys, with the lines of its stack."""
    lines = [frame.describe() for frame in reversed(user_frames(rank))] or [last_seen(rank)]
    return replace(ended(rank), op=KEY, site=lines[0], callers=" < ".join(lines[1:]), note=get_key(rank))


def list_names(key: str) -> list[str]:
    """Return the names of the keys in a text that a rank recorded."""
    return [name for name in key.split(", ") if name and name != CUT]


def get_kind(name: str) -> str:
    """Return a key with each number replaced."""
    return re.sub(r"\d+", "#", name)


def list_numbers(name: str) -> Numbers:
    return tuple(re.findall(r"\d+", name))


class Keys:
    """The keys of a store that all ranks set and awaited. ``entered`` has what each rank waits in, or its end."""

    def __init__(self, evidence: Evidence, entered: Mapping[int, Collective]) -> None:
        self.evidence, self.entered = evidence, entered
        self._places: dict[str, dict[int, dict[str, int]]] = {}  # by kind: thousands of ranks have one
        self.waiting = {rank: list_names(c.note) for rank, c in sorted(entered.items()) if c.op == KEY}
        self.sets: dict[str, dict[int, list[tuple[str, KeyUse]]]] = defaultdict(lambda: defaultdict(list))
        for rank in evidence.ranks:
            for use in rank.keys_set:
                for name in list_names(use.key):
                    self.sets[get_kind(name)][rank.rank].append((name, use))

    @cached_property
    def known(self) -> set[str]:
        """The keys that are known to be set: of each line the first and the last one."""
        return {name for by_rank in self.sets.values() for uses in by_rank.values() for name, _ in uses}

    def wanted(self, rank: int) -> tuple[str, ...]:
        """Return the keys that a rank waits for and no rank set; all of them if ranks set each, as they count in it."""
        names = self.waiting[rank]
        return tuple(name for name in names if name not in self.known) or tuple(names)

    def places(self, kind: str) -> dict[int, dict[str, int]]:
        """Return the positions in a key at which each rank that set such keys has one number, with the rank of each number.

        If that is the rank's own number at a position, ranks that set no such key are included.
        """
        if kind not in self._places:
            self._places[kind] = self._found_places(kind)
        return self._places[kind]

    def _found_places(self, kind: str) -> dict[int, dict[str, int]]:
        by_rank = {rank: {list_numbers(name) for name, _ in uses} for rank, uses in self.sets.get(kind, {}).items()}
        found: dict[int, dict[str, int]] = {}
        for place in range(kind.count("#")):
            own = {rank: {numbers[place] for numbers in of} for rank, of in by_rank.items()}
            if any(len(numbers) != 1 for numbers in own.values()):
                continue
            owners = {next(iter(numbers)): rank for rank, numbers in own.items()}
            is_repeated = len(own) > 1 or any(len(keys) > 1 for keys in by_rank.values())  # else it may be the round's
            if is_repeated and all(number == str(rank) for number, rank in owners.items()):
                found[place] = {str(r.rank): r.rank for r in self.evidence.ranks}
            elif len(owners) == len(own) > 1:
                found[place] = owners
        return found

    def owners(self, names: Sequence[str]) -> set[int]:
        """Return the ranks that set keys like these, by the numbers in the names; of several places that distinguish the
        ranks, those in which the names differ count.
        """
        found: set[int] = set()
        for name in names:
            places, numbers = self.places(get_kind(name)), list_numbers(name)
            varying = [
                p for p in places if len({list_numbers(n)[p] for n in names if get_kind(n) == get_kind(name)}) > 1
            ]
            for place in varying or places:
                owner = places[place].get(numbers[place])
                if owner is not None:
                    found.add(owner)
        return found

    def find_round(self, name: str) -> tuple[int, ...]:
        """Return the numbers of a key that identify no rank: they count rounds."""
        places = self.places(get_kind(name))
        return tuple(int(n[-18:]) for place, n in enumerate(list_numbers(name)) if place not in places)

    def latest(self, kind: str, rank: int) -> tuple[str, KeyUse] | None:
        """Return the last key of a kind that a rank set; None where it set none."""
        return max(self.sets.get(kind, {}).get(rank, ()), key=lambda use: self.find_round(use[0]), default=None)


@dataclass(frozen=True)
class Wanted:
    """The ranks ``waiters`` wait for the keys ``names``. By the numbers in these, ``owners`` set them; ``setter`` is the one rank
    that would set them, None if unknown.
    """

    keys: Keys
    waiters: tuple[int, ...]
    names: tuple[str, ...]
    owners: set[int]
    setter: int | None

    @property
    def peer(self) -> int:
        return self.waiters[0] if self.setter is None else self.setter

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def kind(self) -> str:
        return get_kind(self.name)

    @property
    def setters(self) -> Collection[int]:
        """The ranks that set such keys."""
        return self.keys.sets.get(self.kind, {})

    @property
    def is_later(self) -> bool:
        """Whether the last such key that the peer set is of a later round than the awaited key."""
        latest, wanted = self.keys.latest(self.kind, self.peer), self.keys.find_round(self.name)
        mine = self.keys.find_round(latest[0]) if latest is not None else ()
        return len(mine) == len(wanted) and mine > wanted


Term = TermOfAWait[Wanted]


def _state(kind: Callable[[Collective], bool]) -> Callable[[Wanted], float]:
    return lambda w: w.peer in w.keys.entered and kind(w.keys.entered[w.peer])


TERMS: tuple[Term, ...] = (
    Term("alone", "waits where every other rank has ended its test", True,
         lambda w: all(c.op == END for r, c in w.keys.entered.items() if r not in w.waiters)),
    Term("owner", "sets the keys with this number", False, lambda w: (w.peer in w.owners) / max(1, len(w.owners))),
    Term("sets such", "set such keys before", False, lambda w: w.peer in w.setters),
    Term("alone does not", "set no such key, and every other rank did", False,
         lambda w: w.peer not in w.setters and len(w.setters) == len(w.keys.evidence.ranks) - 1),
    Term("later set", "set such a key of a later round", False, lambda w: w.is_later),
    Term("waits too", "waits for a key, too", False, _state(lambda c: c.op == KEY)),
    Term("ended", "", False, _state(lambda c: c.op == END)),
)  # fmt: skip


def key_values(wanted: Wanted) -> dict[str, float]:
    """Return the terms of an awaited key that hold, by name."""
    found = {
        f"{'asker' if t.is_of_waiter else 'setter'}: {t.name}": float(t.value(wanted))
        for t in TERMS
        if t.is_of_waiter or wanted.setter is not None
    }
    return {name: value for name, value in (found | {"always": 1.0}).items() if value}
