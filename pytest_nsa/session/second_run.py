"""The second run of a failed test, in which the control flow of its ranks is recorded: whether it is made, and for how long."""

from __future__ import annotations

import pytest

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.settings import Settings

LABEL = "flow"
AUTO = 5  # tests of a session that run again
MOST_S, LEAST_S, TIMES = 60.0, 20.0, 4.0
HANG_AFTER_S = 2.0  # of a stall with a suspicion: the first run has shown that it does not end
# Nothing in the program's control flow explains these: the machine, a signal, or the group's addresses.
_FROM_OUTSIDE = frozenset(
    {"oom", "network_unusable", "init_timeout", "rank_died", "rank_stopped", "transport_stuck", "device_busy"}
)


def is_wanted(item: pytest.Item, settings: Settings, verdict: Verdict, made: int) -> bool:
    """Return whether a failed test runs again: its ranks did different things. ``made`` is the number of second runs so far."""
    mark = item.get_closest_marker("rerun")
    if (
        settings.rerun == "off"
        or item.config.getoption("usepdb", False)
        or (mark is not None and mark.args == (False,))
    ):
        return False
    if verdict.world_size < 2 or verdict.outcome not in ("HANG", "FAIL", "CRASH") or verdict.cause in _FROM_OUTSIDE:
        return False
    is_alike = len(verdict.ranks) == verdict.world_size and verdict.cause != "silent_divergence"
    if verdict.outcome == "FAIL" and is_alike:
        return False
    return settings.rerun == "all" or made < AUTO


def compute_limit(evidence: Evidence) -> float:
    """Return the seconds that the second run may take: a multiple of what the first took until it stalled."""
    until = max(0.0, evidence.duration_s - evidence.stalled_s)
    return min(MOST_S, max(LEAST_S, TIMES * until))
