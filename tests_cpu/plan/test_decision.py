"""The plan's decision over verdicts: a pure function, so its tests are tables of (rows with results, decision)."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from html import escape

import pytest

from pytest_nsa.diagnosis import decision as without_a_plan
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.report.summary import mermaid, way
from tests_cpu.plan.controls import explain, matched, separating
from tests_cpu.plan.decision import READY_ORDER, decide
from tests_cpu.plan.factors import Facts, factors, facts_by_name
from tests_cpu.plan.readiness import CORE
from tests_cpu.plan.scenarios import CPU, TABLE

FACTS = facts_by_name(False)
ROWS = {CPU.find_name(row): row for row in TABLE}
Fails = Callable[[str, Facts], bool]
FEW, MANY = range(1, 6), range(1, 9)  # phases


def a_verdict(name: str, *, fails: bool = True, cause: str = "lock_deadlock", **fields: object) -> Verdict:
    row = ROWS[name]
    common = {"scenario": name, "nodeid": name, "backend": "gloo", "world_size": row.num_ranks}
    if row.fails_as:
        return Verdict(outcome="FAIL", cause=row.fails_as, expected=True, **common)  # type: ignore[arg-type]
    if not fails:
        return Verdict(outcome="PASS", figures={"ready_orders": 1.0}, **common)  # type: ignore[arg-type]
    blamed = {
        "outcome": "HANG",
        "ranks": tuple(range(row.num_ranks)),
        "confidence": 0.95,
        "where": "a.py:3 in backward",
    }
    return Verdict(**{**common, "cause": cause, **blamed, **fields})  # type: ignore[arg-type]


def plan(fails: Fails, phases: Iterable[int] = FEW, **fields: object) -> dict[str, Verdict]:
    """Return the verdicts of these phases, where rows of ``fails`` fail alike."""
    chosen = set(phases)
    return {n: a_verdict(n, fails=fails(n, FACTS[n]), **fields) for n, row in ROWS.items() if row.phase in chosen}


def named(*names: str) -> Fails:
    return lambda name, f: name in names


def everything(name: str, f: Facts) -> bool:
    return True


def is_ddp(name: str, f: Facts) -> bool:
    return bool(f["parallel.mode"] == "ddp")


def has_sel(name: str, f: Facts) -> bool:
    return f["model.attention"] == "nsa" and f["model.force_branch"] in (None, "sel")


def sel_on_ranks(name: str, f: Facts) -> bool:
    return has_sel(name, f) and is_ddp(name, f)


def has_gates(name: str, f: Facts) -> bool:
    return has_sel(name, f) and f["model.force_branch"] is None and not f["model.stop_gate_gradient"]


def recomputes(layer: int) -> Fails:
    def has(name: str, f: Facts) -> bool:
        start, _, end = (f["train.gc_range"] or f"0:{f['model.n_layers']}").partition(":")
        return bool(f["train.gradient_checkpointing"]) and int(start) <= layer < int(end)

    return has


def states(verdicts: dict[str, Verdict]) -> dict[str, tuple[str, str]]:
    return {text: (state, why) for text, state, why in decide(verdicts).hypotheses}


WAYS: dict[str, tuple[Fails, range, str, float]] = {
    "a branch": (has_sel, FEW, "fix the backward of branch sel (a.py:3 in backward)", 0.9),
    "on ranks": (sel_on_ranks, MANY, "fix the backward of branch sel (a.py:3 in backward), with DDP", 0.9),
    "the gates": (has_gates, MANY, "look at the gates", 0.8),
    "the gates, not tested": (has_gates, FEW, "look at what needs all branches at once", 0.8),
    "some layers": (recomputes(0), MANY, "look at gradient checkpointing, layers 0 to 5:", 0.8),
    "a half of them": (recomputes(8), FEW, "look at gradient checkpointing, layers 6 to 11:", 0.8),
    "a half alone": (named("gc_bisect_layers_6_11"), MANY, "look at gradient checkpointing of layers 6 to 11 alone:", 0.8),
    "the graph": (lambda n, f: is_ddp(n, f) and not f["parallel.static_graph"], FEW, "enable static_graph in production", 0.8),
    "NSA": (lambda n, f: f["model.attention"] == "nsa", MANY, "look at NSA's own backward (a.py:3 in backward)", 0.8),
    "the control": (lambda n, f: f["model.attention"] == "dense", MANY, "look at plain attention, the control", 0.8),
    "both models": (everything, MANY, "look at what both models share", 0.9),
    "DDP's reducer": (is_ddp, MANY, "in production move to FSDP", 0.9),
    "FSDP": (lambda n, f: f["parallel.mode"] == "fsdp", MANY, "look at FSDP", 0.8),
    "a kernel": (lambda n, f: f["model.backend"] != "math", MANY, "look at the fused kernels", 0.8),
    "a tracer, or a step": (lambda n, f: f["trace.ddp_buckets"], FEW, "look at what trace.ddp_buckets = True or", 0.5),
    "accumulation": (named("accumulation"), MANY, "look at what train.accumulation >= 2 changes", 0.8),
    "a twin passes": (named("gc_baseline_full"), MANY, "contradictory: repeat the run", 0.3),
    "one of two runs": (named("ddp_gloo_sanity"), FEW, "contradictory: repeat the run", 0.3),
    # Safe mode stops the gates, too, and fails all the same: by which of the things that it sets no control shows.
    "rows without a control": (lambda n, f: has_gates(n, f) or n.startswith("safe_mode"), MANY, "look at the gates", 0.8),
}  # fmt: skip


@pytest.mark.parametrize(("fails", "phases", "action", "confidence"), WAYS.values(), ids=WAYS)
def test_the_factor_that_failing_rows_need_is_named(
    fails: Fails, phases: range, action: str, confidence: float
) -> None:
    decision = decide(plan(fails, phases))
    assert decision.action.startswith(action)
    assert decision.confidence >= confidence
    assert (decision.confidence <= 0.5) == (confidence <= 0.5)
    (number,) = (i for i, question in enumerate(decision.tree) if decision.taken in question[1:])
    assert f"e{number}_{decision.tree[number].index(decision.taken) - 1} taken" in mermaid(decision)[-1]
    shown = str(way(decision))
    assert re.findall(r'class="taken">([^<]*)<', shown) == [escape(decision.taken)]
    assert all(escape(text) in shown for question in decision.tree for text in question)


@pytest.mark.parametrize(
    ("spared", "phases", "action"),
    [
        (("ddp_gloo_sanity",), FEW, "look at NCCL's transport"),
        (("ddp_gloo_sanity", "nccl_p2p_disabled"), MANY, "look at the link between the GPUs"),
        ((), MANY, "look at what ranks do"),
    ],
)
def test_gloo_is_the_control_of_nccl(spared: tuple[str, ...], phases: range, action: str) -> None:
    def fails(name: str, f: Facts) -> bool:
        return (
            f["parallel.mode"] != "none" and name not in spared and not (len(spared) > 1 and f["env.NCCL_P2P_DISABLE"])
        )

    verdicts = plan(fails, phases, advice="look at what ranks do")
    backends = {n: "gloo" if "parallel.backend" in ROWS[n].overrides else "nccl" for n in verdicts}
    assert decide({n: replace(v, backend=backends[n]) for n, v in verdicts.items()}).action.startswith(action)


@pytest.mark.parametrize("name", sorted(CORE))
def test_a_row_that_ran_out_of_time_answers_nothing(name: str) -> None:
    slow = a_verdict(name, cause="slow", outcome="SLOW")
    alone = decide(plan(named()) | {name: slow})
    assert alone.action == f"run again with more time, as they made progress until the end: {name}"
    assert "confirmed" not in {state for _, state, _ in alone.hypotheses}
    both = decide(plan(has_gates, MANY) | {name: slow})
    assert both.action.startswith("look at the gates")
    assert name in both.action


def test_a_matched_pair_differs_in_the_factor_alone() -> None:
    static = next(factor for factor in factors(False) if factor.name == "plain DDP")
    found = matched(static, ["ddp_onestep_trace", "ddp_two_steps"], ["ddp_static_graph"], FACTS)
    assert found == (("ddp_two_steps", "ddp_static_graph"),)
    for row in TABLE:  # each branch, and the static graph, has one
        if row.phase in (3, 4) and row.name != "ddp_two_steps":
            assert len(FACTS[row.name].items() - FACTS["ddp_two_steps"].items()) == 1, row.name


def test_what_no_row_separates_is_not_decided_and_the_next_row_is_named() -> None:
    why = explain(("ddp_onestep_trace", "ddp_gloo_sanity"), ["ddp_two_steps"], FACTS, factors(False))
    assert len(why.hypotheses()) > 1
    assert not any(why.pairs.values())
    assert separating(why, ["ddp_static_graph"], FACTS) == ""
    assert separating(why, ["ddp_static_graph", "gc_boundaries"], FACTS) == "gc_boundaries"
    assert "run manual_averaging (--phases 7 -k manual_averaging)" in decide(plan(is_ddp)).action
    assert states(plan(is_ddp))["DDP's reducer loses gradients"][0] == "not tested"


def test_two_faults_are_two_decisions_the_larger_first() -> None:
    verdicts = plan(sel_on_ranks, MANY)
    verdicts["branch_cmp_only"] = a_verdict("branch_cmp_only", cause="rank_died", outcome="CRASH", confidence=1.0)
    verdicts["gc_boundaries"] = a_verdict("gc_boundaries", cause="nan_loss", outcome="FAIL", where="b.py:9 in g")
    decision = decide(verdicts)
    assert decision.action.startswith("fix the backward of branch sel")
    others = [step for step in decision.path if step.startswith("is there another fault?")]
    assert [("branch_cmp_only" in step, "gc_boundaries" in step) for step in others] == [(False, True), (True, False)]


def test_what_is_the_ranks_own_is_advised_by_its_cause() -> None:
    killed = decide(plan(is_ddp, cause="rank_died", outcome="CRASH", ranks=(1,), advice="look for who sent the signal"))
    assert killed.action.startswith("look for who sent the signal")
    assert killed.taken == "yes: do as its cause advises"
    flaky = decide(plan(named("ddp_onestep_trace"), cause="rank_exception", ranks=(1,)))
    assert flaky.action.startswith("contradictory: repeat the run")


@pytest.mark.parametrize(
    ("fails", "action"),
    [
        (("gc_boundaries", "gc_inplace_writes"), "take the write out of the checkpointed region: by gc_inplace_writes"),
        (("gc_boundaries",), "look at gradient checkpointing: by gc_boundaries"),
    ],
)
def test_what_a_check_of_checkpointing_found_is_the_action(fails: tuple[str, ...], action: str) -> None:
    fields = {"cause": "assertion", "outcome": "FAIL", "where": "tests_cpu/plan/health.py:9 in before_step"}
    found = {name: a_verdict(name, reason=f"AssertionError: by {name}", **fields) for name in fails}
    assert decide(plan(named()) | found).action == action
    assert action in decide(plan(recomputes(0)) | found).action


def test_how_far_rows_get_and_the_same_missing_parameters_are_named() -> None:
    assert decide(plan(has_sel, cause="nan_loss")).action.startswith("fix the forward of branch sel")
    update = decide(plan(everything, where="nsa/training/trainer.py:246 in _optimize", advice="look"))
    assert update.action.endswith("they fail in the update at nsa/training/trainer.py:246 in _optimize")
    lost = ("blocks.4.attn.gate.fc2.weight", "blocks.4.attn.gate.fc1.bias")
    verdicts = plan(is_ddp, ranks=(1,), cause="unused_parameters", parameters_missing=lost)
    decision = decide(verdicts)
    assert decision.action.startswith(
        "look in the module that owns them (blocks.4.attn.gate), on rank 1 alone, for what"
    )
    assert states(verdicts)["a step leaves parameters unused"][0] == "confirmed"
    assert "gradients are missing in 7 of them" in decision.readiness
    stalled = decide(plan(everything, parameters_missing=lost))
    assert stalled.action == "look for in-place operations in the module that owns them (blocks.4.attn.gate.fc1)"
    assert "gradients are missing" not in stalled.readiness


def test_the_table_of_factors_has_every_row_and_marks_pairs() -> None:
    columns = decide(plan(sel_on_ranks, MANY)).columns()
    assert list(columns) == ["branch sel", "DDP", "sets", "matched pair"]
    assert columns["sets"]["branch_cmp_only"] == "force_branch cmp"
    pair = columns["matched pair"]["branch_cmp_only"].removeprefix("pair ")
    assert pair in columns["matched pair"]["branch_sel_only"].removeprefix("pair ").split(", ")
    assert columns["branch sel"].keys() == plan(named(), MANY).keys()


def test_the_sentence_names_scenario_rank_line_and_cause() -> None:
    one = plan(sel_on_ranks, ranks=(1,), reason="it waits")
    assert decide(one).sentence == (
        "branch_sel_only ends in HANG (lock_deadlock) on rank 1 at a.py:3 in backward: it waits. "
        "5 of 10 scenarios fail, all with this cause."
    )
    several = one | {"branch_cmp_only": a_verdict("branch_cmp_only", cause="sleeping")}
    assert decide(several).sentence.endswith("6 of 10 scenarios fail, of 2 causes: lock_deadlock 5, sleeping 1.")


def test_a_run_without_failures_and_one_without_scenarios() -> None:
    assert decide(plan(named())).sentence == "Nothing is wrong: of 10 scenarios, 10 passed."
    expected = {"a": Verdict(nodeid="a", outcome="FAIL", expected=True), "b": Verdict(nodeid="b", outcome="SKIP")}
    assert decide(expected).sentence == "Nothing is wrong: of 2 tests, 1 failed as expected, 1 skipped."
    assert without_a_plan.decide({}).sentence == "Nothing was run on ranks."
    verdict = Verdict(nodeid="t", outcome="FAIL", cause="rank_exited", ranks=(0,), advice="stay", confidence=0.9)
    decision = without_a_plan.decide({"t": verdict})
    assert (decision.path, decision.action[:4]) == (("do the verdicts name one cause? yes: rank_exited",), "stay")
    long = replace(decision, path=("one cause? no: lock_deadlock, rank_died, oom", "others? no"))
    assert re.findall(r'class="answer">([^<]*)<', str(way(long))) == [" no: lock_deadlock, rank_died, oom", " no"]


def test_ranks_that_could_not_be_started_show_nothing_of_the_model() -> None:
    fields = {
        "outcome": "FAIL",
        "cause": "unknown",
        "rule": "engine.refused",
        "reason": "the ranks could not be started: no room",
    }
    refused = plan(everything, **fields)
    decision = decide(refused)
    assert decision.sentence == "The ranks could not be started: no room. 10 of 10 scenarios did not run."
    assert "10 of the 10 of phases 1 to 5 did not run" in decision.readiness
    assert "confirmed" not in {state for state, _ in states(refused).values()}
    some = plan(has_sel) | {name: v for name, v in refused.items() if name.startswith("gc_bisect")}
    assert decide(some).action.startswith("fix the backward of branch sel")


@pytest.mark.parametrize(
    ("peak_mib", "rate", "end"),
    [
        (9000, 5120, "at production size on a GPU; at most 9.4 GB a rank, at least 5,120 tokens/s."),
        (29000, 5120, "a rank takes 30.4 GB, where 30 are allowed."),
        (9000, 12, "12 tokens/s, where 50 are needed."),
        (0, 0, "memory and throughput at production size were not measured (no GPU)."),
    ],
)
def test_ready_for_production_by_its_criteria(peak_mib: float, rate: float, end: str) -> None:
    long = Verdict(nodeid="s", outcome="PASS", figures={"peak_gpu_mib": peak_mib, "tokens_per_s": rate})
    assert decide({**plan(named()), "stability_100": long}).readiness.endswith(end)


def test_the_order_in_which_gradients_become_ready_is_a_hypothesis() -> None:
    verdicts = plan(named("ddp_static_graph"))
    assert states(verdicts)[READY_ORDER][0] == "refuted"
    two = {
        name: replace(verdicts[name], figures={"ready_orders": 2.0}) for name in ("ddp_static_graph", "ddp_two_steps")
    }
    assert states(verdicts | two)[READY_ORDER] == (
        "confirmed",
        "the ranks' gradients came in 2 orders in ddp_static_graph",
    )
    assert states(verdicts | {"ddp_two_steps": two["ddp_two_steps"]})[READY_ORDER][0] == "refuted"
    assert states(plan(everything))[READY_ORDER][0] == "not tested"


def test_variables_that_are_exported_change_no_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NSA_FORCE_BRANCH": "win", "NSA_GC_RANGE": "nothing", "NSA_DDP_STATIC_GRAPH": "1"}.items():
        monkeypatch.setenv(name, value)
    assert facts_by_name.__wrapped__(False) == FACTS
