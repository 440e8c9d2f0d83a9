"""Calls from gradient hooks: which ranks are in one."""

from __future__ import annotations

from pytest_nsa.diagnosis.explain.locations import parts_of
from pytest_nsa.diagnosis.facts import awaited
from pytest_nsa.evidence.source import file_name
from pytest_nsa.evidence.values import RankEvidence


def is_in_hook(rank: RankEvidence) -> bool:
    """Return whether a rank is in a gradient hook: by its stack, or, without a usable one, by the lines that led to its
    call.
    """
    call = awaited(rank)
    if call is None or (rank.stack is not None and not rank.exceptions):
        return rank.stack is not None and rank.stack.is_in_hook
    file, _, function = parts_of(call.site)
    callers = [parts_of(place) for place in call.way[1:]]
    begins = any(file_name(file) == f and ".backward(" in rank.sources.line(file, line) for f, line, _ in callers)
    return begins and not {function, *(name for *_, name in callers)} & {"backward", "forward"}
