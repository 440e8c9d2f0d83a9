"""What verdicts by scenario show: groups of rows, and which of them ran, passed and failed. The tree and the hypotheses use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.decision import REFUSED
from pytest_nsa.diagnosis.verdict import Verdict
from tests_cpu.plan.scenarios import TABLE, Scenario

Verdicts = Mapping[str, Verdict]


def _rows(chosen: Callable[[Scenario], bool]) -> tuple[str, ...]:
    """Return the names of rows, at every size."""
    return tuple(name for row in TABLE if chosen(row) for name in dict.fromkeys((row.name, row.name_on_cpu)) if name)


def _in_one_process(row: Scenario, *, checkpointing: bool) -> bool:
    is_checkpointed = row.overrides.get("train.gradient_checkpointing", True)
    return row.parallel == "none" and not row.check and is_checkpointed is checkpointing


ONE_STEP, GLOO, STATIC = "ddp_onestep_trace", "ddp_gloo_sanity", "ddp_static_graph"
TOGETHER = (ONE_STEP, GLOO)
BRANCHES = {name: f"branch_{name}_only" for name in ("cmp", "sel", "win")}
HALVES = {"gc_bisect_layers_0_5": "layers 0 to 5", "gc_bisect_layers_6_11": "layers 6 to 11"}
ONE_PROCESS = ("gc_baseline_full", *HALVES)
CORE = (*TOGETHER, *BRANCHES.values(), STATIC, *ONE_PROCESS)
LONG = ("stability_100", "fsdp_synthetic_200", "fsdp_fineweb_300", "fsdp_diagnosed_500")
EVERY_NAME = frozenset(_rows(lambda row: True))

# Controls: each differs from rows that fail in the one thing that a hypothesis blames.
WITH_CHECKPOINTING = _rows(lambda row: _in_one_process(row, checkpointing=True))
WITHOUT_CHECKPOINTING = _rows(lambda row: _in_one_process(row, checkpointing=False))
VANILLA = _rows(lambda row: row.overrides.get("model.attention") == "dense")
STOPPED_GATES = _rows(lambda row: row.overrides.get("model.stop_gate_gradient") is True)
FIND_UNUSED = ("find_unused_parameters",)
WITHOUT_P2P = ("nccl_p2p_disabled",)

CHECKS = "tests_cpu/plan/health.py:"  # where rows assert what they alone assert
# Backward itself has ended.
_AFTER_BACKWARD = frozenset({"unused_parameters", "silent_divergence", "nan_loss"})
_OF_THE_RANKS = frozenset(cause.name for cause in CAUSES.values() if cause.of_the_rank)


def ran(verdicts: Verdicts, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that tell something: not what was skipped, cut off, or had no ranks."""
    told = (n for n in names if n in verdicts and verdicts[n].outcome not in ("SKIP", "INTERRUPTED"))
    return [n for n in told if verdicts[n].rule != REFUSED]


def absent(verdicts: Verdicts, names: Iterable[str]) -> list[str]:
    """Return the others."""
    told = ran(verdicts, names)
    return [n for n in names if n not in told]


def failing(verdicts: Verdicts, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that ran and failed, and were not expected to."""
    return [n for n in ran(verdicts, names) if verdicts[n].failed]


def passing(verdicts: Verdicts, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that passed."""
    return [n for n in ran(verdicts, names) if verdicts[n].outcome == "PASS"]


def backward_fails(verdicts: Verdicts, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` whose backward does not end, or raises."""
    return [n for n in failing(verdicts, names) if verdicts[n].cause not in _AFTER_BACKWARD]


def lone_branch(verdicts: Verdicts) -> str:
    """Return the branch that fails while each of the others passes; '' without one."""
    wrong = [branch for branch, name in BRANCHES.items() if failing(verdicts, [name])]
    right = passing(verdicts, BRANCHES.values())
    return wrong[0] if len(wrong) == 1 and len(right) == len(BRANCHES) - 1 else ""


def is_of_the_ranks(verdict: Verdict) -> bool:
    """Return whether a failure is an explanation by itself, with which the model has nothing to do.

    An ordinary failure that all ranks share, such as an exception in backward, is the model's.
    """
    is_shared = verdict.cause == "assertion" and len(verdict.ranks) >= verdict.world_size
    return verdict.cause in _OF_THE_RANKS and not is_shared


def found_by_its_check(verdicts: Verdicts, name: str) -> str:
    """Return what a row's own check found; '' where it did not run, found nothing, or failed in the backward of all others."""
    verdict = verdicts.get(name)
    if verdict is None or not verdict.failed or verdict.cause != "assertion" or CHECKS not in verdict.where:
        return ""
    asserted, _, text = verdict.reason.partition(": ")
    return text if asserted == "AssertionError" else ""


def same_backend(verdicts: Verdicts) -> bool:
    """Whether the step and its repetition on gloo ran on one backend: then nothing is known of the transport."""
    return ONE_STEP in verdicts and GLOO in verdicts and verdicts[ONE_STEP].backend == verdicts[GLOO].backend


def contradicts(verdicts: Verdicts) -> bool:
    """Whether one and the same step, on one backend, failed once and passed once: the failure comes and goes."""
    return same_backend(verdicts) and {verdicts[ONE_STEP].outcome, verdicts[GLOO].outcome} > {"PASS"}
