"""The last run in which a failing test passed, and what has changed since; shown with the failure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.shapes import is_number
from pytest_nsa.report.markup import Markup, table, tag
from pytest_nsa.report.runs import runs_in
from pytest_nsa.report.summary import read_entries
from pytest_nsa.wire.files import read_object

MOST = 30  # runs that are looked through, the newest first
_FIGURES = {
    "steps": "steps", "step_ms": "ms a step", "tokens_per_s": "tokens/s", "peak_mib": "MiB at most", "added_mib": "MiB added",
    "peak_gpu_mib": "GPU MiB at most", "loss": "loss",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Green:
    """A run in which a test passed, with its verdict, and the environments of that run and of the reported one."""

    run: str
    verdict: Verdict
    env: Mapping[str, Any]
    env_now: Mapping[str, Any]

    def describe(self) -> str:
        """Return the run's name, with its commit if that is known and differs."""
        then, now = self.env.get("revision"), self.env_now.get("revision")
        return self.run + (f", at {then} ({now} now)" if then and then != now else "")


def last_greens(run: Path, names: Collection[str]) -> dict[str, Green]:
    """Return, by test or scenario, the last run before ``run`` in the same folder in which it passed."""
    found: dict[str, Green] = {}
    if not names:
        return found
    now = _environment(run)
    earlier = [other for other in runs_in(run.parent) if other.path.name < run.name]  # named by the time of their start
    for other in earlier[:MOST]:
        env = None
        for entry in read_entries(other.path):
            if entry.name in names and entry.name not in found and entry.verdict.outcome == "PASS":
                env = env if env is not None else _environment(other.path)
                found[entry.name] = Green(run=other.path.name, verdict=entry.verdict, env=env, env_now=now)
        if len(found) == len(names):
            break
    return found


def compared(green: Green, now: Verdict) -> Markup:
    """Return a table: how the test ended then and now, its figures, and what differs in versions and variables."""
    rows = (tag("tr", tag("th", what, scope="row"), tag("td", a), tag("td", b)) for what, a, b in _rows(green, now))
    return table(("", green.run, "this run"), rows)


def _rows(green: Green, now: Verdict) -> Iterator[tuple[str, str, str]]:
    then = green.verdict
    yield "result", then.outcome, f"{now.outcome} ({now.cause})" if now.cause else now.outcome
    yield "seconds", f"{then.duration_s:.1f}", f"{now.duration_s:.1f}"
    for name, label in _FIGURES.items():
        a, b = then.figures.get(name), now.figures.get(name)
        if a is not None or b is not None:
            yield label, _number(a), _number(b)
    differing = [name for name in {**green.env, **green.env_now} if green.env.get(name) != green.env_now.get(name)]
    for name in differing:
        yield name, str(green.env.get(name, "-"))[:200], str(green.env_now.get(name, "-"))[:200]
    if not differing:
        yield "versions, variables", "the same", "the same"


def _number(value: object) -> str:
    """Return a figure as text; '-' for anything that is no number."""
    if not is_number(value):
        return "-"
    return f"{value:.4g}" if value < 1e4 else f"{value:,.0f}"


def _environment(run: Path) -> dict[str, Any]:
    """Return the content of a run's env.json, with its variables at the top level."""
    env = read_object(run / "env.json")
    variables = env.pop("variables", {})
    return {**env, **(variables if isinstance(variables, dict) else {})}
