"""Compare two runs: outcomes, causes, time per step, memory, loss, gradients; report what differs, and whether it is worse.

A difference in time or memory counts if it exceeds the noise: the differences between the steps of a run, and between repeats of
it. A factor by which many tests are slower is attributed to the machine and divided out.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_nsa.diagnosis.verdict import Verdict, describe_ranks
from pytest_nsa.report.plain import cell, code, inline, markdown

Kind = Literal["worse", "better", "changed"]
SLOWER = 0.15  # of a step's time, at least
FEW_STEPS = 8  # fewer steps are not compared
HEAVIER, HEAVIER_MIB = 0.15, 16.0
LOSS = 0.01  # relative
FEW_TESTS = 4  # from so many tests with steps on, a common factor is the machine's

_TIMES = {"step_ms", "step_ms_low", "step_ms_high"}

Run = Mapping[str, Verdict]  # by scenario or test


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference in one test: what differs, the values, and whether the new one is worse."""

    test: str
    what: str
    base: str
    new: str
    kind: Kind


def compare(base: Sequence[Run], new: Sequence[Run]) -> list[Difference]:
    """Return what differs between two runs, what is worse first. ``base`` and ``new``: a run, then its repeats."""
    drift = _drift(base, new)
    found: list[Difference] = []
    for test in dict.fromkeys([*base[0], *new[0]]):
        a, b = base[0].get(test), new[0].get(test)
        if a is None or b is None:
            there = a or b
            assert there is not None
            pair = ("-", there.outcome) if a is None else (there.outcome, "-")
            found.append(Difference(test=test, what="ran", base=pair[0], new=pair[1], kind="changed"))
            continue
        found += _verdict_differences(test, a, b)
        repeats = [[run[test].figures for run in side if test in run] for side in (base, new)]
        found += _figure_differences(test, repeats[0], repeats[1], drift)
    order: dict[str, int] = {"worse": 0, "changed": 1, "better": 2}
    return sorted(found, key=lambda d: order[d.kind])


def _verdict_differences(test: str, a: Verdict, b: Verdict) -> Iterator[Difference]:
    kind: Kind
    if a.failed and b.failed and (a.cause, a.ranks, _function(a)) != (b.cause, b.ranks, _function(b)):
        kind = "worse" if a.cause != b.cause else "changed"
        yield Difference(test=test, what="cause", base=_cause(a), new=_cause(b), kind=kind)
    elif a.outcome != b.outcome or a.failed != b.failed:
        kind = "worse" if b.failed and not a.failed else "better" if a.failed and not b.failed else "changed"
        yield Difference(test=test, what="outcome", base=_outcome(a), new=_outcome(b), kind=kind)
    lost = sorted(set(b.parameters_missing) - set(a.parameters_missing))
    came = sorted(set(a.parameters_missing) - set(b.parameters_missing))
    if lost or came:
        yield Difference(
            test=test,
            what="gradients missing",
            base=_few(came) or "0",
            new=_few(lost) or "0",
            kind="worse" if lost else "better",
        )


def _figure_differences(
    test: str, a: list[dict[str, float]], b: list[dict[str, float]], drift: float
) -> Iterator[Difference]:
    time = _time_difference(test, a, b, drift)
    if time is not None:
        yield time
    for name in ("added_mib", "peak_gpu_mib"):  # peak_mib includes memory inherited by the fork
        x, y = _middle(a, name), _middle(b, name)
        if x is not None and y is not None and abs(y - x) > max(HEAVIER * x, HEAVIER_MIB, _noise(name, a, b)):
            yield Difference(test=test, what=name, base=f"{x:.0f}", new=f"{y:.0f}", kind="worse" if y > x else "better")
    recorded = sorted({n for f in (*a, *b) for n in f if n == "loss" or n.startswith("property.")})
    for name in recorded:
        x, y = _middle(a, name), _middle(b, name)
        if x is None or y is None:
            continue
        values = [f[name] for f in (*a, *b) if name in f]
        if abs(y - x) > max(LOSS * max(abs(x), abs(y)), _noise(name, a, b)) and len(values) > 1:
            kind: Kind = "changed" if name != "loss" else "worse" if y > x else "better"
            yield Difference(test=test, what=name, base=f"{x:.6g}", new=f"{y:.6g}", kind=kind)


def _time_difference(
    test: str, a: list[dict[str, float]], b: list[dict[str, float]], drift: float
) -> Difference | None:
    a, b = ([f for f in side if f.get("steps", 0) >= FEW_STEPS and f.keys() >= _TIMES] for side in (a, b))
    if not a or not b:
        return None
    x, y = (statistics.median(f["step_ms"] for f in side) for side in (a, b))
    (fast, faster, drift_of_faster), (slow, slower, drift_of_slower) = sorted(
        [(x, a, 1.0), (y / drift, b, drift)], key=lambda side: side[0]
    )
    if fast <= 0:
        return None
    noise = max(SLOWER, *(_spread([f["step_ms"] for f in side]) / m for side, m in ((a, x), (b, y))))
    if slow / fast - 1 <= noise:
        return None
    # Quartiles that overlap are one distribution, as far as these steps show.
    low = min(f["step_ms_low"] for f in slower) / drift_of_slower
    high = max(f["step_ms_high"] for f in faster) / drift_of_faster
    if low <= high:
        return None
    kind: Kind = "worse" if slower is b else "better"
    factor = f", where others took {drift:.2f} times" if abs(drift - 1) > 0.02 else ""
    return Difference(
        test=test, what="step", base=f"{x:.1f} ms", new=f"{y:.1f} ms ({y / x - 1:+.0%}{factor})", kind=kind
    )


def _drift(base: Sequence[Run], new: Sequence[Run]) -> float:
    """Return the factor by which the new run's machine was slower: the median over tests; 1 for fewer than `FEW_TESTS`."""
    ratios = []
    for test in set(base[0]) & set(new[0]):
        sides = [[run[test].figures for run in side if test in run] for side in (base, new)]
        x, y = (_middle([f for f in side if f.get("steps", 0) >= FEW_STEPS], "step_ms") for side in sides)
        if x and y:
            ratios.append(y / x)
    return statistics.median(ratios) if len(ratios) >= FEW_TESTS else 1.0


def _middle(figures: list[dict[str, float]], name: str) -> float | None:
    values = [f[name] for f in figures if name in f]
    return statistics.median(values) if values else None


def _noise(name: str, *sides: list[dict[str, float]]) -> float:
    """Return by how much the repeats of a run differ among themselves, at most."""
    return max(_spread([f[name] for f in side if name in f]) for side in sides)


def _spread(values: list[float]) -> float:
    return max(values) - min(values) if len(values) > 1 else 0.0


def _outcome(v: Verdict) -> str:
    return f"{v.outcome}{f' ({v.cause})' if v.cause else ''}{', expected' if v.expected else ''}"


def _cause(v: Verdict) -> str:
    return f"{v.cause} on {describe_ranks(v.ranks, v.world_size)} in {_function(v)}"


def _function(v: Verdict) -> str:
    """Return the function of the location: its line changes with every edit."""
    return v.where.rpartition(" in ")[2]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def as_markdown(found: list[Difference], names: tuple[str, str], tests: int) -> str:
    """Return the differences as Markdown, for a terminal or a pull request."""
    out = [markdown(sentence(found, names, tests)), ""]
    if found:
        out += ["| test | what | before | now | |", "| --- | --- | --- | --- | --- |"]
        out += [
            "| " + " | ".join((cell(inline(d.test)), cell(inline(d.what)), code(d.base), code(d.new), d.kind)) + " |"
            for d in found
        ]
    return "\n".join(out) + "\n"


def sentence(found: list[Difference], names: tuple[str, str], tests: int) -> str:
    """'Of 44 tests 2 are worse in B than in A: ...'."""
    worse = list(dict.fromkeys(d.test for d in found if d.kind == "worse"))
    if not worse:
        rest = f"; {len(found)} differences" if found else ""
        return f"Nothing is worse in {names[1]} than in {names[0]}, of {tests} tests{rest}."
    verb = "is" if len(worse) == 1 else "are"
    shown = ", ".join(worse[:5]) + (", ..." if len(worse) > 5 else "")
    return f"Of {tests} tests {len(worse)} {verb} worse in {names[1]} than in {names[0]}: {shown}."
