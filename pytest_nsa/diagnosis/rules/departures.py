"""Why a rank entered a call in place of the others': skipped theirs, made an extra one, or called another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from pytest_nsa.diagnosis.rules.locations import Parting, comes_first
from pytest_nsa.diagnosis.rules.source import are_alternatives, have_a_common_loop
from pytest_nsa.evidence.board import Collective, Shape

LEFT_THE_LOOP = "it has left the loop that the others are in"


def expected_next(shapes: list[Shape]) -> tuple[object, ...] | None:
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
    """Return whether a line has entered nothing like this before."""
    return all(c.shape != collective.shape or not is_same_line(c, collective) for c in before)


def is_same_line(a: Collective, b: Collective) -> bool:
    return a.site.rpartition(" in ")[0] == b.site.rpartition(" in ")[0]


@dataclass(frozen=True)
class Departure:
    """A rank's call ``mine`` in place of the others' call ``other``, and what the rank called ``before``.

    ``parted``: their locations in the function in which they diverge.
    """

    before: list[Collective]
    mine: Collective
    other: Collective
    parted: Parting

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
    def usual_sites(self) -> set[str]:
        """Where calls like ``mine`` were made before."""
        return {c.site for c in self.before if c.shape == self.mine.shape}

    @property
    def is_unknown(self) -> bool:
        """Whether there is a pattern, and ``mine`` is not in it."""
        return self.has_pattern and not self.usual_sites

    @property
    def left_as_usual(self) -> bool:
        """Whether ``mine`` has left a loop that each step goes through, after as many of its calls as in the step before."""
        if not self.before or not have_a_common_loop(self.parted.sources, self.parted.here, self.parted.there):
            return False
        latest = self.before[-1].step
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
    def both_are_new(self) -> bool:
        """Whether the pattern has neither call."""
        return self.is_unknown and is_new_call(self.before, self.other)

    @property
    def comes_first(self) -> bool:
        """Whether ``mine`` is on an earlier line of the function than ``other``."""
        return comes_first(self.parted.here, self.parted.there)

    @property
    def comes_later(self) -> bool:
        """Whether ``mine`` is on a later line, and no loop leads back."""
        return comes_first(self.parted.there, self.parted.here) and not self.parted.goes_round

    @property
    def are_alternatives(self) -> bool:
        """Whether the two are on one line, or in the two branches of one ``if``."""
        return is_same_line(self.mine, self.other) or are_alternatives(
            self.parted.sources, self.mine.site, self.other.site
        )

    @property
    def are_alike(self) -> bool:
        """Whether the two are the same operation in the same phase and function."""
        one, two = ((c.op, c.phase, c.site.rpartition(" in ")[2]) for c in (self.mine, self.other))
        return one == two


# (condition, cause, why): the first that holds. By the source first, then by what the rank did in earlier rounds.
KINDS: tuple[tuple[Callable[[Departure], bool], str, str], ...] = (
    (lambda d: d.are_alternatives, "collective_mismatch", ""),
    (lambda d: d.is_unknown and d.left_as_usual, "extra_collective", ""),
    (lambda d: d.parted.has_left, "skipped_collective", LEFT_THE_LOOP),
    (lambda d: d.parted.turned.has_left, "extra_collective", "makes another round of the loop that the others have left"),
    (lambda d: d.comes_first and not d.parted.goes_round and d.is_new, "extra_collective", "which the others have gone past"),
    (lambda d: d.comes_first and not d.parted.goes_round, "extra_collective", "once more than the others"),
    (lambda d: d.mine_follows and d.mine.site not in d.usual_sites, "collective_mismatch", ", in another order"),
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


def kind_of(before: list[Collective], mine: Collective, other: Collective, parted: Parting) -> tuple[str, str]:
    """Return (cause, why) of ``mine`` in place of ``other``."""
    departure = Departure(before, mine, other, parted)
    return next((cause, why) for holds, cause, why in KINDS if holds(departure))
