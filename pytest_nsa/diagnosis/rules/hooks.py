"""Gradient hooks, in which ranks make calls: who is in one, and what those left out whose hook did not run."""

from __future__ import annotations

from pytest_nsa.diagnosis.facts import awaited
from pytest_nsa.diagnosis.rules.locations import parts_of
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.source import file_name
from pytest_nsa.evidence.values import Evidence, RankEvidence


def without_hook(evidence: Evidence, departing: tuple[int, ...], found: dict[int, Collective]) -> Collective | None:
    """Return the call that all others make in a gradient hook, where the departing ranks are in none: it did not run there."""
    others = [r for r in found if r not in departing]
    stacks = {r: evidence.ranks[r].stack for r in found}
    in_hook = {r for r, stack in stacks.items() if stack is not None and stack.is_in_hook}
    if not departing or not others or in_hook != set(others):
        return None
    return found[others[0]]


def is_in_hook(rank: RankEvidence) -> bool:
    """Return whether a rank is in a gradient hook: by its stack; of one that left none, or had raised when it was taken, by
    the lines that led to its call.
    """
    call = awaited(rank)
    if call is None or (rank.stack is not None and not rank.exceptions):
        return rank.stack is not None and rank.stack.is_in_hook
    file, _, function = parts_of(call.site)
    callers = [parts_of(place) for place in call.way[1:]]
    begins = any(file_name(file) == f and ".backward(" in rank.sources.line(file, line) for f, line, _ in callers)
    return begins and not {function, *(name for *_, name in callers)} & {"backward", "forward"}
