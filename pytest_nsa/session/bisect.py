"""``--bisect-gc`` and ``--bisect-branch``: run a failed test again on narrower ranges of layers, or on each branch alone.

Only tests that use the fixture `gc_range` or `branch` are bisected; the fixture then returns the candidate value.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nsa import marks
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.marks import BRANCHES, LayerRange

MAX_RUNS = 16
Run = Callable[[dict[str, str]], Verdict]  # runs the test with other values of its fixtures


def bisect(item: pytest.Item, run: Run) -> str:
    """Return what narrows a failure down, in a sentence; '' where the options do not request it, or the test uses neither
    fixture.
    """
    fixtures = getattr(item, "fixturenames", ())
    params = getattr(getattr(item, "callspec", None), "params", {})
    layers = params.get("gc_range") or marks.value(item, "gc_range")
    if item.config.getoption("--bisect-gc") and "gc_range" in fixtures and layers:
        return _layers(LayerRange(layers), run)
    if item.config.getoption("--bisect-branch") and "branch" in fixtures:
        return _branches(run)
    return ""


def _layers(whole: LayerRange, run: Run) -> str:
    """Halve for as long as a half fails alone."""
    start, end, runs = whole.start, whole.end, 0
    while end - start > 1 and runs < MAX_RUNS:
        middle = (start + end) // 2
        for first, last in ((start, middle), (middle, end)):
            runs += 1
            if run({"gc_range": f"{first}:{last}"}).failed:
                start, end = first, last
                break
        else:
            return f"bisect: fails with layers {start}:{end}, and with neither half alone ({runs} runs)"
    return f"bisect: layer {start} fails alone, as gc_range {start}:{end} ({runs} runs)"


def _branches(run: Run) -> str:
    failing = [name for name in BRANCHES if run({"branch": name}).failed]
    if not failing:
        return "bisect: each branch alone passes: look at the gates"
    alone = "fails alone" if len(failing) == 1 else "fail alone"
    return f"bisect: of the branches {', '.join(BRANCHES)}, {' and '.join(failing)} {alone}"
