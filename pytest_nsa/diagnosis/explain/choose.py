"""The edit that best explains why ranks are in different calls.

What is counted excludes candidates (`Candidate.is_refuted`). Each of the others has a score; the softmax of the scores, with a
temperature (Guo et al., 2017), gives probabilities. The weights were fitted as those of a conditional logit model (McFadden,
1974) on recorded faults. The best candidate's probability is the confidence, and its terms are what the report prints.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import resources

from pytest_nsa.diagnosis.explain.edits import Calls, Candidate, candidates
from pytest_nsa.evidence.values import Evidence

SPREAD = 1.3  # divides scores: by it held-out verdicts are as often right as they state, or more often
CERTAIN = 0.978  # a probability: of 32 verdicts above it on files that no weight was fitted to, one was wrong
Weights = Mapping[str, Mapping[str, float]]  # by kind of edit, by term


@dataclass(frozen=True, slots=True)
class Explanation:
    """The best edit, its probability, and the terms that decided against the next best one that differs in edit or ranks.

    ``terms`` are (name, by how much the term raises the score above the next one's), the largest first.
    """

    candidate: Candidate
    probability: float
    terms: tuple[tuple[str, float], ...]

    @property
    def is_certain(self) -> bool:
        return self.probability >= CERTAIN


@functools.cache
def weights() -> Weights:
    """Return the table of weights that the package ships."""
    text = resources.files(__package__).joinpath("weights.json").read_text(encoding="utf-8")
    table: Weights = json.loads(text)["weights"]
    return table


def explain(evidence: Evidence, entered: Calls, among: Collection[int] = ()) -> Explanation | None:
    """Return the best explanation of why ranks are in the different calls ``entered``; None where all are in one call.

    ``among``: the ranks that an edit may name, () for all.
    """
    found = [c for c in candidates(evidence, entered) if not among or {*c.ranks} <= {*among}]
    found = [c for c in found if not c.is_refuted] or found
    if not found:
        return None
    scored = sorted(((_score(c), -i, c) for i, c in enumerate(found)), key=lambda row: row[:2], reverse=True)
    best, candidate = scored[0][0], scored[0][2]
    total = sum(math.exp((score - best) / SPREAD) for score, _, _ in scored)
    named = candidate.edit.cause, candidate.ranks
    alike = sum(math.exp((score - best) / SPREAD) for score, _, c in scored if (c.edit.cause, c.ranks) == named)
    rival = next((c for _, _, c in scored if (c.edit.cause, c.ranks) != named), None)
    return Explanation(candidate, alike / total, _terms(candidate, rival))


def _score(candidate: Candidate) -> float:
    return sum(_gains(candidate).values())


def _gains(candidate: Candidate) -> dict[str, float]:
    """Return by how much each term of a candidate raises its score."""
    column = weights().get(candidate.kind, {})
    return {name: column.get(name, 0.0) * value for name, value in candidate.values.items()}


def _terms(candidate: Candidate, rival: Candidate | None) -> tuple[tuple[str, float], ...]:
    """Return the terms that support a candidate, less what they give to a rival that names the same ranks."""
    gains = _gains(candidate)
    if rival is not None and rival.ranks == candidate.ranks:
        of_rival = _gains(rival)
        gains = {name: gain - of_rival.get(name, 0.0) for name, gain in gains.items()}
    best = sorted(gains.items(), key=lambda pair: -pair[1])
    return tuple((name, round(gain, 2)) for name, gain in best if gain > 0)
