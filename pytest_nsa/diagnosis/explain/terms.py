"""The terms of an explanation: facts about two sides of the ranks, each with its words.

A term has a value from 0 to 1 and a weight for each kind of edit (`weights.json`, fitted by `benchmarks/fit.py`). The
score of an edit is the sum of weight times value. `OWN` terms are computed for the side that an edit names and for the
others; `SHARED` terms for both together, from the named side's view.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pytest_nsa.diagnosis.explain.conditions import Path
from pytest_nsa.diagnosis.explain.contrast import Contrast
from pytest_nsa.diagnosis.explain.program import Order
from pytest_nsa.diagnosis.explain.rhythm import share, token


@dataclass(frozen=True, slots=True)
class Term:
    """A fact by its ``name`` in the table of weights; ``words`` follow the name of a side: 'rank 1 is ...'.

    ``of_all`` are the words of a shared term for an edit that names all ranks.
    """

    name: str
    words: str
    value: Callable[[Contrast], float]
    of_all: str = ""


def _bits(*calls: str) -> Callable[[Contrast], float]:
    """Return the surprise of the last of the calls, 'own' or 'other', if the rank makes them next."""

    def value(c: Contrast) -> float:
        made = [c.call if name == "own" else c.other_call for name in calls]
        return share(c.costs(*made))

    return value


def _makes_as_many(c: Contrast) -> float:
    now, *earlier = c.counts
    return float(len(set(earlier)) == 1 and now >= earlier[0])


def _path(path: Path) -> Callable[[Contrast], float]:
    return lambda c: float(c.path is path)


def _was_skipped(c: Contrast) -> float:
    if token(c.call) == token(c.other_call):
        return 0.0  # a loop of one call: nothing shows which of its rounds was passed over
    return (1 - _bits("other")(c)) * (1 - _bits("other", "own")(c))


OWN: tuple[Term, ...] = (
    Term("new", "makes this call for the first time", lambda c: not c.has_made),
    Term("surprise of other's", "has no earlier round in which the others' call comes next", _bits("other")),
    Term("surprise before other's", "has no earlier round that goes from its own call to the others'", _bits("own", "other")),
    Term("as many", "has made as many calls like this one as in each round before", _makes_as_many),
    Term("passed over", "makes the call that follows the others' call in its earlier rounds", _was_skipped),
    Term("selected", "is selected by a condition on the rank", _path(Path.SELECTS)),
    Term("not excluded", "is let through by a condition that excludes other ranks", _path(Path.EXCLUDES)),
    Term("on data", "is under a condition on data, not on the rank", _path(Path.DATA)),
)  # fmt: skip


SHARED: tuple[Term, ...] = (
    Term("ahead, counted", "is ahead in the program",
         lambda c: c.order is Order.AFTER and (c.compared.is_counted or c.compared.is_likely)),
    Term("ahead by lines", "is ahead in the program, as far as its lines show",
         lambda c: c.order is Order.AFTER and not (c.compared.is_counted or c.compared.is_likely)),
    Term("ahead, other's new", "is ahead, and no rank made the others' call before",
         lambda c: c.order is Order.AFTER and not c.turned.is_known),
    Term("assumed ahead", "is ahead where a loop has begun again", lambda c: c.compared.is_assumed and c.order is Order.AFTER),
    Term("steps behind", "is behind by training steps or exhausted data loaders alone",
         lambda c: c.compared.is_likely and c.order is Order.BEFORE),
    Term("behind, new", "is behind, in a call that no rank made before", lambda c: c.order is Order.BEFORE and not c.is_known),
    Term("in a loop", "is in a loop that the others left", lambda c: c.turned.has_left),
    Term("exclusive", "is in another branch than the others", lambda c: c.order is Order.EXCLUSIVE,
         "is in branches that exclude each other"),
    Term("all new", "makes a call that no rank made before, as the others do", lambda c: not (c.is_known or c.turned.is_known),
         "makes calls that no rank made before"),
    Term("another group", "calls in another group", lambda c: c.is_in_another_group, "calls in different groups"),
)  # fmt: skip


_ALONE = ("ahead, counted", "ahead by lines", "in a loop", "exclusive")
_OF_A_SIDE = ("selected", "not excluded", "on data")


def position_values(contrast: Contrast) -> dict[str, float]:
    """Return the terms of positions and conditions that hold between a rank and the rank that it is compared with, by
    name.
    """
    found = {t.name: float(t.value(contrast)) for t in SHARED if t.name in _ALONE}
    found |= {f"they: {t.name}": float(t.value(contrast)) for t in OWN if t.name in _OF_A_SIDE}
    found |= {f"others: {t.name}": float(t.value(contrast.turned)) for t in OWN if t.name in _OF_A_SIDE}
    return {name: value for name, value in found.items() if value}


def size_values(named: int, others: int) -> dict[str, float]:
    """Return the values of the terms of numbers: how many ranks an edit names, and how many others there are."""
    bits = math.log2((others + 0.5) / (named + 0.5))
    return {"minority": max(-2.0, min(2.0, bits)), "majority": float(named > others)}


def compute_values(contrast: Contrast, sizes: dict[str, float], *, for_all: bool = False) -> dict[str, float]:
    """Return the terms that hold, by name. ``for_all``: for an edit that names all ranks, and so takes no side."""
    found = {t.name: float(t.value(contrast)) for t in SHARED}
    if for_all:
        other = {t.name: float(t.value(contrast.turned)) for t in SHARED}
        found = {name: min(value, other[name]) for name, value in found.items()}
    else:
        found |= {f"they: {t.name}": float(t.value(contrast)) for t in OWN}
        found |= {f"others: {t.name}": float(t.value(contrast.turned)) for t in OWN}
    return {name: value for name, value in (found | sizes | {"always": 1.0}).items() if value}
