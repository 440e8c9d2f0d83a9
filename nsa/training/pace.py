"""Which steps a long run prints, and the time that is left; at its end the loss as a line of blocks."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from tqdm import tqdm

FIRST = 20  # steps of a process that are all printed
EVERY_S = 5.0  # seconds between later ones
WARM_UP = 3  # steps that compile and fill caches, and do not count for the pace
WIDTH = 50
_BLOCKS = "▁▂▃▄▅▆▇█"


class Pace:
    """The pace of one process, from the step after ``done`` to ``steps``."""

    def __init__(self, done: int, steps: int) -> None:
        self.done, self.steps = done, steps
        self._last = 0.0
        self._from: tuple[int, float] | None = None
        self.losses: list[float] = []

    def is_due(self, step: int, loss: float, now: float | None = None) -> bool:
        """Note a step; return whether its line is to be printed: the first ones, one every 5 s, and the last."""
        now = time.monotonic() if now is None else now
        self.losses.append(loss)
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


def progress_bar(done: int, steps: int) -> tqdm[NoReturn]:
    """Return a bar on stdout with the completed steps, the pace and the time left; it starts no thread."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # its thread would look like a thread of the program that hangs
    return tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True, file=sys.stdout)


def curve(losses: Sequence[float]) -> str:
    """Return 'loss 5.550 █▆▄▃▂▁ 2.410': means of equal parts, the largest as a full block; '' for fewer than ten steps."""
    finite = [loss for loss in losses if loss == loss and abs(loss) != float("inf")]
    if len(finite) < 10:
        return ""
    width = min(WIDTH, len(finite))
    parts = [finite[i * len(finite) // width : (i + 1) * len(finite) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    blocks = "".join(_BLOCKS[round((mean - low) / ((high - low) or 1.0) * (len(_BLOCKS) - 1))] for mean in means)
    return f"loss {means[0]:.3f} {blocks} {means[-1]:.3f}"
