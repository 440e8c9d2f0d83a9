"""The plan's hypotheses on why a step may hang: the scenarios that speak of each, its controls, and what these show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tests_cpu.plan.reading import (
    BRANCHES,
    CORE,
    FIND_UNUSED,
    GLOO,
    LONG,
    ONE_PROCESS,
    ONE_STEP,
    STATIC,
    STOPPED_GATES,
    VANILLA,
    WITH_CHECKPOINTING,
    WITHOUT_CHECKPOINTING,
    WITHOUT_P2P,
    Verdicts,
    absent,
    backward_fails,
    contradicts,
    failing,
    lone_branch,
    passing,
    ran,
    same_backend,
)

# Production's criteria: a rank's memory with checkpointing, and the tokens that all ranks train on.
MAX_GPU_BYTES, MIN_TOKENS_PER_S = 30e9, 50

CONFIRMED, REFUTED, NOT_TESTED = "confirmed", "refuted", "not tested"


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """``judge`` is asked when all of ``scenarios`` have run; it reads the controls that have, and returns the state and what it
    rests on.
    """

    text: str
    scenarios: tuple[str, ...]
    judge: Callable[[Verdicts], tuple[str, str]]


def table(verdicts: Verdicts) -> tuple[tuple[str, str, str], ...]:
    """Return (hypothesis, state, what it rests on) of each."""
    rows = []
    for h in HYPOTHESES:
        lacking = absent(verdicts, h.scenarios)
        state, why = (NOT_TESTED, f"did not run: {', '.join(lacking)}") if lacking else h.judge(verdicts)
        rows.append((h.text, state, why))
    return tuple(rows)


def _fails_in_one_process(verdicts: Verdicts, without: str) -> tuple[str, str] | None:
    """Return the refutation of what several ranks alone have, where backward fails in one process."""
    alone = backward_fails(verdicts, (*WITH_CHECKPOINTING, *WITHOUT_CHECKPOINTING))
    return (REFUTED, f"it fails in one process too, {without}: {', '.join(alone)}") if alone else None


def _with(verdicts: Verdicts, names: tuple[str, ...]) -> str:
    """Return how controls ended: '; vanilla_attention passes'; '' where they did not run."""
    parts = [f"{n} {'fails too' if verdicts[n].failed else 'passes'}" for n in ran(verdicts, names)]
    return "".join(f"; {part}" for part in parts)


def _dynamic(verdicts: Verdicts) -> tuple[str, str]:
    causes = {v.cause for v in verdicts.values() if v.failed} & {"static_graph_changed", "data_dependent_branch"}
    if causes:
        return CONFIRMED, ", ".join(sorted(causes))
    if contradicts(verdicts):
        return NOT_TESTED, "the step fails and passes by turns: repeat it"
    alone = _fails_in_one_process(verdicts, "where no DDP follows the graph")
    if alone is not None:
        return alone
    if verdicts[ONE_STEP].failed and not verdicts[STATIC].failed:
        return CONFIRMED, f"{STATIC} passes where {ONE_STEP} fails{_with(verdicts, FIND_UNUSED)}"
    return REFUTED, f"{STATIC} ends as {ONE_STEP} does" if verdicts[ONE_STEP].failed else f"{ONE_STEP} passes"


def _one_branch(verdicts: Verdicts) -> tuple[str, str]:
    wrong = failing(verdicts, BRANCHES.values())
    if 0 < len(wrong) < len(BRANCHES):
        right = ", ".join(passing(verdicts, BRANCHES.values()))
        return CONFIRMED, f"{', '.join(wrong)} fails alone; {right} passes{_with(verdicts, VANILLA)}"
    shared = f"{', '.join(wrong)} fail alike: what they share is at fault{_with(verdicts, VANILLA)}"
    return REFUTED, shared if wrong else "each passes alone"


def _together(verdicts: Verdicts) -> tuple[str, str]:
    wrong = failing(verdicts, BRANCHES.values())
    if wrong:
        return REFUTED, f"a branch fails alone already: {', '.join(wrong)}"
    if not verdicts[ONE_STEP].failed:
        return REFUTED, "all together pass"
    against = failing(verdicts, (*VANILLA, *STOPPED_GATES))
    if against:
        return (
            REFUTED,
            f"each branch alone passes, all together fail, but without their gates' gradient too: {', '.join(against)}",
        )
    return CONFIRMED, f"each branch alone passes, all together fail{_with(verdicts, STOPPED_GATES)}"


def _checkpointing(verdicts: Verdicts) -> tuple[str, str]:
    wrong = backward_fails(verdicts, WITH_CHECKPOINTING)
    if not wrong:
        return REFUTED, "backward ends in one process, with each range of layers"
    without = backward_fails(verdicts, WITHOUT_CHECKPOINTING)
    if without:
        return REFUTED, f"it fails without checkpointing too: {', '.join(without)}"
    branch = lone_branch(verdicts)
    if branch:
        right = ", ".join(passing(verdicts, BRANCHES.values()))
        return REFUTED, f"branch {branch} alone fails; {right}, checkpointed alike, pass"
    right = passing(verdicts, (*WITHOUT_CHECKPOINTING, *ONE_PROCESS))
    if not right:
        return NOT_TESTED, f"{', '.join(wrong)} fail; no row without checkpointing ran (--phases 8)"
    return CONFIRMED, f"{', '.join(wrong)} fail, {', '.join(right)} pass{_with(verdicts, VANILLA)}"


def _transport(verdicts: Verdicts) -> tuple[str, str]:
    alone = _fails_in_one_process(verdicts, "where there is no transport")
    if alone is not None:
        return alone
    if same_backend(verdicts):
        return NOT_TESTED, f"both ran on {verdicts[GLOO].backend}"
    if not verdicts[ONE_STEP].failed:
        return REFUTED, f"{ONE_STEP} passes on {verdicts[ONE_STEP].backend}"
    if verdicts[GLOO].failed:
        return REFUTED, f"it fails on gloo, too: {GLOO}"
    return CONFIRMED, f"{GLOO}, the same step, passes{_with(verdicts, WITHOUT_P2P)}"


def _unused(verdicts: Verdicts) -> tuple[str, str]:
    found = [name for name, v in verdicts.items() if v.failed and v.cause == "unused_parameters"]
    if found:
        return CONFIRMED, ", ".join(found)
    looks = passing(verdicts, FIND_UNUSED)
    if verdicts[ONE_STEP].failed and looks:
        return CONFIRMED, f"{looks[0]}, which looks for them, passes where {ONE_STEP} fails"
    return REFUTED, f"no scenario names one{_with(verdicts, FIND_UNUSED)}"


def _order(verdicts: Verdicts) -> tuple[str, str]:
    """By the order in which the trace of gradients saw each rank's become ready; one bucket after the other waits for that."""
    orders = {name: int(v.figures.get("ready_orders", 0)) for name, v in verdicts.items() if ran(verdicts, [name])}
    apart = [name for name, n in orders.items() if n > 1]
    wrong = failing(verdicts, apart)
    if wrong:
        return CONFIRMED, f"the ranks' gradients came in {orders[wrong[0]]} orders in {', '.join(wrong)}"
    if apart:
        return REFUTED, f"they come in another order in {', '.join(apart)}, which passes all the same"
    alike = [name for name, n in orders.items() if n == 1]
    if not alike:
        return NOT_TESTED, "no backward of several ranks ended with its trace of gradients"
    few = f"{', '.join(alike[:5])}{f' and {len(alike) - 5} more' if len(alike) > 5 else ''}"
    return REFUTED, f"they come in one order on all ranks in {few}"


HYPOTHESES = (
    Hypothesis(text="the graph changes from step to step", scenarios=(ONE_STEP, STATIC), judge=_dynamic),
    Hypothesis(text="a step leaves parameters unused", scenarios=(ONE_STEP,), judge=_unused),
    Hypothesis(
        text="one branch's own backward does not signal its gradients",
        scenarios=(*BRANCHES.values(),),
        judge=_one_branch,
    ),
    Hypothesis(text="the branches depend on each other", scenarios=(ONE_STEP, *BRANCHES.values()), judge=_together),
    Hypothesis(
        text="checkpointing and the custom backward do not go together", scenarios=ONE_PROCESS, judge=_checkpointing
    ),
    Hypothesis(text="gradients become ready in another order on some rank", scenarios=(ONE_STEP,), judge=_order),
    Hypothesis(text="NCCL's transport stalls", scenarios=(ONE_STEP, GLOO), judge=_transport),
)


def readiness(verdicts: Verdicts) -> str:
    """Return whether the run shows that the model is ready for production, and by which criteria."""
    lacking = absent(verdicts, CORE)
    failed = [name for name, v in verdicts.items() if v.failed]
    missing = sum(len(v.parameters_missing) > 0 for v in verdicts.values() if v.failed)
    reasons = []
    if failed:
        reasons.append(f"{len(failed)} scenarios fail" if len(failed) > 1 else f"{failed[0]} fails")
    if missing:
        reasons.append(f"gradients are missing in {missing} of them")
    if lacking:
        reasons.append(f"{len(lacking)} of the {len(CORE)} of phases 1 to 5 did not run")
    measured = _measured(verdicts)
    if measured is None:
        reasons.append("memory and throughput at production size were not measured (no GPU)")
    else:
        reasons += measured.unmet
    if reasons:
        return f"Not ready for production: {'; '.join(reasons)}."
    told = "" if measured is None else f"; {measured.said}"
    return f"Ready for production: every scenario passes, no gradient is missing, at production size on a GPU{told}."


class _Measured(NamedTuple):
    said: str
    unmet: list[str]


def _measured(verdicts: Verdicts) -> _Measured | None:
    """Return production's criteria as the long scenarios measured them on a GPU; None where none did."""
    figures = [verdicts[name].figures for name in LONG if name in verdicts]
    peaks = [f["peak_gpu_mib"] * (1 << 20) for f in figures if f.get("peak_gpu_mib")]
    rates = [f["tokens_per_s"] for f in figures if f.get("peak_gpu_mib") and "tokens_per_s" in f]
    if not peaks or not rates:
        return None
    peak, rate = max(peaks), min(rates)
    unmet = []
    if peak >= MAX_GPU_BYTES:
        unmet.append(f"a rank takes {peak / 1e9:.1f} GB, where {MAX_GPU_BYTES / 1e9:.0f} are allowed")
    if rate <= MIN_TOKENS_PER_S:
        unmet.append(f"{rate:,.0f} tokens/s, where {MIN_TOKENS_PER_S} are needed")
    return _Measured(f"at most {peak / 1e9:.1f} GB a rank, at least {rate:,.0f} tokens/s", unmet)
