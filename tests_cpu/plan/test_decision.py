"""The plan's tree over verdicts: a pure function, so its tests are tables.

More than 400 lines: a row per way through one tree.
"""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape

import pytest

from pytest_nsa.diagnosis import decision as without_a_plan
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.report.decision_tree import mermaid, way
from tests_cpu.plan.decision import CHECKPOINTING, decide
from tests_cpu.plan.hypotheses import table
from tests_cpu.plan.reading import WITHOUT_CHECKPOINTING

PLAN = (
    "ddp_onestep_trace", "ddp_gloo_sanity", "branch_cmp_only", "branch_sel_only", "branch_win_only", "ddp_static_graph",
    "gc_baseline_full", "gc_bisect_layers_0_5", "gc_bisect_layers_6_11",
)  # fmt: skip
TOGETHER = ("ddp_onestep_trace", "ddp_gloo_sanity")
BRANCHES = PLAN[2:5]


def plan(*failing: str, cause: str = "lock_deadlock", **fields: object) -> dict[str, Verdict]:
    """Return the verdicts of the whole plan, as on GPUs: the named scenarios hang, the others pass."""
    return {name: a_verdict(name, hangs=name in failing, cause=cause, **fields) for name in PLAN}


def a_verdict(name: str, *, hangs: bool, cause: str = "lock_deadlock", backend: str = "", **fields: object) -> Verdict:
    backend = backend or ("gloo" if name == "ddp_gloo_sanity" else "nccl")
    if not hangs:
        return Verdict(scenario=name, nodeid=name, outcome="PASS", backend=backend, figures={"ready_orders": 1.0})
    return Verdict(
        scenario=name, nodeid=name, outcome="HANG", cause=cause, ranks=(1,), confidence=0.9, backend=backend, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


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
    assert "is every failure the ranks' own, and not the model's? yes: rank_died" in decision.path[0]


def test_the_sentence_names_scenario_rank_line_and_cause() -> None:
    decision = decide(
        plan(*TOGETHER, "branch_sel_only", "ddp_static_graph", where="nsa/model/attention.py:7 in f", reason="it waits")
    )
    assert decision.sentence == (
        "branch_sel_only ends in HANG (lock_deadlock) on rank 1 at nsa/model/attention.py:7 in f: it waits. "
        "4 of 9 scenarios fail, all with this cause."
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


@pytest.mark.parametrize(
    ("failing", "confirmed", "refuted"),
    [
        ((*TOGETHER, *BRANCHES), "the graph changes from step to step", "NCCL's transport stalls"),
        (
            (*TOGETHER, "ddp_static_graph", "branch_sel_only"),
            "one branch's own backward",
            "the branches depend on each other",
        ),
        ((*TOGETHER, "ddp_static_graph"), "the branches depend on each other", "one branch's own backward"),
        ((*TOGETHER, "ddp_static_graph", *BRANCHES), "", "one branch's own backward"),
        (("gc_baseline_full", "gc_bisect_layers_6_11"), "checkpointing and the custom backward", "the graph changes"),
        (("ddp_onestep_trace", "ddp_static_graph", *BRANCHES), "NCCL's transport stalls", "the graph changes"),
        (("branch_cmp_only",), "one branch's own backward", "checkpointing"),
        (("branch_cmp_only", "branch_win_only"), "one branch's own backward", "NCCL's transport stalls"),
    ],
)
def test_hypotheses_are_confirmed_or_refuted(failing: tuple[str, ...], confirmed: str, refuted: str) -> None:
    found = decide(plan(*failing)).hypotheses
    by_state = {state: [text for text, s, _ in found if s == state] for state in ("confirmed", "refuted")}
    assert not confirmed or any(text.startswith(confirmed) for text in by_state["confirmed"]), found
    assert any(text.startswith(refuted) for text in by_state["refuted"]), found


@pytest.mark.parametrize("absent", PLAN)
def test_what_did_not_run_confirms_nothing(absent: str) -> None:
    verdicts = {name: v for name, v in plan(*TOGETHER, *BRANCHES).items() if name != absent}
    decision = decide(verdicts)
    silent = [why for _, state, why in decision.hypotheses if state == "not tested"]
    assert silent
    assert all(absent in why for why in silent)
    assert "1 of the 9 of phases 1 to 5 did not run" in decision.readiness


@pytest.mark.parametrize("first_fails", [True, False])
@pytest.mark.parametrize("others", [(), ("ddp_static_graph",), BRANCHES, ("branch_sel_only",)])
def test_a_step_that_fails_and_passes_on_one_backend_is_contradictory(
    first_fails: bool, others: tuple[str, ...]
) -> None:
    """On CPU both phases are gloo: a flake once gave 'enable static_graph in production'."""
    verdicts = {name: a_verdict(name, hangs=name in others, backend="gloo") for name in PLAN}
    one = TOGETHER[0] if first_fails else TOGETHER[1]
    verdicts[one] = a_verdict(one, hangs=True, backend="gloo")
    decision = decide(verdicts)
    assert decision.action.startswith("contradictory: repeat")
    assert decision.confidence < 0.5
    assert {text: state for text, state, _ in decision.hypotheses}["NCCL's transport stalls"] == "not tested"


def test_two_runs_of_gloo_say_nothing_of_the_transport() -> None:
    failing = (*TOGETHER, *BRANCHES, "ddp_static_graph")
    decision = decide({name: a_verdict(name, hangs=name in failing, backend="gloo") for name in PLAN})
    assert decision.path[-2] == "does gloo fail too? it cannot tell: both ran on gloo"


def test_ready_for_production_by_its_criteria() -> None:
    passing = plan()
    assert "were not measured (no GPU)" in decide(passing).readiness

    def measured(peak_mib: float, rate: float) -> dict[str, Verdict]:
        long = Verdict(nodeid="s", outcome="PASS", figures={"peak_gpu_mib": peak_mib, "tokens_per_s": rate})
        return {**passing, "stability_100": long}

    assert decide(measured(9000, 5120)).readiness == (
        "Ready for production: every scenario passes, no gradient is missing, at production size on a GPU; at most 9.4 GB a rank, "
        "at least 5,120 tokens/s."
    )
    assert decide(measured(29000, 5120)).readiness.endswith("a rank takes 30.4 GB, where 30 are allowed.")
    assert decide(measured(9000, 12)).readiness.endswith("12 tokens/s, where 50 are needed.")
    sick = measured(9000, 5120)
    sick["branch_sel_only"] = a_verdict("branch_sel_only", hangs=True, parameters_missing=("a",))
    assert decide(sick).readiness == (
        "Not ready for production: branch_sel_only fails; gradients are missing in 1 of them."
    )


@pytest.mark.parametrize(
    ("failing", "action"),
    [
        ((), "look at gradient checkpointing: reentrant or not"),
        (("gc_reentrant_one_process",), "look at gradient checkpointing: told by gc_reentrant_one_process"),
        (("gc_boundaries",), "look at gradient checkpointing: told by gc_boundaries"),
        (
            ("gc_boundaries", "gc_inplace_writes"),
            "take the write out of the checkpointed region: told by gc_inplace_writes",
        ),
    ],
)
def test_checkpointing_is_asked_its_questions_one_by_one(failing: tuple[str, ...], action: str) -> None:
    verdicts = plan("gc_baseline_full", "gc_bisect_layers_0_5", "gc_bisect_layers_6_11")
    assert "is it a write in place, into what the region did not make? not run (--phases 6)" in decide(verdicts).path
    for name in CHECKPOINTING:
        verdicts[name] = checked(name, hangs=name in failing)
    decision = decide(verdicts)
    assert decision.action.startswith(action)
    if failing:  # what a check has found ends the way
        assert decision.path == (
            f"has a check of checkpointing found the operation or the layer? yes: {failing[-1]}: told by {failing[-1]}",
        )
    else:
        assert [step.partition("? ")[2] for step in decision.path[1:]] == ["not run (--phases 8)", "no", "no", "no"]


def checked(name: str, *, hangs: bool) -> Verdict:
    """Return the verdict of a row by its own check: its assertion is in the module of checks."""
    fields = {"reason": f"AssertionError: told by {name}", "where": "tests_cpu/plan/health.py:9 in before_step"}
    return replace(a_verdict(name, hangs=hangs, cause="assertion"), **fields, ranks=(0,))  # type: ignore[arg-type]


def test_what_fails_in_backward_as_all_others_answers_no_question_of_checkpointing() -> None:
    """They run the same backward: a deadlock in it was once taken for an in-place write."""
    verdicts = plan("gc_baseline_full", "gc_bisect_layers_0_5", "gc_bisect_layers_6_11")
    verdicts |= {name: a_verdict(name, hangs=True, reason="it waits for a lock") for name in CHECKPOINTING}
    decision = decide(verdicts)
    assert decision.action.startswith("look at gradient checkpointing: reentrant or not")
    assert [step.partition("? ")[2] for step in decision.path[2:]] == [
        "it cannot tell: it ends in lock_deadlock, too"
    ] * 3


ONE_PROCESS = ("gc_baseline_full", "gc_bisect_layers_0_5", "gc_bisect_layers_6_11")
CHECKPOINTS = "checkpointing and the custom backward do not go together"


def states(verdicts: dict[str, Verdict]) -> dict[str, tuple[str, str]]:
    """Return (state, what it rests on) by hypothesis."""
    return {text: (state, why) for text, state, why in decide(verdicts).hypotheses}


def rows(names: tuple[str, ...], *, hangs: bool) -> dict[str, Verdict]:
    return {name: a_verdict(name, hangs=hangs, backend="gloo") for name in names}


def test_rows_without_checkpointing_that_fail_too_refute_it() -> None:
    """Selection's backward hangs in every process; before, checkpointing was blamed, 90% sure."""
    failing = (*TOGETHER, "branch_sel_only", "ddp_static_graph", *ONE_PROCESS)
    verdicts = plan(*failing) | rows(WITHOUT_CHECKPOINTING, hangs=True)
    decision = decide(verdicts)
    assert decision.action.startswith("fix the backward of branch sel")
    assert decision.path[0].endswith(f"and without checkpointing, which it is not: {', '.join(WITHOUT_CHECKPOINTING)}")
    found = states(verdicts)
    assert found[CHECKPOINTS] == (
        "refuted", f"it fails without checkpointing too: {', '.join(WITHOUT_CHECKPOINTING)}",
    )  # fmt: skip
    for text in ("the graph changes from step to step", "NCCL's transport stalls"):
        assert found[text][0] == "refuted"
        assert "it fails in one process too" in found[text][1]
        assert "gc_baseline_full" in found[text][1]


def test_the_only_branch_that_fails_is_named_though_all_rows_are_checkpointed() -> None:
    """As `make plan` runs it, without the controls of later phases."""
    verdicts = plan(*TOGETHER, "branch_sel_only", "ddp_static_graph", *ONE_PROCESS)
    assert decide(verdicts).action.startswith("fix the backward of branch sel")
    assert states(verdicts)[CHECKPOINTS] == (
        "refuted",
        "branch sel alone fails; branch_cmp_only, branch_win_only, checkpointed alike, pass",
    )
    spared = decide(verdicts | rows(WITHOUT_CHECKPOINTING, hangs=False))
    assert spared.action.startswith("fix the backward of branch sel, where its layers are checkpointed: one_process_")


def test_checkpointing_is_confirmed_by_what_passes_without_it_alone() -> None:
    verdicts = plan(*PLAN)
    unsure = decide(verdicts)
    assert unsure.action.startswith("look at gradient checkpointing")
    assert unsure.confidence <= 0.5
    assert states(verdicts)[CHECKPOINTS][0] == "not tested"
    verdicts |= rows(WITHOUT_CHECKPOINTING, hangs=False)
    sure = decide(verdicts)
    assert sure.action.startswith("look at gradient checkpointing")
    assert sure.confidence == 0.9
    assert states(verdicts)[CHECKPOINTS][0] == "confirmed"
    assert f"does it pass without checkpointing? yes: {', '.join(WITHOUT_CHECKPOINTING)}" in sure.path


@pytest.mark.parametrize(
    ("hangs", "action", "in_together"),
    [
        (False, "look at NSA's own backward (a.py:3 in f)", "confirmed"),
        (True, "look at what both models share", "refuted"),
    ],
)
def test_plain_attention_is_the_control_of_nsa(hangs: bool, action: str, in_together: str) -> None:
    vanilla = {"vanilla_attention": a_verdict("vanilla_attention", hangs=hangs)}
    verdicts = plan(*PLAN, where="a.py:3 in f") | rows(WITHOUT_CHECKPOINTING, hangs=True) | vanilla
    assert decide(verdicts).action.startswith(action)
    branches = states(verdicts)["one branch's own backward does not signal its gradients"]
    assert branches[0] == "refuted"
    assert branches[1].endswith("; vanilla_attention fails too" if hangs else "; vanilla_attention passes")
    together = plan(*TOGETHER, "ddp_static_graph") | vanilla
    assert states(together)["the branches depend on each other"][0] == in_together
    assert decide(together).action.startswith("look at the gates") is not hangs


def test_gates_whose_gradient_is_stopped_refute_the_gates() -> None:
    stopped = {"stop_gate_gradient": a_verdict("stop_gate_gradient", hangs=True)}
    verdicts = plan(*TOGETHER, "ddp_static_graph") | stopped
    assert not decide(verdicts).action.startswith("look at the gates")
    assert "nor is it the gates: stop_gate_gradient fails too" in " ".join(decide(verdicts).path)
    state, why = states(verdicts)["the branches depend on each other"]
    assert (state, "stop_gate_gradient" in why) == ("refuted", True)


def shared_failure(name: str, ranks: tuple[int, ...], world_size: int) -> Verdict:
    return Verdict(
        scenario=name, nodeid=name, outcome="FAIL", cause="assertion", ranks=ranks, world_size=world_size, confidence=0.95,
        reason="RuntimeError: no such kernel", where="a.py:3 in backward", backend="gloo",
    )  # fmt: skip


def test_what_all_ranks_raise_is_the_model_s_and_goes_through_the_tree() -> None:
    """Before, an assertion ended the tree: 'no rank is to blame'."""
    failing = (*TOGETHER, "branch_sel_only", "ddp_static_graph", *ONE_PROCESS)
    verdicts = plan() | {
        name: shared_failure(name, (0,) if name in ONE_PROCESS else (0, 1), 1 if name in ONE_PROCESS else 2)
        for name in failing
    }
    assert decide(verdicts).action == "fix the backward of branch sel (a.py:3 in backward)"
    of_a_rank = plan() | {name: shared_failure(name, (1,), 2) for name in failing[:4]}
    assert (
        decide(of_a_rank).path[0]
        == "is every failure the ranks' own, and not the model's? yes: assertion; the tree ends here"
    )


def test_a_criterion_that_one_row_misses_is_the_action() -> None:
    verdicts = plan() | {"batch_4": shared_failure("batch_4", (0, 1), 2)}
    assert decide(verdicts).action == "mend what batch_4 found: RuntimeError: no such kernel (a.py:3 in backward)"


def test_the_order_in_which_gradients_become_ready_is_a_hypothesis() -> None:
    text = "gradients become ready in another order on some rank"
    verdicts = plan(*TOGETHER)
    state, why = states(verdicts)[text]
    assert (state, why.startswith("they come in one order on all ranks in branch_cmp_only, ")) == ("refuted", True)
    apart = verdicts | {TOGETHER[0]: replace(verdicts[TOGETHER[0]], figures={"ready_orders": 2.0})}
    assert states(apart)[text] == ("confirmed", "the ranks' gradients came in 2 orders in ddp_onestep_trace")
    passes = plan() | {"accumulation": replace(plan()["branch_sel_only"], figures={"ready_orders": 2.0})}
    assert hypotheses_of(passes)[text] == (
        "refuted",
        "they come in another order in accumulation, which passes all the same",
    )
    stalled = {name: a_verdict(name, hangs=True) for name in PLAN}
    assert states(stalled)[text][0] == "not tested"


def hypotheses_of(verdicts: dict[str, Verdict]) -> dict[str, tuple[str, str]]:
    """Return them of a run in which nothing may fail: the decision has none then."""
    return {text: (state, why) for text, state, why in table(verdicts)}


def test_missing_on_one_rank_alone_is_said() -> None:
    lost = {"parameters_missing": ("blocks.4.attn.gate.fc2.weight", "blocks.4.attn.gate.fc1.bias")}
    verdicts = plan(*PLAN[:6], cause="unused_parameters", world_size=2, **lost)
    assert decide(verdicts).action.startswith(
        "look in the module that owns them (blocks.4.attn.gate), on rank 1 alone, for what"
    )
    assert states(verdicts)["a step leaves parameters unused"][0] == "confirmed"


def test_ranks_that_could_not_be_started_tell_nothing_of_the_model() -> None:
    refused = {
        name: Verdict(
            scenario=name, nodeid=name, outcome="FAIL", cause="unknown", rule="engine.refused",
            reason="the ranks could not be started: no room",
        )
        for name in PLAN
    }  # fmt: skip
    decision = decide(refused)
    assert decision.sentence == "The ranks could not be started: no room. 9 of 9 scenarios did not run."
    assert {state for _, state, _ in decision.hypotheses} == {"not tested"}
    assert "9 of the 9 of phases 1 to 5 did not run" in decision.readiness
    # Where some could, they decide: here those of one process say nothing.
    some = plan(*TOGETHER, "branch_sel_only", "ddp_static_graph") | {name: refused[name] for name in ONE_PROCESS}
    assert decide(some).action.startswith("fix the backward of branch sel")


def every_way() -> list[dict[str, Verdict]]:
    """Return tables of verdicts that lead to every exit of the tree."""
    missing = {"parameters_missing": ("blocks.4.attn.gate.fc1.weight",)}
    on_gloo = {name: a_verdict(name, hangs=name == TOGETHER[0], backend="gloo") for name in PLAN}
    without = rows(WITHOUT_CHECKPOINTING, hangs=True)
    vanilla = {
        failing: {"vanilla_attention": a_verdict("vanilla_attention", hangs=failing)} for failing in (False, True)
    }
    return [
        plan(*PLAN[:6], cause="rank_died"),
        plan() | {"gc_inplace_writes": checked("gc_inplace_writes", hangs=True)},
        plan() | {"gc_boundaries": checked("gc_boundaries", hangs=True)},
        plan("gc_baseline_full"), on_gloo, plan(*TOGETHER, *BRANCHES),
        plan(*TOGETHER, "branch_sel_only", "ddp_static_graph"), plan(*TOGETHER, "ddp_static_graph"),
        plan(*TOGETHER, *BRANCHES, "ddp_static_graph", **missing),
        plan(*PLAN) | without | vanilla[False], plan(*PLAN) | without | vanilla[True],
        plan(*TOGETHER, *BRANCHES, "ddp_static_graph"),
        plan("ddp_onestep_trace", *BRANCHES, "ddp_static_graph"),
        {n: v for n, v in plan("ddp_onestep_trace", *BRANCHES, "ddp_static_graph").items() if n != "ddp_gloo_sanity"},
    ]  # fmt: skip


def test_every_exit_of_the_tree_is_taken_by_some_run() -> None:
    decisions = [decide(verdicts) for verdicts in every_way()]
    exits = [exit_ for row in decisions[0].tree for exit_ in row[1:]]
    assert [decision.taken for decision in decisions] == exits


@pytest.mark.parametrize("verdicts", every_way())
def test_the_tree_is_drawn_with_the_way_taken(verdicts: dict[str, Verdict]) -> None:
    decision = decide(verdicts)
    drawn = str(way(decision))
    for row in decision.tree:
        assert all(escape(text.split()[-1]) in drawn for text in row)
    assert len(re.findall(r'<path[^>]*class="exit taken"', drawn)) == 1
    assert drawn.count('class="box end"') >= 2
    lines = mermaid(decision)
    assert lines[0] == "flowchart TD"
    number = next(i for i, row in enumerate(decision.tree) if decision.taken in row)
    assert f"e{number}_{decision.tree[number].index(decision.taken) - 1} taken" in lines[-1]


def test_a_long_answer_has_several_lines_in_the_drawing() -> None:
    asked = replace(decide(plan()), tree=(), path=("one cause? no: lock_deadlock, rank_died, oom", "others? no"))
    drawn = str(way(asked))
    assert re.findall(r'class="answer">([^<]*)<', drawn) == ["no: lock_deadlock, rank_died,", "oom", "no"]


def test_one_cause_has_the_headline_of_its_scenario_and_several_are_counted() -> None:
    one = plan(*TOGETHER, "branch_sel_only")
    assert decide(one).sentence.startswith("branch_sel_only ends in HANG (lock_deadlock) on rank 1")
    assert decide(one).sentence.endswith("3 of 9 scenarios fail, all with this cause.")
    several = {**one, "branch_cmp_only": a_verdict("branch_cmp_only", hangs=True, cause="sleeping")}
    assert decide(several).sentence.endswith("4 of 9 scenarios fail, of 2 causes: lock_deadlock 3, sleeping 1.")
