"""One rank in one call compared with another rank in another call: positions, rhythms, conditions, payloads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from pytest_nsa.diagnosis.explain.conditions import Path, find_path
from pytest_nsa.diagnosis.explain.messages import END
from pytest_nsa.diagnosis.explain.program import (
    Compared,
    Order,
    Position,
    compare,
    compare_inner,
    find_position,
    is_inside_loop,
)
from pytest_nsa.diagnosis.explain.rhythm import Token, counts_of_rounds, is_same_line, surprise, token
from pytest_nsa.diagnosis.facts import list_earlier_calls
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.source import file_name
from pytest_nsa.evidence.values import Evidence, RankEvidence


@dataclass(frozen=True)
class Contrast:
    """A rank in ``call``, compared with rank ``other`` in ``other_call`` of the same or another group."""

    evidence: Evidence
    number: int
    call: Collective
    other_number: int
    other_call: Collective

    @cached_property
    def turned(self) -> Contrast:
        """The same comparison with the two ranks swapped."""
        other = Contrast(self.evidence, self.other_number, self.other_call, self.number, self.call)
        other.__dict__["turned"] = self  # facts about one rank are computed once
        return other

    @property
    def rank(self) -> RankEvidence:
        return self.evidence.ranks[self.number]

    @cached_property
    def before(self) -> list[Collective]:
        """The rank's earlier calls, in all groups."""
        return list_earlier_calls(self.evidence, self.number, self.call)

    @cached_property
    def history(self) -> list[Token]:
        return [token(c) for c in self.before]

    @cached_property
    def position(self) -> Position:
        return find_position(self.rank, self.call)

    @cached_property
    def latest(self) -> Collective | None:
        """The latest earlier call that both ranks made from the same lines, or that one made through a wrapper."""
        theirs = {c.place: c for c in self.turned.before if c.peer == -1}
        mine = (c for c in reversed(self.before) if c.peer == -1)
        return next((c for c in mine if c.place in theirs and _is_same_path(c.way, theirs[c.place].way)), None)

    @cached_property
    def counts(self) -> list[int]:
        """The number of calls like its own that the rank made since its latest call like the other's, then the number
        in each earlier round.
        """
        return counts_of_rounds(self.before, self.other_call, self.call)

    @property
    def goes_on(self) -> bool:
        """Whether the rank has made some of the calls of this round, and has some left: all its earlier rounds had one number of
        them, which is larger. With none made, the call in progress begins the round.
        """
        now, *earlier = self.counts
        return len(set(earlier)) == 1 and 0 < now < earlier[0]

    @cached_property
    def rounds(self) -> int:
        """How many whole rounds the rank has made since `latest`, by its calls at its present line: each earlier round had one
        number of them.
        """
        if self.latest is None:
            return 0
        at = self.before.index(self.latest) + 1
        _, *usual = counts_of_rounds(self.before[:at], self.latest, self.call)
        made = sum(is_same_line(c, self.call) for c in self.before[at:])
        return made // usual[0] if len(set(usual)) == 1 else 0

    @cached_property
    def compared(self) -> Compared:
        """The position of the rank in the program relative to the other rank."""
        if "compared" in self.turned.__dict__:
            seen = self.turned.compared
            return replace(seen, order=seen.order.turned, parted=seen.parted[::-1], within=seen.within[::-1])
        found = compare(
            self.evidence.sources, self.position, self.turned.position, self.latest, (self.goes_on, self.turned.goes_on),
            self._steps(), (self.rounds, self.turned.rounds),
        )  # fmt: skip
        if found.order not in (Order.SAME, Order.EXCLUSIVE) or not found.is_counted:
            return found
        sides = (self.position, self.rank), (self.turned.position, self.turned.rank)
        return compare_inner(self.evidence.sources, found, *sides)

    def _steps(self) -> tuple[int, int]:
        """Return how many data loaders of the two ranks ran out of data, where the rank with more of them received fewer batches;
        else their training steps.
        """
        boards = [rank.board for rank in (self.rank, self.turned.rank) if rank.board is not None]
        if len(boards) == 2:
            ended, batches = ([int(b.numbers.get(n, 0)) for b in boards] for n in ("loaders_ended", "batches"))
            if (ended[0] - ended[1]) * (batches[0] - batches[1]) < 0:
                return ended[0], ended[1]
        return self.call.step, self.other_call.step

    @property
    def order(self) -> Order:
        return self.compared.order

    @property
    def parted(self) -> tuple[str, str]:
        """The lines at which the two stacks diverge; the lines of the calls where that is unknown."""
        frames = self.compared.parted
        return (frames[0].place, frames[1].place) if frames else (self.call.site, self.other_call.site)

    @cached_property
    def has_left(self) -> bool:
        """Whether the rank is ahead of a loop that the other is in, in the function in which they diverge or one called
        there.
        """
        if self.order is not Order.AFTER:
            return False
        if self.compared.left or not self.compared.parted:
            return self.compared.left
        return is_inside_loop(self.evidence.sources, self.turned.position, self.compared.parted[1])

    @cached_property
    def path(self) -> Path:
        """What leads the rank to its call from the function in which the two diverge."""
        at = next((i for i, frame in enumerate(self.position) if frame in self.compared.parted), 0)
        return find_path(self.evidence.sources, self.position[at:])

    def costs(self, *calls: Collective) -> float:
        """Return the surprise, in bits, of the last of ``calls`` if the rank makes them next."""
        *first, last = map(token, calls)
        return surprise([*self.history, *first], last)

    @property
    def has_made(self) -> bool:
        """Whether the rank made its call before."""
        return token(self.call) in self.history

    @property
    def has_made_other(self) -> bool:
        """Whether the rank made the other's call before."""
        return token(self.other_call) in self.history

    @property
    def is_known(self) -> bool:
        """Whether one of the two ranks made this rank's call before."""
        return self.has_made or self.turned.has_made_other

    @property
    def is_in_another_group(self) -> bool:
        """Whether the two calls are in different groups. The end of a test belongs to no group."""
        one, other = self.call, self.other_call
        return one.process_group != other.process_group and END not in (one.op, other.op)


def _is_same_path(way: tuple[str, ...], other: tuple[str, ...]) -> bool:
    depth = min(len(way), len(other))  # only the name of a caller's file is known
    return [*map(file_name, way[-depth:])] == [*map(file_name, other[-depth:])]
