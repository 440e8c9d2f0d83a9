"""The kept runs, test by test: which tests became flaky or slower, and since when a test fails."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_nsa.report.compare import FEW_STEPS, SLOWER, Run

LAST = 5  # earlier runs that a test needs, to be called slower
SLOW_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Past:
    """A test over runs, oldest first: a letter per run ('.' passed, 's' skipped, ' ' did not run), and what to report of it."""

    test: str
    letters: str
    text: str


def history(runs: Sequence[tuple[str, Run]]) -> list[Past]:
    """Return the tests about which there is something to report; ``runs`` are (name, verdicts), oldest first."""
    found = []
    for test in dict.fromkeys(name for _, run in runs for name in run):
        verdicts = [run.get(test) for _, run in runs]
        letters = "".join(
            " " if v is None else v.outcome[0] if v.failed else "s" if v.outcome == "SKIP" else "." for v in verdicts
        )
        ran = [(name, v) for (name, _), v in zip(runs, verdicts, strict=True) if v is not None]
        remarks = [
            _flaky(letters),
            _sick(letters, [name for name, _ in ran]),
            _slower([v.figures for _, v in ran], [v.duration_s for _, v in ran]),
        ]
        text = "; ".join(part for part in remarks if part)
        if text:
            found.append(Past(test=test, letters=letters, text=text))
    return found


def _states(letters: str) -> str:
    """Return '.' or 'F' for each run in which the test ran and was not skipped."""
    return "".join("." if letter == "." else "F" for letter in letters if letter not in " s")


def _flaky(letters: str) -> str:
    states = _states(letters)
    turns = sum(a != b for a, b in itertools.pairwise(states))
    return f"flaky: {states.count('F')} of {len(states)} failed, turning {turns} times" if turns > 1 else ""


def _sick(letters: str, names: list[str]) -> str:
    states = _states(letters)
    healthy = states.rstrip("F")
    if not states.endswith("F") or not healthy or "F" in healthy:
        return ""
    return f"fails since {names[len(healthy)]}" if len(healthy) < len(names) else ""


def _slower(figures: list[dict[str, float]], durations: list[float]) -> str:
    steps = [f["step_ms"] for f in figures if f.get("steps", 0) >= FEW_STEPS]
    if len(steps) > LAST:
        *before, now = steps
        usual, worst = statistics.median(before), max(before)
        return f"slower: a step takes {now:.1f} ms, {usual:.1f} before" if now > (1 + SLOWER) * worst else ""
    if len(durations) > LAST:
        *past, last = durations
        if last > 2 * max(past) and last > SLOW_S:
            return f"slower: {last:.1f} s, {statistics.median(past):.1f} before"
    return ""
