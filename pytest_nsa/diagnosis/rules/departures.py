"""Why a rank entered a call in place of the others': skipped theirs, made an extra one, or called another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pytest_nsa.diagnosis.rules.conditions import (
    are_alternatives,
    follows_in_its_block,
    has_a_counterpart,
    is_for_one_rank,
    may_be_left_out,
)
from pytest_nsa.diagnosis.rules.locations import Parting, line_in, parts_of
from pytest_nsa.diagnosis.rules.source import (
    are_of_one_function,
    calls_each_of_some,
    end_of_with,
    have_a_common_loop,
    is_a_join,
    is_here,
    is_in_order_of_values,
    is_past_the_loop,
    loops_of,
)
from pytest_nsa.diagnosis.rules.visits import (
    counts_of_rounds,
    ends_a_visit,
    is_same_line,
    leaves_out_one,
    rounds_between,
)
from pytest_nsa.evidence.board import Collective

LEFT_THE_LOOP = "it has left the loop that the others are in"
ENDS_A_JOIN = "at the end of a `Join` that the others are in, which answers DDP's own calls alone"
LEFT_BEHIND = "in a step that the others have left without it"
ANOTHER_ROUND = "makes another round of the loop that the others have left"


def expected_next(shapes: Sequence[tuple[object, ...]]) -> tuple[object, ...] | None:
    """Return the shape that should come next: what followed the longest earlier run that equals the latest one."""
    best: tuple[int, tuple[object, ...]] | None = None
    for end in range(len(shapes) - 1, 0, -1):
        length = 0
        while length < end and shapes[end - 1 - length] == shapes[-1 - length]:
            length += 1
        if length and (best is None or length > best[0]):
            best = (length, shapes[end])
    return best[1] if best is not None else None


def is_new_call(before: list[Collective], collective: Collective) -> bool:
    """Return whether a line has entered nothing like this before, or was not reached by these callers. Of bytes that have had
    several sizes there, as objects do, the size tells nothing.
    """
    alike = [
        c for c in before if c.way == collective.way and replace(c, count=collective.count).shape == collective.shape
    ]
    sizes = {c.count for c in alike}
    return collective.count not in sizes and not (collective.dtype == "uint8" and len(sizes) > 1)


@dataclass(frozen=True)
class Departure:
    """A rank's call ``mine`` in place of the others' call ``other``, and what the rank called ``before`` in this group.

    ``calls`` are those of all groups, sends and receives too, up to the latest that the others have made as well; ``parted``: their
    locations in the function in which they diverge; ``lead``: whether the rank is in a later round than the others of the loops
    that both are in (`counters.lead`); ``in_one_round``: they are in the same ones, but for the innermost.
    """

    before: list[Collective]
    calls: list[Collective]
    mine: Collective
    other: Collective
    parted: Parting
    lead: int | None = None
    in_one_round: bool = False

    @property
    def is_in_a_later_round(self) -> bool:
        return self.lead == 1

    @property
    def is_in_an_earlier_round(self) -> bool:
        return self.lead == -1

    @property
    def is_in_the_same_round(self) -> bool:
        """Whether all loops that both are in are in one round, where the source of both lines is kept."""
        sources = self.parted.sources
        return self.lead == 0 and is_here(sources, self.parted.here) and is_here(sources, self.parted.there)

    @property
    def is_further_down(self) -> bool:
        """Whether ``mine`` is on a later line of the function in which the ranks part."""
        return self.parted.turned.comes_first

    @cached_property
    def is_new(self) -> bool:
        """Whether this line has entered nothing like ``mine`` before."""
        return is_new_call(self.before, self.mine)

    @cached_property
    def has_pattern(self) -> bool:
        """Whether earlier calls repeat, so that a next one is expected."""
        return expected_next([c.shape for c in self.before]) is not None

    @cached_property
    def mine_follows(self) -> bool:
        """Whether ``mine`` is what the pattern expects after ``other``: that one was left out."""
        return (
            self.has_pattern and expected_next([*(c.shape for c in self.before), self.other.shape]) == self.mine.shape
        )

    @cached_property
    def usual_ways(self) -> set[tuple[str, ...]]:
        """Where calls like ``mine`` were made before."""
        return {c.way for c in self.before if c.shape == self.mine.shape}

    @property
    def is_unknown(self) -> bool:
        """Whether there is a pattern, and ``mine`` is not in it."""
        return self.has_pattern and not self.usual_ways

    @property
    def left_as_usual(self) -> bool:
        """Whether ``mine`` has left a loop that each step goes through, after as many of its calls as in the step before."""
        if not self.before or not have_a_common_loop(self.parted.sources, self.parted.here, self.parted.there):
            return False
        latest = self.before[-1].step
        if self.other.step > latest and self.parted.has_left and self.parted.other_below:
            return False  # the loop that was left has the steps in it, and another loop in each
        by_step = [
            sum(is_same_line(c, self.other) and c.step == step for c in self.before) for step in (latest - 1, latest)
        ]
        return by_step[0] == by_step[1] > 1

    @property
    def comes_between(self) -> bool:
        """Whether a loop leads on to the others' call, which the pattern expects next, and no line has entered ``mine`` before."""
        expects_other = expected_next([c.shape for c in self.before]) == self.other.shape
        return self.is_new and expects_other and self.parted.in_loop

    @property
    def is_on_the_way(self) -> bool:
        """Whether the loop that both ranks are in leads from the latest call past ``mine`` to ``other``, yet to come."""
        return self.rounds_ahead is not None

    @property
    def in_another_order(self) -> bool:
        """Whether ``mine`` follows ``other`` by the pattern, here from another line, as the first call of a round."""
        return self.mine_follows and self.mine.way not in self.usual_ways and self.rounds_ahead != 0

    @cached_property
    def rounds_ahead(self) -> int | None:
        return rounds_between(self.parted, self.calls, self.other) if self.calls else None

    @property
    def is_past_as_usual(self) -> bool:
        """Whether a rank in a loop that the others have left went round it as often as last time before it made their call: it
        has come back to it by a loop around both, past their statement alone.
        """
        now, *earlier = counts_of_rounds(self.before, self.other, self.mine)
        as_usual = bool(earlier) and {now} == set(earlier)
        common = have_a_common_loop(self.parted.sources, self.parted.here, self.parted.there)
        return as_usual and common and leaves_out_one(self.calls, self.parted, self.other, self.mine)

    @property
    def has_come_back(self) -> bool:
        """Whether the latest call came after the loop that ``mine`` is in and the others are not; a loop around it leads back."""
        parted = self.parted
        line = line_in(self.calls[-1], parted.here) if self.calls else 0
        file, _, function = parts_of(parted.here)
        latest = f"{file}:{line} in {function}"
        is_past = bool(line) and is_past_the_loop(parted.sources, latest, parted.here)
        return is_past and have_a_common_loop(parted.sources, latest, parted.here)

    @property
    def has_come_round_again(self) -> bool:
        """Whether ``mine`` begins another visit to the statement that the latest call came from, and each loop around that one
        leads past the others' statement, too.
        """
        parted = self.parted
        if not self.is_in_its_statement or not ends_a_visit(self.calls, parted.here, self.mine, below=parted.below):
            return False
        loops, others = (loops_of(parted.sources, place) for place in (parted.here, parted.there))
        return bool(loops) and all(loop in others for loop in loops)

    @property
    def is_in_its_statement(self) -> bool:
        """Whether the latest call came from the statement that ``mine`` comes from, where the others are at another one."""
        here, there = self.parted.here, self.parted.there
        return here != there and bool(self.calls) and line_in(self.calls[-1], here) == parts_of(here)[1]

    @property
    def is_an_unusual_visit(self) -> bool:
        """Whether ``mine`` or what its statement has called just before is new: it is this visit to the statement that differs."""
        if not self.is_in_its_statement or self.has_come_round_again:
            return False
        here = parts_of(self.parted.here)
        first = len(self.calls)
        while first and line_in(self.calls[first - 1], self.parted.here) == here[1]:
            first -= 1
        earlier = self.calls[:first]
        is_known = any(line_in(call, self.parted.here) == here[1] for call in earlier)
        return is_known and any(is_new_call(earlier, call) for call in (*self.calls[first:], self.mine))

    @property
    def is_another_round_below(self) -> bool:
        """Whether the latest call and ``mine`` come from one loop below a statement that the others have left: an attempt more."""
        if not self.is_in_its_statement or not self.parted.below or self.is_new:
            return False
        return not self.parted.other_below or not leaves_out_one(self.calls, self.parted, self.other, self.mine)

    @property
    def both_are_new(self) -> bool:
        """Whether the pattern has neither call."""
        return self.is_unknown and is_new_call(self.before, self.other)

    @property
    def comes_first(self) -> bool:
        """Whether ``mine`` is on an earlier line of the function than ``other``."""
        return self.parted.comes_first

    @property
    def comes_later(self) -> bool:
        """Whether ``mine`` is on a later line, and no loop leads back."""
        return self.is_further_down and not self.parted.goes_round

    @property
    def has_stayed(self) -> bool:
        """Whether ``mine`` comes from the function of the latest call, further down, and the others' call does not."""
        latest = self.calls[-1] if self.calls else None
        callers = self.mine.way[1:]
        if latest is None or not callers or {latest.way[1:], self.other.way[1:]} != {callers}:
            return False
        sources, sites = self.parted.sources, (latest.site, self.mine.site)
        is_one = is_here(sources, sites[0]) and are_of_one_function(sources, *sites)
        is_past = is_one and not are_of_one_function(sources, latest.site, self.other.site)
        return is_past and parts_of(sites[0])[1] < parts_of(sites[1])[1]

    @property
    def are_alternatives(self) -> bool:
        """Whether the two are on one line, in the two branches of one ``if``, or in two functions that one line calls by a name."""
        sources, fork = self.parted.sources, self.parted.fork
        places = ((self.mine.site, self.other.site), (self.parted.here, self.parted.there))
        if is_same_line(self.mine, self.other) or any(are_alternatives(sources, *pair) for pair in places):
            return True
        by_one_name = self.parted.by_one_name
        if fork and is_in_order_of_values(sources, fork):
            return True
        if by_one_name and self.in_one_round and not self.is_new:  # another of the same round's, not the next one's
            return True
        if not (fork and self.is_new and is_here(sources, fork)):
            return False
        is_other_new = is_new_call(self.before, self.other)
        if by_one_name and is_other_new:  # the first visit of both: no round tells more
            return True
        return not (self.before and is_other_new) and not calls_each_of_some(sources, fork)

    @cached_property
    def is_for_its_rank_alone(self) -> bool:
        """Whether ``mine`` is new and under a condition that is true on one rank, without a counterpart, and ``other`` is not: no
        other rank will ever come to it, whatever else this one has done.
        """
        if not self.is_new:
            return False
        mine, others = {self.parted.here, *self.mine.way}, {self.parted.there, *self.other.way}
        is_one = {place: is_for_one_rank(self.parted.sources, place, alone=True) for place in mine - others}
        return any(is_one.values()) and not any(is_for_one_rank(self.parted.sources, p) for p in others)

    @property
    def has_its_own_to_come(self) -> bool:
        """Whether the others' call is for all ranks but this one, whose counterpart comes later in that function: it is in the body
        of the ``with`` that they enter, `main process first`.
        """
        sources, other = self.parted.sources, self.other
        if is_same_line(self.mine, other) or not has_a_counterpart(sources, other.site):
            return False
        mine = (self.parted.here, *self.mine.way)
        return any(self._leads_into(place, mine) for place in other.way)

    def _leads_into(self, place: str, way: Sequence[str]) -> bool:
        """Return whether a way leads through the body of a ``with`` that begins at a line."""
        (_, line, function), end = parts_of(place), end_of_with(self.parted.sources, place)
        return any(line < at < end for _, at, within in map(parts_of, way) if within == function)

    @property
    def is_at_the_end_of_a_join(self) -> bool:
        """Whether ``mine`` is made by a `Join` that the others are in: its rank has no more data, and answers DDP's calls alone."""
        return is_a_join(self.parted.sources, self.mine.site) and self._leads_into(self.mine.site, self.other.way)

    @property
    def has_passed_it_in_its_step(self) -> bool:
        """Whether it has made the others' call in its step, which they have left: it could not come to ``mine`` otherwise."""
        mine, other, parted = self.mine, self.other, self.parted
        if mine.step >= other.step or parted.other_below:
            return False
        if not follows_in_its_block(parted.sources, parted.here, parted.there):
            return False
        return any(is_same_line(c, other) and c.step == mine.step for c in self.before)

    @property
    def is_of_another_round(self) -> bool:
        """Whether the two are calls of one line whose sizes change from round to round, of a loop that may go round without it."""
        mine, other = self.mine, self.other
        if (
            mine.way != other.way
            or mine.count == other.count
            or replace(mine, count=0).shape != replace(other, count=0).shape
        ):
            return False
        sizes = [c.count for c in self.before if c.way == mine.way]
        changes = len(sizes) > 1 and all(a != b for a, b in itertools.pairwise(sizes))
        if len(set(sizes)) < len(sizes) and mine.count not in sizes:
            return False  # sizes recur, and none of them is its own
        return changes and may_be_left_out(self.parted.sources, mine.site)

    @property
    def are_alike(self) -> bool:
        """Whether the two are the same operation in the same phase and function."""
        one, two = ((c.op, c.phase, c.site.rpartition(" in ")[2]) for c in (self.mine, self.other))
        return one == two


# (condition, cause, why): the first that holds. By the source first, then by what the rank did in earlier rounds.
KINDS: tuple[tuple[Callable[[Departure], bool], str, str], ...] = (
    (lambda d: d.is_at_the_end_of_a_join, "skipped_collective", ENDS_A_JOIN),
    (lambda d: d.has_stayed and d.is_new, "extra_collective", "in a function that the others have left"),
    (lambda d: d.is_of_another_round, "skipped_collective", "call skipped: each round of the loop has a size of its own"),
    (lambda d: d.are_alternatives, "collective_mismatch", ""),
    (lambda d: d.is_new and d.has_its_own_to_come, "collective_mismatch", ", whose counterpart on this rank is to come"),
    (lambda d: d.is_in_a_later_round, "skipped_collective", "call skipped: it is in a later round of the loop"),
    (lambda d: d.is_in_an_earlier_round, "extra_collective", "which the others, in a later round of the loop, have gone past"),
    (lambda d: d.is_for_its_rank_alone, "extra_collective", "which its condition leaves to this rank alone"),
    (lambda d: d.has_passed_it_in_its_step, "extra_collective", LEFT_BEHIND),
    (lambda d: d.is_unknown and d.left_as_usual, "extra_collective", ""),
    (lambda d: d.is_in_its_statement and d.is_new, "extra_collective", ""),
    (lambda d: d.is_an_unusual_visit, "extra_collective", "in a visit to this line that is not as those before"),
    (lambda d: d.in_another_order and d.is_on_the_way, "collective_mismatch", ", in another order"),
    (lambda d: d.is_in_the_same_round and d.comes_first and d.parted.turned.has_left, "extra_collective", ANOTHER_ROUND),
    (lambda d: d.is_in_the_same_round and d.comes_first, "extra_collective", "which comes before the others' call in this round"),
    (lambda d: d.is_in_the_same_round and d.is_further_down and d.parted.has_left, "skipped_collective", LEFT_THE_LOOP),
    (lambda d: d.is_in_the_same_round and d.is_further_down, "skipped_collective", "call skipped in this round of the loop"),
    (lambda d: d.is_on_the_way and d.is_new, "extra_collective", ""),
    (lambda d: d.is_on_the_way, "extra_collective", "which comes before the others' call in its rounds"),
    (lambda d: d.parted.has_left, "skipped_collective", LEFT_THE_LOOP),
    (lambda d: d.parted.turned.has_left and d.has_come_back, "skipped_collective", "call skipped"),
    (lambda d: d.parted.turned.has_left and d.is_past_as_usual, "skipped_collective", "call skipped"),
    (lambda d: d.parted.turned.has_left, "extra_collective", ANOTHER_ROUND),
    (lambda d: d.comes_first and not d.parted.goes_round and d.is_new, "extra_collective", "which the others have gone past"),
    (lambda d: d.comes_first and not d.parted.goes_round, "extra_collective", "once more than the others"),
    (lambda d: d.has_come_round_again, "skipped_collective", "call skipped"),
    (lambda d: d.is_another_round_below, "extra_collective", ANOTHER_ROUND),
    (lambda d: d.in_another_order, "collective_mismatch", ", in another order"),
    (lambda d: d.mine_follows, "skipped_collective", "call skipped"),
    # The pattern expects neither: the one that comes first in the program is left out.
    (lambda d: d.both_are_new and d.comes_first, "extra_collective", ""),
    (lambda d: d.both_are_new, "skipped_collective", "call skipped"),
    (lambda d: d.is_unknown and d.are_alike, "collective_mismatch", ""),
    (lambda d: d.is_unknown and not d.comes_later, "extra_collective", ""),
    (lambda d: d.is_unknown and d.mine.step < d.other.step, "skipped_collective", "made fewer steps"),
    (lambda d: d.is_unknown, "skipped_collective", "call skipped"),
    (lambda d: d.comes_between, "extra_collective", ""),
    (lambda d: d.is_new and d.comes_first, "extra_collective", ""),
    (lambda d: True, "skipped_collective", "call skipped"),
)  # fmt: skip


def kind_of(
    before: list[Collective],
    calls: list[Collective],
    mine: Collective,
    other: Collective,
    parted: Parting,
    lead: int | None = None,
    *,
    in_one_round: bool = False,
) -> tuple[str, str]:
    """Return (cause, why) of ``mine`` in place of ``other``; see `Departure`."""
    departure = Departure(before, calls, mine, other, parted, lead, in_one_round)
    return next((cause, why) for holds, cause, why in KINDS if holds(departure))
