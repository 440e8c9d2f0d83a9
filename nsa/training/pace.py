"""Which steps a long run prints, and the time that is left."""

from __future__ import annotations

import time

FIRST = 20  # steps of a process that are all printed
EVERY_S = 5.0  # seconds between later ones
WARM_UP = 3  # steps that compile and fill caches, and do not count for the pace


class Pace:
    """The pace of one process, from the step after ``done`` to ``steps``."""

    def __init__(self, done: int, steps: int) -> None:
        self.done, self.steps = done, steps
        self._last = 0.0
        self._from: tuple[int, float] | None = None

    def is_due(self, step: int, now: float | None = None) -> bool:
        """Note a step; return whether its line is to be printed: the first ones, one every 5 s, and the last."""
        now = time.monotonic() if now is None else now
        count = step - self.done
        if count >= WARM_UP and self._from is None:
            self._from = (step, now)
        if count > FIRST and step < self.steps and now - self._last < EVERY_S:
            return False
        self._last = now
        return True

    def left(self, step: int, now: float | None = None) -> str:
        """Return ', 1:04:10 left', by the time per step with evaluations and checkpoints; '' while it is unknown."""
        now = time.monotonic() if now is None else now
        if self._from is None or step <= self._from[0] or step - self.done <= FIRST or step >= self.steps:
            return ""
        seconds = round((self.steps - step) * (now - self._from[1]) / (step - self._from[0]))
        return f", {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"
