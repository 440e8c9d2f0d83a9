"""The plan's hypotheses on why a step may hang: which scenarios speak of each, and whether these confirm or refute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pytest_nsa.diagnosis.verdict import Verdict

BRANCHES = ("branch_cmp_only", "branch_sel_only", "branch_win_only")
ONE_PROCESS = ("gc_baseline_full", "gc_bisect_layers_0_5", "gc_bisect_layers_6_11")
ONE_STEP, GLOO, STATIC = "ddp_onestep_trace", "ddp_gloo_sanity", "ddp_static_graph"
LONG = ("stability_100", "fsdp_synthetic_200", "fsdp_fineweb_300", "fsdp_diagnosed_500")
# Production's criteria: a rank's memory with checkpointing, and the tokens that all ranks train on.
MAX_GPU_BYTES, MIN_TOKENS_PER_S = 30e9, 50
CORE = (ONE_STEP, GLOO, *BRANCHES, STATIC, *ONE_PROCESS)

Verdicts = Mapping[str, Verdict]
CONFIRMED, REFUTED, NOT_TESTED = "confirmed", "refuted", "not tested"


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """``judge`` is asked when all of ``scenarios`` have run; it returns the state and what it rests on."""

    text: str
    scenarios: tuple[str, ...]
    judge: Callable[[Verdicts], tuple[str, str]]


def table(verdicts: Verdicts) -> tuple[tuple[str, str, str], ...]:
    """Return (hypothesis, state, what it rests on) of each."""
    rows = []
    for h in HYPOTHESES:
        absent = [
            name for name in h.scenarios if name not in verdicts or verdicts[name].outcome in ("SKIP", "INTERRUPTED")
        ]
        state, why = (NOT_TESTED, f"did not run: {', '.join(absent)}") if absent else h.judge(verdicts)
        rows.append((h.text, state, why))
    return tuple(rows)


def same_backend(verdicts: Verdicts) -> bool:
    """Whether the step and its repetition on gloo ran on one backend: then nothing is known of the transport."""
    return ONE_STEP in verdicts and GLOO in verdicts and verdicts[ONE_STEP].backend == verdicts[GLOO].backend


def contradicts(verdicts: Verdicts) -> bool:
    """Whether one and the same step, on one backend, failed once and passed once: the failure comes and goes."""
    return same_backend(verdicts) and {verdicts[ONE_STEP].outcome, verdicts[GLOO].outcome} > {"PASS"}


def _failing(verdicts: Verdicts, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if verdicts[name].failed]


def _dynamic(verdicts: Verdicts) -> tuple[str, str]:
    causes = {v.cause for v in verdicts.values() if v.failed} & {"static_graph_changed", "data_dependent_branch"}
    if causes:
        return CONFIRMED, ", ".join(sorted(causes))
    if contradicts(verdicts):
        return NOT_TESTED, "the step fails and passes by turns: repeat it"
    if verdicts[ONE_STEP].failed and not verdicts[STATIC].failed:
        return CONFIRMED, f"{STATIC} passes where {ONE_STEP} fails"
    return REFUTED, f"{STATIC} ends as {ONE_STEP} does" if verdicts[ONE_STEP].failed else f"{ONE_STEP} passes"


def _one_branch(verdicts: Verdicts) -> tuple[str, str]:
    failing = _failing(verdicts, BRANCHES)
    if 0 < len(failing) < len(BRANCHES):
        return CONFIRMED, f"{', '.join(failing)} fails alone"
    return REFUTED, "all three fail alone: what they share is at fault" if failing else "each passes alone"


def _together(verdicts: Verdicts) -> tuple[str, str]:
    if _failing(verdicts, BRANCHES):
        return REFUTED, "a branch fails alone already"
    return (
        (CONFIRMED, "each branch passes alone, all together fail")
        if verdicts[ONE_STEP].failed
        else (REFUTED, "all together pass")
    )


def _checkpointing(verdicts: Verdicts) -> tuple[str, str]:
    failing = _failing(verdicts, ONE_PROCESS)
    return (
        (CONFIRMED, ", ".join(failing))
        if failing
        else (REFUTED, "backward ends in one process, with each range of layers")
    )


def _transport(verdicts: Verdicts) -> tuple[str, str]:
    if same_backend(verdicts):
        return NOT_TESTED, f"both ran on {verdicts[GLOO].backend}"
    if not verdicts[ONE_STEP].failed:
        return REFUTED, f"{ONE_STEP} passes on {verdicts[ONE_STEP].backend}"
    return (REFUTED, "it fails on gloo, too") if verdicts[GLOO].failed else (CONFIRMED, "the same step passes on gloo")


def _unused(verdicts: Verdicts) -> tuple[str, str]:
    found = [name for name, v in verdicts.items() if v.failed and v.cause == "unused_parameters"]
    return (CONFIRMED, ", ".join(found)) if found else (REFUTED, "no scenario names one")


HYPOTHESES = (
    Hypothesis(text="the graph changes from step to step", scenarios=(ONE_STEP, STATIC), judge=_dynamic),
    Hypothesis(text="a step leaves parameters unused", scenarios=(ONE_STEP,), judge=_unused),
    Hypothesis(text="one branch's own backward does not signal its gradients", scenarios=BRANCHES, judge=_one_branch),
    Hypothesis(text="the branches depend on each other", scenarios=(ONE_STEP, *BRANCHES), judge=_together),
    Hypothesis(
        text="checkpointing and the custom backward do not go together", scenarios=ONE_PROCESS, judge=_checkpointing
    ),
    Hypothesis(text="NCCL's transport stalls", scenarios=(ONE_STEP, GLOO), judge=_transport),
)


def readiness(verdicts: Verdicts) -> str:
    """Return whether the run shows that the model is ready for production, and by which criteria."""
    absent = [name for name in CORE if name not in verdicts or verdicts[name].outcome in ("SKIP", "INTERRUPTED")]
    failed = [name for name, v in verdicts.items() if v.failed]
    missing = sum(len(v.parameters_missing) > 0 for v in verdicts.values() if v.failed)
    reasons = []
    if failed:
        reasons.append(f"{len(failed)} scenarios fail" if len(failed) > 1 else f"{failed[0]} fails")
    if missing:
        reasons.append(f"gradients are missing in {missing} of them")
    if absent:
        reasons.append(f"{len(absent)} of the {len(CORE)} of phases 1 to 5 did not run")
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
