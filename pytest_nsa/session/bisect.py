"""Further runs of a failed test: ``--ranks-bisect`` and ``--ranks-bisect-env`` (on fewer layers, with other values, or with
variables), and the second run, in which the control flow of its ranks is recorded.

The first serves tests that take the named parameter, or the fixture `gc_range` or `branch`; the others serve all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from pytest_nsa import marked
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.marks import BRANCHES, LayerRange
from pytest_nsa.session.needs import Needs
from pytest_nsa.settings import Settings

FLOW = "flow"
AUTO = 5  # tests of a session that run again
MOST_S, LEAST_S, TIMES = 60.0, 20.0, 4.0
HANG_AFTER_S = 2.0  # of a stall with a suspicion: the first run has shown that it does not end
# Nothing in the program's control flow explains these: the machine, a signal of another process, or the group's addresses.
_FROM_OUTSIDE = frozenset({"oom", "network_unusable", "init_timeout", "rank_stopped", "transport_stuck", "device_busy"})


def may_run_again(item: pytest.Item, settings: Settings, verdict: Verdict, evidence: Evidence, made: int) -> bool:
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
    if verdict.cause == "rank_died" and not all(map(evidence.was_ended_by_the_test, verdict.ranks)):
        return False
    is_alike = len(verdict.ranks) == verdict.world_size and verdict.cause != "silent_divergence"
    if verdict.outcome == "FAIL" and is_alike:
        return False
    return settings.rerun == "all" or made < AUTO


def limit_second_run(evidence: Evidence) -> float:
    """Return the seconds that the second run may take: a multiple of what the first took until it stalled."""
    until = max(0.0, evidence.duration_s - evidence.stalled_s)
    return min(MOST_S, max(LEAST_S, TIMES * until))


MAX_RUNS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """A test as it runs again: with other values of its fixtures, and variables in its ranks' environment."""

    label: str  # for the name of its folder
    fixtures: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    flow: bool = False  # with the ranks' control flow recorded
    seed: int | None = None  # of hypothesis; None: another one


Run = Callable[[Variation], Verdict]


def bisect(item: pytest.Item, settings: Settings, needs: Needs, verdict: Verdict, run: Run) -> str:
    """Return what narrows a failure down: a sentence for each option that is on and serves the test; '' without any."""
    fixtures = getattr(item, "fixturenames", ())
    params = getattr(getattr(item, "callspec", None), "params", {})
    layers = params.get("gc_range") or marked.value(item, "gc_range")
    found = []
    for name, values in settings.bisect.items():
        if not (name in params or (name in ("branch", "gc_range") and name in fixtures)):
            continue
        if values or name == "branch":
            found.append(_values(name, values or BRANCHES, run, verdict))
        elif layers:
            found.append(_Halves(LayerRange(layers), run, verdict).describe())
    if settings.bisect_env:
        found.append(_environment(settings.bisect_env, needs, run))
    return "; ".join(found)


class _Halves:
    """Runs of a test on halves of its layers. `MAX_RUNS` at most, the first of them without any layer, as a control."""

    def __init__(self, whole: LayerRange, run: Run, verdict: Verdict) -> None:
        self.whole, self.run, self.verdict, self.count = whole, run, verdict, 0

    def describe(self) -> str:
        """Run the control and the halves, and return what they show."""
        at = self.whole.start
        control = self._try(at, at)
        if is_failure(control, self.verdict) and control.cause == self.verdict.cause:
            return f"bisect: fails without any layer, as gc_range {at}:{at}, too: no layer is to blame (1 run)"
        found = self._failing(at, self.whole.end)
        alone = [start for start, end in found if end - start == 1]
        texts = []
        if alone:
            layers = f"layer {alone[0]} fails" if len(alone) == 1 else f"layers {_listed(alone)} fail"
            texts.append(f"{layers} alone, as gc_range {_listed([f'{n}:{n + 1}' for n in alone])}")
        for (start, end), is_smallest in found.items():
            if end - start > 1:
                texts.append(
                    f"fails with layers {start}:{end}" + (", and with neither half alone" if is_smallest else "")
                )
        if is_failure(control, self.verdict):
            texts.append(f"without any layer it fails otherwise: {control.cause}")
        left = "" if all(found.values()) else "; smaller ranges were not tried"
        return f"bisect: {'; '.join(texts)} ({self.count} runs{left})"

    def _failing(self, start: int, end: int) -> dict[tuple[int, int], bool]:
        """Return the smallest failing ranges in one that fails, and whether no smaller one does. Several layers may fail, so both
        halves are tried.
        """
        if end - start == 1:
            return {(start, end): True}
        if self.count > MAX_RUNS - 2:
            return {(start, end): False}
        middle = (start + end) // 2
        found: dict[tuple[int, int], bool] = {}
        for half in [half for half in ((start, middle), (middle, end)) if is_failure(self._try(*half), self.verdict)]:
            found |= self._failing(*half)
        return found or {(start, end): True}

    def _try(self, start: int, end: int) -> Verdict:
        self.count += 1
        return self.run(Variation(label=f"{start}_{end}", fixtures={"gc_range": f"{start}:{end}"}))


def _listed(words: Sequence[object]) -> str:
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last


def _values(name: str, values: Sequence[str], run: Run, verdict: Verdict) -> str:
    """Run the test as it is, as a control, and with each value; return with which it fails."""
    if not is_failure(run(Variation(label=f"{name}-control")), verdict):
        return "bisect: it passes when it is run again as it is: the failure comes and goes"
    tried = values[: MAX_RUNS - 1]
    ended = {value: run(Variation(label=f"{name}-{value}", fixtures={name: value})) for value in tried}
    failing = [value for value, other in ended.items() if is_failure(other, verdict)]
    left = "" if len(tried) == len(values) else f"; {len(values) - len(tried)} were not tried"
    if name == "branch" and not failing:
        return f"bisect: each branch alone passes: look at the gates{left}"
    those = f"the branches {', '.join(tried)}" if name == "branch" else f"{name} {', '.join(tried)}"
    fails = f"{_listed(failing)} {'fails' if len(failing) == 1 else 'fail'}" if failing else "none fails"
    otherwise = [f"{value} by {ended[value].cause}" for value in failing if ended[value].cause != verdict.cause]
    other = f" ({', '.join(otherwise)})" if otherwise else ""
    return f"bisect: of {those}, {fails}{' alone' if name == 'branch' else ''}{other}{left}"


def is_failure(verdict: Verdict, first: Verdict) -> bool:
    """Return whether a run failed; a slow one shows nothing, unless the first failure itself is that."""
    return verdict.failed and (verdict.outcome != "SLOW" or first.outcome == "SLOW")


def _environment(variables: Mapping[str, str], needs: Needs, run: Run) -> str:
    """Find a set of variables with which the test passes, and from which none can be taken out."""
    names = [name for name in variables if _has_effect(name, needs)]
    if not names:
        return f"bisect: none of {', '.join(variables)} has an effect on {needs.backend} and {needs.device}"
    count = 0

    def passes(some: Sequence[str]) -> bool:
        nonlocal count
        count += 1
        tried = Variation(label=f"env{count}", environment={name: variables[name] for name in some})
        return run(tried).outcome == "PASS"

    comes_and_goes = "bisect: it passes when it is run again as it is: the failure comes and goes" + (
        ", or needs what an earlier test left in its ranks" if needs.reuse else ", so no variable can be blamed"
    )
    if passes(()):
        return comes_and_goes
    names, left = names[: MAX_RUNS - 4], names[MAX_RUNS - 4 :]  # less the control, the run with all, and two to confirm
    untried = f"; {', '.join(left)} were not tried" if left else ""
    if not passes(names):  # some may exclude each other
        alone = [name for name in names if len(names) > 1 and passes((name,))]
        texts = ", or with ".join(f"{name}={variables[name]}" for name in alone)
        found = (
            f"passes with {texts}; not with all at once"
            if alone
            else f"fails with each of {', '.join(names)}, and with all"
        )
        return f"bisect: {found} ({count} runs{untried})"
    needed = names
    for name in reversed(names):  # of two that serve alike, the one that is named first is kept
        fewer = [other for other in needed if other != name]
        needed = fewer if fewer and passes(fewer) else needed
    # Twice more: a failure that comes and goes passes with anything.
    if not passes(needed) or passes(()):
        return comes_and_goes
    texts = " and ".join(f"{name}={variables[name]}" for name in needed)
    return f"bisect: passes with {texts}{' alone' if len(needed) == 1 else ', all of them'} ({count} runs{untried})"


def _has_effect(name: str, needs: Needs) -> bool:
    """Return whether anything on these ranks reads a variable: gloo reads none of NCCL's, a CPU run none of CUDA's."""
    if name.startswith(("NCCL_", "TORCH_NCCL_")):
        return needs.backend in ("", "nccl")
    return needs.device != "cpu" or not name.startswith("CUDA_")
