"""Verdicts to decision: the plan's tree, a pure function over the scenarios' verdicts. The plugin calls it by its hook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.decision import Decision, advice_of, count, nothing_wrong, sentence, surest
from pytest_nsa.diagnosis.verdict import Verdict
from tests_cpu.plan import hypotheses

CONTRADICTORY = 0.3
BRANCHES = {"cmp": "branch_cmp_only", "sel": "branch_sel_only", "win": "branch_win_only"}
ONE_PROCESS = ("gc_baseline_full", "gc_bisect_layers_0_5", "gc_bisect_layers_6_11")
ALL_TOGETHER = ("ddp_onestep_trace", "ddp_gloo_sanity")

# Causes that are an explanation by themselves: the tree below reasons about backward and would look in the wrong place.
_OF_THE_RANK = frozenset(cause.name for cause in CAUSES.values() if cause.of_the_rank)


def is_of_the_plan(verdicts: Mapping[str, Verdict]) -> bool:
    """Return whether scenarios that the tree uses were run."""
    return bool(verdicts.keys() & {*BRANCHES.values(), *ONE_PROCESS, *ALL_TOGETHER, "ddp_static_graph"})


def decide(verdicts: Mapping[str, Verdict]) -> Decision:
    """Return the decision over verdicts by scenario. The path reports scenarios that were not run; they decide nothing."""
    failed = {name: v for name, v in verdicts.items() if v.failed}
    judged: dict[str, Any] = {"hypotheses": hypotheses.table(verdicts), "readiness": hypotheses.readiness(verdicts)}
    if not failed:
        return replace(nothing_wrong(verdicts), readiness=judged["readiness"])
    path: list[str] = []
    name, first = _telling(failed)
    action = _tree(verdicts, path)
    if not action:
        action, step = advice_of(failed, name, first)
        path.append(step)
    confidence = CONTRADICTORY if hypotheses.contradicts(verdicts) else first.confidence
    return Decision(
        sentence=sentence(verdicts, failed, name, first),
        action=action,
        path=tuple(path),
        confidence=confidence,
        **judged,
    )


def _telling(failed: Mapping[str, Verdict]) -> tuple[str, Verdict]:
    """Return the most specific verdict and its scenario: that of the only branch that fails, else the surest."""
    alone = [BRANCHES[b] for b in BRANCHES if BRANCHES[b] in failed]
    if len(alone) == 1:
        return alone[0], failed[alone[0]]
    return surest(failed)


def _tree(verdicts: Mapping[str, Verdict], path: list[str]) -> str:
    """Return the action that the plan's tree gives, '' when no branch fits; append each question and its answer to ``path``."""
    failing = [v for v in verdicts.values() if v.failed]
    shared = {v.cause for v in failing}
    if len(shared) == 1 and shared <= _OF_THE_RANK:
        path.append(
            f"is one cause, of the ranks and not of the model, behind every failure? yes: {shared.pop()}; the tree ends here"
        )
        return ""
    hung = [n for n in ONE_PROCESS if n in verdicts and verdicts[n].failed]
    path.append(f"does backward fail in one process? {_answer(verdicts, ONE_PROCESS, hung)}")
    if hung:
        layers = {"gc_bisect_layers_0_5": "layers 0 to 5", "gc_bisect_layers_6_11": "layers 6 to 11"}
        halves = [layers[n] for n in hung if n in layers]
        which = f", {halves[0]}" if len(halves) == 1 else ""
        return f"look at gradient checkpointing{which}: reentrant or not, boundaries, in-place writes in a checkpointed region"
    if hypotheses.contradicts(verdicts):
        pair = " and ".join(f"{n} ({verdicts[n].outcome})" for n in ALL_TOGETHER)
        path.append(
            f"does one step on one backend end the same way twice? no: {pair}, both on {verdicts[ALL_TOGETHER[0]].backend}"
        )
        return "contradictory: repeat the run; the same step fails and passes by turns, so nothing follows from what passes"
    baseline = [n for n in ALL_TOGETHER if n in verdicts and verdicts[n].failed]
    static = verdicts.get("ddp_static_graph")
    path.append(f"does a static graph pass where plain DDP fails? {_passes(static)}")
    if baseline and static is not None and static.outcome == "PASS":
        return "enable static_graph in production (NSA_DDP_STATIC_GRAPH=1); it requires that every step touches every parameter"
    alone = [b for b, n in BRANCHES.items() if n in verdicts and verdicts[n].failed]
    path.append(
        f"does one branch alone fail? {_answer(verdicts, tuple(BRANCHES.values()), [BRANCHES[b] for b in alone])}"
    )
    if len(alone) == 1:
        v = verdicts[BRANCHES[alone[0]]]
        return f"fix the backward of branch {alone[0]}" + (f" ({v.where})" if v.where else "")
    if baseline and not alone and all(n in verdicts for n in BRANCHES.values()):
        return "look at the gates: each branch alone passes, all together fail"
    missing = [set(v.parameters_missing) for v in failing if v.parameters_missing]
    common = set.intersection(*missing) if len(missing) > 1 else set()
    path.append(
        f"are the same parameters missing every time? {'yes: ' + ', '.join(sorted(common)[:5]) if common else 'no'}"
    )
    if common and all(m == common for m in missing):
        owner = sorted(common)[0].rpartition(".")[0]
        return f"look for in-place operations in the module that owns them ({owner})"
    gloo = verdicts.get("ddp_gloo_sanity")
    if gloo is not None and hypotheses.same_backend(verdicts):
        path.append(f"does gloo fail too? it cannot tell: both ran on {gloo.backend}")
        return ""
    path.append(
        f"does gloo fail too? {'yes' if gloo is not None and gloo.failed else 'no' if gloo is not None else 'not run'}"
    )
    if gloo is None or shared <= _OF_THE_RANK:
        return ""
    if gloo.failed:
        return "look at the autograd graph: the transport is not at fault"
    return "look at NCCL's transport: the same step passes on gloo"


def _answer(verdicts: Mapping[str, Verdict], names: tuple[str, ...], failing: list[str]) -> str:
    run = [n for n in names if n in verdicts]
    if not run:
        return "not run"
    return f"yes: {', '.join(failing)}" if failing else f"no ({count(len(run), 'scenario')})"


def _passes(verdict: Verdict | None) -> str:
    return "not run" if verdict is None else f"{'yes' if verdict.outcome == 'PASS' else 'no'} ({verdict.outcome})"
