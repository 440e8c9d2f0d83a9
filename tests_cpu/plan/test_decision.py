"""The plan's decision over verdicts: a pure function, so its tests are tables of (rows with results, decision)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from html import escape

import pytest

from pytest_nsa.diagnosis import decision as without_a_plan
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.report.decision_tree import mermaid, way
from tests_cpu.plan.controls import explain, matched, separating
from tests_cpu.plan.decision import decide
from tests_cpu.plan.factors import Facts, factors, facts_by_name
from tests_cpu.plan.readiness import CORE
from tests_cpu.plan.scenarios import CPU, TABLE

FACTS = facts_by_name(False)
ROWS = {CPU.name_of(row): row for row in TABLE}
Fails = Callable[[str, Facts], bool]


def a_verdict(name: str, *, fails: bool, cause: str = "lock_deadlock", **fields: object) -> Verdict:
    row = ROWS[name]
    common = {"scenario": name, "nodeid": name, "backend": "gloo", "world_size": row.num_ranks}
    if row.fails_as:
        return Verdict(outcome="FAIL", cause=row.fails_as, expected=True, **common)
    if not fails:
        return Verdict(outcome="PASS", figures={"ready_orders": 1.0}, **common)
    blamed = {
        "outcome": "HANG",
        "ranks": tuple(range(row.num_ranks)),
        "confidence": 0.95,
        "where": "a.py:3 in backward",
    }
    return Verdict(**{**common, "cause": cause, **blamed, **fields})  # type: ignore[arg-type]


def plan(fails: Fails, phases: Iterable[int] = range(1, 6), **fields: object) -> dict[str, Verdict]:
    """Return the verdicts of these phases, where rows of ``fails`` fail alike."""
    chosen = set(phases)
    return {n: a_verdict(n, fails=fails(n, FACTS[n]), **fields) for n, row in ROWS.items() if row.phase in chosen}


def named(*names: str) -> Fails:
    return lambda name, f: name in names


def on_nccl(verdicts: dict[str, Verdict]) -> dict[str, Verdict]:
    """Return verdicts as a GPU has them: all on NCCL, but for the row that sets gloo."""
    return {
        n: replace(v, backend="gloo" if "parallel.backend" in ROWS[n].overrides else "nccl")
        for n, v in verdicts.items()
    }


def is_ddp(name: str, f: Facts) -> bool:
    return bool(f["parallel.mode"] == "ddp")


def has_ranks(name: str, f: Facts) -> bool:
    return bool(f["parallel.mode"] != "none")


def has_sel(name: str, f: Facts) -> bool:
    return f["model.attention"] == "nsa" and f["model.force_branch"] in (None, "sel")


def has_gates(name: str, f: Facts) -> bool:
    return has_sel(name, f) and f["model.force_branch"] is None and not f["model.stop_gate_gradient"]


def recomputes(first: int) -> Fails:
    def has(name: str, f: Facts) -> bool:
        start, _, end = (f["train.gc_range"] or f"0:{f['model.n_layers']}").partition(":")
        return bool(f["train.gradient_checkpointing"]) and int(start) <= first < int(end)

    return has


def all_of(*conditions: Fails) -> Fails:
    return lambda name, f: all(condition(name, f) for condition in conditions)


WAYS: dict[str, tuple[Fails, range, str, float]] = {
    "a branch": (has_sel, range(1, 6), "fix the backward of branch sel (a.py:3 in backward)", 0.9),
    "on ranks": (all_of(has_sel, is_ddp), range(1, 9), "fix the backward of branch sel (a.py:3 in backward), with DDP", 0.9),
    "the gates": (has_gates, range(1, 9), "look at the gates", 0.8),
    "the gates, not tested": (has_gates, range(1, 6), "look at what needs all branches at once", 0.8),
    "some layers": (recomputes(0), range(1, 9), "look at gradient checkpointing, layers 0 to 5:", 0.8),
    "a half of them": (recomputes(8), range(1, 6), "look at gradient checkpointing, layers 6 to 11:", 0.8),
    "a half alone": (named("gc_bisect_layers_6_11"), range(1, 9), "look at gradient checkpointing of layers 6 to 11 alone:", 0.8),
    "the graph": (
        lambda n, f: is_ddp(n, f) and not f["parallel.static_graph"], range(1, 6), "enable static_graph in production", 0.8,
    ),
    "NSA": (lambda n, f: f["model.attention"] == "nsa", range(1, 9), "look at NSA's own backward (a.py:3 in backward)", 0.8),
    "the control": (lambda n, f: f["model.attention"] == "dense", range(1, 9), "look at plain attention, the control", 0.8),
    "both models": (lambda n, f: True, range(1, 9), "look at what both models share", 0.9),
    "DDP's reducer": (is_ddp, range(1, 9), "in production move to FSDP", 0.9),
    "FSDP": (lambda n, f: f["parallel.mode"] == "fsdp", range(1, 9), "look at FSDP", 0.8),
    "a kernel": (lambda n, f: f["model.backend"] != "math", range(1, 9), "look at the fused kernels", 0.8),
    "a tracer, or a step": (lambda n, f: f["trace.ddp_buckets"], range(1, 6), "look at what trace.ddp_buckets = True or", 0.5),
    "accumulation": (named("accumulation"), range(1, 9), "look at what train.accumulation >= 2 changes", 0.8),
    "a twin passes": (named("gc_baseline_full"), range(1, 9), "contradictory: repeat the run", 0.3),
    "one of two runs": (named("ddp_gloo_sanity"), range(1, 6), "contradictory: repeat the run", 0.3),
}  # fmt: skip


@pytest.mark.parametrize(("fails", "phases", "action", "confidence"), WAYS.values(), ids=WAYS)
def test_the_factor_that_failing_rows_need_is_named(
    fails: Fails, phases: range, action: str, confidence: float
) -> None:
    decision = decide(plan(fails, phases))
    assert decision.action.startswith(action)
    assert decision.confidence >= confidence
    assert (decision.confidence <= 0.5) == (confidence <= 0.5)
    assert sum(decision.taken in question[1:] for question in decision.tree) == 1
    drawn = str(way(decision))
    assert len(re.findall(r'<path[^>]*class="exit taken"', drawn)) == 1
    assert all(escape(text.split()[-1]) in drawn for question in decision.tree for text in question)
    number = next(i for i, question in enumerate(decision.tree) if decision.taken in question)
    assert f"e{number}_{decision.tree[number].index(decision.taken) - 1} taken" in mermaid(decision)[-1]


@pytest.mark.parametrize(
    ("fails", "phases", "action"),
    [
        (lambda n, f: has_ranks(n, f) and n != "ddp_gloo_sanity", range(1, 6), "look at NCCL's transport"),
        (
            lambda n, f: has_ranks(n, f) and n != "ddp_gloo_sanity" and not f["env.NCCL_P2P_DISABLE"],
            range(1, 9), "look at the link between the GPUs",
        ),
        (is_ddp, range(1, 9), "in production move to FSDP"),
    ],
)  # fmt: skip
def test_gloo_is_the_control_of_nccl(fails: Fails, phases: range, action: str) -> None:
    assert decide(on_nccl(plan(fails, phases))).action.startswith(action)


@pytest.mark.parametrize("name", sorted(CORE))
def test_a_row_that_ran_out_of_time_answers_nothing(name: str) -> None:
    slow = a_verdict(name, fails=True, cause="slow", outcome="SLOW")
    alone = decide(plan(named()) | {name: slow})
    assert alone.action == f"run again with more time, as they made progress until the end: {name}"
    assert "confirmed" not in {state for _, state, _ in alone.hypotheses}
    both = decide(plan(has_gates, range(1, 9)) | {name: slow})
    assert both.action.startswith("look at the gates")
    assert name in both.action


def test_the_row_that_separates_is_named_cheapest_first() -> None:
    decision = decide(plan(is_ddp))
    assert "run manual_averaging (--phases 7 -k manual_averaging)" in decision.action
    assert {text: state for text, state, _ in decision.hypotheses}["DDP's reducer loses gradients"] == "not tested"
    without = decide({n: v for n, v in plan(has_sel).items() if n != "branch_win_only"})
    assert "run branch_win_only" in " ".join(without.path) or without.action.startswith(
        "fix the backward of branch sel"
    )


def test_a_matched_pair_differs_in_the_factor_alone() -> None:
    static = next(factor for factor in factors(False) if factor.name == "plain DDP")
    assert matched(static, ["ddp_onestep_trace", "ddp_two_steps"], ["ddp_static_graph"], FACTS) == (
        ("ddp_two_steps", "ddp_static_graph"),
    )  # fmt: skip
    for row in TABLE:  # of every change of DDP there is a pair
        if row.phase in (3, 4) and row.name != "ddp_two_steps":
            changed = FACTS[row.name].items() ^ FACTS["ddp_two_steps"].items()
            assert len({key for key, _ in changed}) == 1, row.name


def test_what_no_row_separates_is_not_decided() -> None:
    names = ("ddp_onestep_trace", "ddp_gloo_sanity")
    why = explain(names, ["ddp_two_steps"], FACTS, factors(False))
    assert len(why.hypotheses()) > 1
    assert not any(why.pairs.values())
    assert separating(why, ["ddp_static_graph"], FACTS) == ""
    assert separating(why, ["ddp_static_graph", "gc_boundaries"], FACTS) == "gc_boundaries"


def test_two_faults_are_two_decisions_the_larger_first() -> None:
    verdicts = plan(all_of(has_sel, is_ddp), range(1, 9))
    verdicts["branch_cmp_only"] = a_verdict(
        "branch_cmp_only", fails=True, cause="rank_died", outcome="CRASH", confidence=1.0
    )
    verdicts["gc_boundaries"] = a_verdict(
        "gc_boundaries", fails=True, cause="nan_loss", outcome="FAIL", where="b.py:9 in g"
    )
    decision = decide(verdicts)
    assert decision.action.startswith("fix the backward of branch sel")
    others = [step for step in decision.path if step.startswith("is there another fault?")]
    assert [("branch_cmp_only" in step, "gc_boundaries" in step) for step in others] == [(False, True), (True, False)]
    flaky = decide(plan(named("ddp_onestep_trace"), cause="rank_exception", ranks=(1,)))
    assert flaky.action.startswith("contradictory: repeat the run")
    killed = decide(plan(is_ddp, cause="rank_died", outcome="CRASH", ranks=(1,), advice="look for who sent the signal"))
    assert killed.action.startswith("look for who sent the signal")
    assert killed.taken == "yes: do as its cause advises"


def test_rows_that_differ_in_many_things_refute_nothing() -> None:
    """Safe mode stops the gates, too, and fails all the same: by what, no control shows."""
    verdicts = plan(lambda n, f: has_gates(n, f) or n.startswith("safe_mode"), range(1, 9))
    decision = decide(verdicts)
    assert decision.action.startswith("look at the gates")
    assert decision.confidence <= 0.8


@pytest.mark.parametrize(
    ("fails", "action"),
    [
        (
            ("gc_boundaries", "gc_inplace_writes"),
            "take the write out of the checkpointed region: found by gc_inplace_writes",
        ),
        (("gc_boundaries",), "look at gradient checkpointing: found by gc_boundaries"),
    ],
)
def test_what_a_check_of_checkpointing_found_ends_the_way(fails: tuple[str, ...], action: str) -> None:
    verdicts = plan(recomputes(0), range(1, 6))
    for name in ("gc_boundaries", "gc_inplace_writes"):
        found = {"reason": f"AssertionError: found by {name}", "where": "tests_cpu/plan/health.py:9 in before_step"}
        verdicts[name] = a_verdict(name, fails=name in fails, cause="assertion", outcome="FAIL", **found)
    assert action in decide(verdicts).action
    alone = decide(plan(named()) | {name: verdicts[name] for name in fails})
    assert alone.action == action


def test_what_fails_is_named_by_how_far_it_gets() -> None:
    assert decide(plan(has_sel, cause="nan_loss")).action.startswith("fix the forward of branch sel")
    update = decide(plan(lambda n, f: True, where="nsa/training/trainer.py:246 in _optimize", advice="look"))
    assert update.action.startswith("look (scenario")
    assert update.action.endswith("they fail in the update at nsa/training/trainer.py:246 in _optimize")


def test_the_same_missing_parameters_name_their_module() -> None:
    lost = {
        "cause": "unused_parameters",
        "parameters_missing": ("blocks.4.attn.gate.fc2.weight", "blocks.4.attn.gate.fc1.bias"),
    }
    decision = decide(plan(is_ddp, ranks=(1,), **lost))
    assert decision.action.startswith(
        "look in the module that owns them (blocks.4.attn.gate), on rank 1 alone, for what"
    )
    assert {text: state for text, state, _ in decision.hypotheses}["a step leaves parameters unused"] == "confirmed"
    assert "gradients are missing in 7 of them" in decision.readiness
    stalled = decide(plan(lambda n, f: True, parameters_missing=lost["parameters_missing"]))
    assert stalled.action == "look for in-place operations in the module that owns them (blocks.4.attn.gate.fc1)"
    assert "gradients are missing" not in stalled.readiness


def test_the_table_of_factors_has_every_row_and_marks_pairs() -> None:
    columns = decide(plan(all_of(has_sel, is_ddp), range(1, 9))).columns()
    assert list(columns) == ["branch sel", "DDP", "sets", "matched pair"]
    assert columns["sets"]["branch_cmp_only"] == "force_branch cmp"
    pair = columns["matched pair"]["branch_cmp_only"]
    assert pair
    assert pair.removeprefix("pair ") in columns["matched pair"]["branch_sel_only"]
    assert columns["branch sel"].keys() == plan(named(), range(1, 9)).keys()


def test_the_sentence_names_scenario_rank_line_and_cause() -> None:
    one = plan(all_of(has_sel, is_ddp), ranks=(1,), reason="it waits")
    assert decide(one).sentence == (
        "branch_sel_only ends in HANG (lock_deadlock) on rank 1 at a.py:3 in backward: it waits. "
        "5 of 10 scenarios fail, all with this cause."
    )
    several = one | {"branch_cmp_only": a_verdict("branch_cmp_only", fails=True, cause="sleeping")}
    assert decide(several).sentence.endswith("6 of 10 scenarios fail, of 2 causes: lock_deadlock 5, sleeping 1.")


def test_a_run_without_failures_is_reported_as_such() -> None:
    assert decide(plan(named())).sentence == "Nothing is wrong: of 10 scenarios, 10 passed."
    expected = {"a": Verdict(nodeid="a", outcome="FAIL", expected=True), "b": Verdict(nodeid="b", outcome="SKIP")}
    assert decide(expected).sentence == "Nothing is wrong: of 2 tests, 1 failed as expected, 1 skipped."
    assert without_a_plan.decide({}).sentence == "Nothing was run on ranks."


def test_tests_that_are_no_scenarios_take_no_tree() -> None:
    verdict = Verdict(nodeid="t", outcome="FAIL", cause="rank_exited", ranks=(0,), advice="stay", confidence=0.9)
    decision = without_a_plan.decide({"t": verdict})
    assert decision.path == ("do the verdicts name one cause? yes: rank_exited",)
    assert decision.action.startswith("stay")
    long = replace(decision, path=("one cause? no: lock_deadlock, rank_died, oom", "others? no"))
    assert re.findall(r'class="answer">([^<]*)<', str(way(long))) == ["no: lock_deadlock, rank_died,", "oom", "no"]


def test_ranks_that_could_not_be_started_tell_nothing_of_the_model() -> None:
    refused = {
        name: Verdict(
            scenario=name, nodeid=name, outcome="FAIL", cause="unknown", rule="engine.refused",
            reason="the ranks could not be started: no room",
        )
        for name in CORE
    }  # fmt: skip
    decision = decide(refused)
    assert decision.sentence == "The ranks could not be started: no room. 10 of 10 scenarios did not run."
    assert {state for _, state, _ in decision.hypotheses if state == "confirmed"} == set()
    assert "10 of the 10 of phases 1 to 5 did not run" in decision.readiness
    some = plan(has_sel) | {name: v for name, v in refused.items() if name.startswith("gc_bisect")}
    assert decide(some).action.startswith("fix the backward of branch sel")


def test_ready_for_production_by_its_criteria() -> None:
    passing = plan(named())
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


def test_the_order_in_which_gradients_become_ready_is_a_hypothesis() -> None:
    def state(verdicts: dict[str, Verdict]) -> tuple[str, str]:
        return next(
            (s, why) for text, s, why in decide(verdicts).hypotheses if text.startswith("gradients become ready")
        )

    verdicts = plan(named("ddp_static_graph"))
    assert state(verdicts)[0] == "refuted"
    several = {"ddp_static_graph": replace(verdicts["ddp_static_graph"], figures={"ready_orders": 2.0})}
    assert state(verdicts | several) == ("confirmed", "the ranks' gradients came in 2 orders in ddp_static_graph")
    passing = {"ddp_two_steps": replace(verdicts["ddp_two_steps"], figures={"ready_orders": 2.0})}
    assert state(verdicts | passing)[0] == "refuted"
    assert state(plan(lambda n, f: True))[0] == "not tested"
