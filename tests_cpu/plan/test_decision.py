"""The plan's tree over verdicts: a pure function, so its tests are tables."""

from __future__ import annotations

import pytest

from pytest_nsa.diagnosis import decision as without_a_plan
from pytest_nsa.diagnosis.verdict import Verdict
from tests_cpu.plan.decision import decide

PLAN = (
    "ddp_onestep_trace", "ddp_gloo_sanity", "branch_cmp_only", "branch_sel_only", "branch_win_only", "ddp_static_graph",
    "gc_baseline_full", "gc_bisect_layers_0_5", "gc_bisect_layers_6_11",
)  # fmt: skip
TOGETHER = ("ddp_onestep_trace", "ddp_gloo_sanity")
BRANCHES = PLAN[2:5]


def plan(*failing: str, cause: str = "lock_deadlock", **fields: object) -> dict[str, Verdict]:
    """Return the verdicts of the whole plan: the named scenarios hang, the others pass."""
    return {
        name: Verdict(scenario=name, nodeid=name, outcome="HANG", cause=cause, ranks=(1,), confidence=0.9, **fields)  # type: ignore[arg-type]
        if name in failing
        else Verdict(scenario=name, nodeid=name, outcome="PASS")
        for name in PLAN
    }


@pytest.mark.parametrize(
    ("failing", "action"),
    [
        (("gc_baseline_full", "gc_bisect_layers_0_5", *TOGETHER), "look at gradient checkpointing, layers 0 to 5"),
        (("gc_baseline_full", "gc_bisect_layers_0_5", "gc_bisect_layers_6_11"), "look at gradient checkpointing:"),
        ((*TOGETHER, *BRANCHES), "enable static_graph in production"),
        ((*TOGETHER, "branch_sel_only", "ddp_static_graph"), "fix the backward of branch sel"),
        ((*TOGETHER, "ddp_static_graph"), "look at the gates"),
        ((*TOGETHER, *BRANCHES, "ddp_static_graph"), "look at the autograd graph"),
        (("ddp_onestep_trace", *BRANCHES, "ddp_static_graph"), "look at NCCL's transport"),
    ],
)
def test_each_branch_of_the_tree(failing: tuple[str, ...], action: str) -> None:
    decision = decide(plan(*failing))
    assert decision.action.startswith(action)
    assert decision.path


def test_the_same_missing_parameters_every_time() -> None:
    failing = (*TOGETHER, *BRANCHES, "ddp_static_graph")
    missing = ("blocks.4.attn.gate.fc1.weight", "blocks.4.attn.gate.fc1.bias")
    decision = decide(plan(*failing, parameters_missing=missing))
    assert decision.action == "look for in-place operations in the module that owns them (blocks.4.attn.gate.fc1)"
    assert "are the same parameters missing every time? yes: blocks.4.attn.gate.fc1.bias" in decision.path[-1]


def test_one_cause_of_the_ranks_themselves_ends_the_tree() -> None:
    decision = decide(plan(*PLAN[:6], cause="rank_died", advice="look for who sent the signal", where="a.py:3 in f"))
    assert decision.action.startswith("look for who sent the signal (scenario ddp_onestep_trace, rank 1, a.py:3 in f)")
    assert "is one cause, of the ranks and not of the model, behind every failure? yes: rank_died" in decision.path[0]


def test_the_sentence_names_scenario_rank_line_and_cause() -> None:
    decision = decide(
        plan(*TOGETHER, "branch_sel_only", "ddp_static_graph", where="nsa/model/attention.py:7 in f", reason="it waits")
    )
    assert decision.sentence == (
        "branch_sel_only ends in HANG (lock_deadlock) on rank 1 at nsa/model/attention.py:7 in f: it waits. "
        "4 of 9 scenarios fail, all of them so."
    )


def test_a_run_without_failures_is_reported_as_such() -> None:
    assert decide(plan()).sentence == "Nothing is wrong: of 9 scenarios, 9 passed."
    expected = {"a": Verdict(nodeid="a", outcome="FAIL", expected=True), "b": Verdict(nodeid="b", outcome="SKIP")}
    assert decide(expected).sentence == "Nothing is wrong: of 2 tests, 1 failed as expected, 1 skipped."
    assert without_a_plan.decide({}).sentence == "Nothing was run on ranks."


def test_tests_that_are_no_scenarios_take_no_tree() -> None:
    verdict = Verdict(nodeid="t", outcome="FAIL", cause="rank_exited", ranks=(0,), advice="stay", confidence=0.9)
    decision = without_a_plan.decide({"t": verdict})
    assert decision.path == ("do the verdicts name one cause? yes: rank_exited",)
    assert decision.action.startswith("stay")
