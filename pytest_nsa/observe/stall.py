"""A stall while it lasts: when to look closer, what /proc shows, and how long it has lasted.

The stall of a waiting rank is measured by the clock, that of a computing rank by the CPU time that it got. So a limit in these
seconds does not end a test because the machine is slow or busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.procfs import ProcessState, difference, look_at

BEGIN_S = 1.4  # of a stall, before the first look at the processes
SAMPLE_S = 0.5
FIRST_ASSESSMENTS_S, LATER_ASSESSMENTS_S = 1.0, 5.0
OFTEN_S = 12.0
BUSY = 0.1  # of a core


@dataclass
class StallClock:
    """The length of a stall: ``look`` is called with the ranks' process ids at each poll; ``counted`` is the stall in seconds."""

    counted: float = 0.0
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    _states: dict[int, tuple[float, ProcessState]] = field(default_factory=dict)
    _sampled: float = 0.0
    _assessed: float = 0.0

    def reset(self) -> None:
        """Reset after progress."""
        if self._sampled:
            self.counted, self._sampled, self._assessed = 0.0, 0.0, 0.0
            self.facts, self._states = {}, {}

    def look(self, pids: Mapping[int, int], stalled_s: float) -> bool:
        """Look at the processes (rank -> pid) if it is time to; return whether the stall should be assessed (again) now."""
        now = monotonic()
        if stalled_s < BEGIN_S or now - self._sampled < SAMPLE_S:
            return False
        is_first = not self._sampled
        self._sampled = now
        passed, computed = 0.0, 0.0
        for rank, pid in pids.items():
            state = look_at(pid)
            if state is None:
                continue
            if rank in self._states:
                before, last = self._states[rank]
                passed = now - before
                self.facts[rank] = difference(last, state, passed)
                used = state.cpu_s - last.cpu_s
                if self.facts[rank]["wants_cpu"] or used > BUSY * passed:
                    computed = max(computed, used) or 1e-9
            self._states[rank] = (now, state)
        self.counted += min(passed, computed) if computed else passed
        if is_first or not self.facts:
            self.counted = stalled_s if is_first else self.counted
            return False
        pause = FIRST_ASSESSMENTS_S if stalled_s < OFTEN_S else LATER_ASSESSMENTS_S
        if now - self._assessed < pause:
            return False
        self._assessed = now
        return True
