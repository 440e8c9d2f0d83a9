"""What a rank's own calls predict: how much a next call surprises, and how many calls each of its rounds had.

`surprise` is the cost in bits of a next call under prediction by partial matching (Cleary and Witten, 1984): the longest run of
latest calls that occurred before predicts what followed it; where it was never followed by the call, a shorter run does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

from pytest_nsa.evidence.board import Collective

LATEST = 96  # calls that are looked at
LONGEST = 24  # calls of a run
MOST_RUNS = 3  # lengths of runs that are tried
MOST_BITS = 10.0  # of a surprise: what is above counts as much
NEW = 3.0  # bits more for a call that the rank has never made

Token = tuple[str, tuple[str, ...]]  # operation, and the lines that led to the call


def token(call: Collective) -> Token:
    """Return what is equal where a rank makes the same call again, whatever it carries."""
    return call.op, call.way


def surprise(history: Sequence[Hashable], following: Hashable) -> float:
    """Return how many bits ``following`` costs after ``history``: near 0 where each earlier run of the same calls led to it."""
    history = history[-LATEST:]
    n = len(history)
    followers: dict[int, Counter[Hashable]] = {}
    for end in range(1, n):
        length = 0
        while length < min(end, LONGEST) and history[end - 1 - length] == history[n - 1 - length]:
            length += 1
        if length:
            followers.setdefault(length, Counter())[history[end]] += 1
    bits = 0.0
    for length in sorted(followers, reverse=True)[:MOST_RUNS]:
        counts = followers[length]
        total = counts.total()
        if counts[following]:
            return bits - math.log2(counts[following] / (total + 1))
        bits += math.log2(total + 1)
    made = history.count(following)
    if made:
        return bits + math.log2((n + len(set(history)) + 1) / made)
    return bits + math.log2(n + 2) + NEW


def share(bits: float) -> float:
    """Return a surprise between 0, of what is expected, and 1."""
    return min(bits, MOST_BITS) / MOST_BITS


def is_same_line(a: Collective, b: Collective) -> bool:
    """Return whether two calls were made at one line."""
    return a.site.rpartition(" in ")[0] == b.site.rpartition(" in ")[0]


def counts_of_rounds(before: Sequence[Collective], mark: Collective, counted: Collective) -> list[int]:
    """Return how many calls of ``counted``'s line were made since the latest of ``mark``'s, and in the rounds before that, the
    latest first, as far as the ring holds them whole.
    """
    counts, count = [], 0
    for call in before:
        if is_same_line(call, mark):
            if count:
                counts.append(count)
            count = 0
        elif is_same_line(call, counted):
            count += 1
    if before and before[0].sequence > 1:
        counts = counts[1:]
    return [count, *reversed(counts)]


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
