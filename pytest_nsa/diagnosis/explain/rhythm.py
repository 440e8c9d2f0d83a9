"""What a rank's own calls predict: how surprising a next call is, and how many calls each of its rounds had.

`surprise` is the cost in bits of a next call under prediction by partial matching (Cleary and Witten, 1984): the
longest suffix of the calls that occurred before predicts what followed it; where the call never followed it, a shorter
suffix predicts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

from pytest_nsa.evidence.board import Collective

LATEST = 96  # latest calls that are read
LONGEST = 24  # calls of the longest suffix
MOST_RUNS = 3  # lengths of suffixes that are tried
MOST_BITS = 10.0  # a surprise above counts as this one
NEW = 3.0  # additional bits for a call that the rank never made

Token = tuple[str, tuple[str, ...]]  # operation and call path


def token(call: Collective) -> Token:
    """Return what repeats when a rank makes the same call again, whatever the payload."""
    return call.op, call.way


def surprise(history: Sequence[Hashable], following: Hashable) -> float:
    """Return how many bits ``following`` costs after ``history``: near 0 where it followed each earlier occurrence of
    the latest calls.
    """
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
    """Return a surprise as a number between 0 (expected) and 1."""
    return min(bits, MOST_BITS) / MOST_BITS


def is_same_line(a: Collective, b: Collective) -> bool:
    """Return whether two calls were made at one line."""
    return a.site.rpartition(" in ")[0] == b.site.rpartition(" in ")[0]


def counts_of_rounds(before: Sequence[Collective], mark: Collective, counted: Collective) -> list[int]:
    """Return the number of calls at ``counted``'s line since the latest call at ``mark``'s line, then in each earlier
    round that the ring holds completely, the latest first.
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
