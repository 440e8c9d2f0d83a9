"""Which factors a failure needs: elimination over rows that fail and pass, and pairs of rows that differ in one alone."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests_cpu.plan.factors import Factor, Facts

MOST_FACTORS = 4  # of a fault
MOST_COMPARED = 64  # hypotheses that a further row may separate
CONFIDENCE = (0.5, 0.8, 0.9, 0.95)  # in a factor, by its matched pairs

Class = tuple[Factor, ...]  # factors that the same passing rows lack: no row decides between them


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The smallest sets of factors that every failing row has and no passing row: none where no factors separate them.

    A set is one of classes: ``needed`` are those in every set, ``possible`` those in some. ``pairs`` are, by factor, (failing row,
    passing row), equal in all that it does not read. ``twins`` are equal rows of which one fails and one passes.
    """

    failing: tuple[str, ...]
    sets: tuple[frozenset[Class], ...]
    needed: tuple[Class, ...]
    possible: tuple[Class, ...]
    pairs: Mapping[Factor, tuple[tuple[str, str], ...]]
    twins: tuple[tuple[str, str], ...]

    def hypotheses(self) -> list[frozenset[Factor]]:
        """Return each set with one factor of each class, `MOST_COMPARED` at most."""
        every = (frozenset(chosen) for found in self.sets for chosen in itertools.product(*found))
        return list(itertools.islice(every, MOST_COMPARED))

    def covers(self, rows: Sequence[Facts]) -> bool:
        """Return whether rows have all factors of one of the hypotheses."""
        return any(all(factor.has(row) for factor in found for row in rows) for found in self.hypotheses())

    def confidence(self, factor: Factor) -> float:
        """Return how sure it is that the failure needs a factor, by its matched pairs and by repeats."""
        return CONFIDENCE[min(len(self.pairs[factor]), 1 if len(self.failing) == 1 else 3)]


def explain(
    failing: Sequence[str], passing: Sequence[str], facts: Mapping[str, Facts], factors: Sequence[Factor]
) -> Explanation:
    """Return what separates rows that fail from rows that pass."""
    classes: dict[int, list[Factor]] = {}
    for factor in factors:
        lacking = sum(1 << i for i, name in enumerate(passing) if not factor.has(facts[name]))
        if lacking and all(factor.has(facts[name]) for name in failing):
            classes.setdefault(lacking, []).append(factor)
    twins = tuple((f, p) for f in failing for p in passing if facts[f] == facts[p])
    sets = [] if twins else _smallest((1 << len(passing)) - 1, list(classes))
    used = [mask for mask in classes if any(mask in found for found in sets)]  # in the order of the factors
    needed = {mask: all(mask in found for found in sets) for mask in used}
    known = {mask: tuple(classes[mask]) for mask in used}
    return Explanation(
        failing=tuple(failing),
        sets=tuple(frozenset(known[mask] for mask in found) for found in sets),
        needed=tuple(known[mask] for mask in used if needed[mask]),
        possible=tuple(known[mask] for mask in used if not needed[mask]),
        pairs={factor: matched(factor, failing, passing, facts) for mask in used for factor in known[mask]},
        twins=twins,
    )


def _smallest(passing: int, masks: list[int]) -> list[frozenset[int]]:
    """Return the smallest sets of masks that cover all rows that pass (minimal hitting sets: Reiter, 1987)."""
    every = (list(dict.fromkeys(_covering(passing, masks, size))) for size in range(MOST_FACTORS + 1))
    return next(filter(None, every), [])


def _covering(left: int, masks: list[int], size: int) -> Iterable[frozenset[int]]:
    if not left:
        yield frozenset()
    elif size:
        for mask in masks:
            if mask & left & -left:
                yield from (found | {mask} for found in _covering(left & ~mask, masks, size - 1))


def matched(
    factor: Factor, failing: Iterable[str], passing: Iterable[str], facts: Mapping[str, Facts]
) -> tuple[tuple[str, str], ...]:
    """Return the pairs of a failing row and a passing one without the factor, equal in all that the factor does not read."""

    def rest(name: str) -> tuple[object, ...]:
        return tuple(value for key, value in facts[name].items() if key not in factor.fields)

    without = [(rest(name), name) for name in passing if not factor.has(facts[name])]
    return tuple((f, p) for f in failing for other, p in without if factor.has(facts[f]) and rest(f) == other)


def widest(chosen: Class, rows: Iterable[Facts]) -> Class:
    """Return a class without the factors from which another one of it follows: whichever is needed, that one is."""
    table = list(rows)

    def follows(wide: Factor, narrow: Factor) -> bool:
        reads_less = wide.is_general and set(wide.fields) <= set(narrow.fields)
        return reads_less and all(wide.has(row) for row in table if narrow.has(row))

    return tuple(f for f in chosen if not any(follows(other, f) and not follows(f, other) for other in chosen))


def separating(explanation: Explanation, others: Sequence[str], facts: Mapping[str, Facts]) -> str:
    """Return the one of ``others`` that fails by some hypotheses and passes by others, as near to half as possible.

    Without one: the one that would be the first matched pair of a factor; else ''. Among equals it is the first.
    """
    found = explanation.hypotheses()

    def splits(name: str) -> int:
        fails = sum(all(factor.has(facts[name]) for factor in chosen) for chosen in found)
        return min(fails, len(found) - fails)

    best = max(others, key=splits, default="")
    if best and splits(best):
        return best
    alone = [factor for factor, pairs in explanation.pairs.items() if not pairs]
    return next((n for n in others for f in alone if matched(f, explanation.failing, [n], facts)), "")


def has_control(name: str, others: Iterable[str], facts: Mapping[str, Facts]) -> bool:
    """Return whether one of ``others`` differs from a row in one fact alone."""
    return any(len(facts[name].items() - facts[other].items()) == 1 for other in others)
