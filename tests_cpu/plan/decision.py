"""Verdicts to decision: the plan's tree, a pure function over the scenarios' verdicts. The plugin calls it by its hook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.decision import Decision, advice_of, count, nothing_wrong, sentence, surest
from pytest_nsa.diagnosis.verdict import Verdict
from tests_cpu.plan import hypotheses
from tests_cpu.plan.hypotheses import ONE_PROCESS, Verdicts

CONTRADICTORY = 0.3
BRANCHES = dict(zip(("cmp", "sel", "win"), hypotheses.BRANCHES, strict=True))
ALL_TOGETHER = (hypotheses.ONE_STEP, hypotheses.GLOO)
# Where backward fails in one process, what is asked of checkpointing, and the scenario that answers.
CHECKPOINTING = {
    "gc_reentrant_one_process": "is it the reentrant form?",
    "gc_boundaries": "is it a boundary, one layer checkpointed alone?",
    "gc_inplace_writes": "is it a write in place, into what the region did not make?",
}

# Causes that are an explanation by themselves: the tree below reasons about backward and would look in the wrong place.
_OF_THE_RANK = frozenset(cause.name for cause in CAUSES.values() if cause.of_the_rank)


def is_of_the_plan(verdicts: Verdicts) -> bool:
    """Return whether scenarios that the tree uses were run."""
    return bool(verdicts.keys() & {*BRANCHES.values(), *ONE_PROCESS, *ALL_TOGETHER, "ddp_static_graph"})


def decide(verdicts: Verdicts) -> Decision:
    """Return the decision over verdicts by scenario. The path reports scenarios that were not run; they decide nothing."""
    failed = {name: v for name, v in verdicts.items() if v.failed}
    judged: dict[str, Any] = {"hypotheses": hypotheses.table(verdicts), "readiness": hypotheses.readiness(verdicts)}
    if not failed:
        return replace(nothing_wrong(verdicts), readiness=judged["readiness"])
    path: list[str] = []
    name, first = _telling(failed)
    action, taken = _tree(verdicts, path)
    if not action:
        action, step = advice_of(failed, name, first)
        path.append(step)
    confidence = CONTRADICTORY if hypotheses.contradicts(verdicts) else first.confidence
    return Decision(
        sentence=sentence(verdicts, failed, name, first),
        action=action,
        path=tuple(path),
        confidence=confidence,
        tree=tuple((question.text, *question.exits) for question in TREE),
        taken=taken,
        **judged,
    )


def _telling(failed: Verdicts) -> tuple[str, Verdict]:
    """Return the most specific verdict and its scenario: that of the only branch that fails, else the surest."""
    alone = [BRANCHES[b] for b in BRANCHES if BRANCHES[b] in failed]
    if len(alone) == 1:
        return alone[0], failed[alone[0]]
    return surest(failed)


class Step(NamedTuple):
    """The answer to a question, and the action that it ends with: None where the tree goes on, '' for the advice of the verdicts.

    ``leads_to`` is the number of the question's exit that is taken.
    """

    answer: str
    action: str | None = None
    leads_to: int = 0
    more: tuple[str, ...] = ()  # of the way: what is asked behind this exit


class Question(NamedTuple):
    """A question of the tree; ``exits`` are its answers that end the way, with what is then to do. ``ask`` returns None where the
    question does not arise.
    """

    text: str
    exits: tuple[str, ...]
    ask: Callable[[Verdicts], Step | None]


def _of_the_ranks(verdicts: Verdicts) -> Step | None:
    shared = {v.cause for v in verdicts.values() if v.failed}
    if len(shared) == 1 and shared <= _OF_THE_RANK:
        return Step(f"yes: {shared.pop()}; the tree ends here", "")
    return None


def _one_process(verdicts: Verdicts) -> Step:
    hung = [n for n in ONE_PROCESS if n in verdicts and verdicts[n].failed]
    answer = _answer(verdicts, ONE_PROCESS, hung)
    if not hung:
        return Step(answer)
    layers = {"gc_bisect_layers_0_5": "layers 0 to 5", "gc_bisect_layers_6_11": "layers 6 to 11"}
    halves = [layers[n] for n in hung if n in layers]
    which = f", {halves[0]}" if len(halves) == 1 else ""
    action = f"look at gradient checkpointing{which}"
    found = {name: verdicts[name].reason for name in CHECKPOINTING if _says_so_itself(verdicts.get(name))}
    if "gc_inplace_writes" in found:
        action = f"take the write out of the checkpointed region: {found['gc_inplace_writes']}"
    elif "gc_boundaries" in found:
        action += f": {found['gc_boundaries']}"
    else:
        action += ": reentrant or not, boundaries, in-place writes in a checkpointed region"
    asked = tuple(f"{question} {_own_answer(verdicts.get(name))}" for name, question in CHECKPOINTING.items())
    return Step(answer, action, more=asked)


def _own_answer(verdict: Verdict | None) -> str:
    if verdict is None or verdict.outcome in ("SKIP", "INTERRUPTED"):
        return "not run (--phases 6)"
    if not verdict.failed:
        return "no"
    # It runs the backward that fails anyhow: only what it asserts itself is an answer.
    return f"yes: {verdict.reason}" if _says_so_itself(verdict) else f"it cannot tell: it ends in {verdict.cause}, too"


def _says_so_itself(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.failed and verdict.cause == "assertion"


def _contradicts(verdicts: Verdicts) -> Step | None:
    if not hypotheses.contradicts(verdicts):
        return None
    pair = " and ".join(f"{n} ({verdicts[n].outcome})" for n in ALL_TOGETHER)
    action = (
        "contradictory: repeat the run; the same step fails and passes by turns, so nothing follows from what passes"
    )
    return Step(f"no: {pair}, both on {verdicts[ALL_TOGETHER[0]].backend}", action)


def _static_graph(verdicts: Verdicts) -> Step:
    static = verdicts.get("ddp_static_graph")
    baseline = any(n in verdicts and verdicts[n].failed for n in ALL_TOGETHER)
    if static is None or not baseline or static.outcome != "PASS":
        return Step(_passes(static))
    action = "enable static_graph in production (NSA_DDP_STATIC_GRAPH=1); it requires that every step touches every parameter"
    return Step(_passes(static), action)


def _branch_alone(verdicts: Verdicts) -> Step:
    alone = [b for b, n in BRANCHES.items() if n in verdicts and verdicts[n].failed]
    answer = _answer(verdicts, tuple(BRANCHES.values()), [BRANCHES[b] for b in alone])
    if len(alone) == 1:
        v = verdicts[BRANCHES[alone[0]]]
        return Step(answer, f"fix the backward of branch {alone[0]}" + (f" ({v.where})" if v.where else ""))
    baseline = any(n in verdicts and verdicts[n].failed for n in ALL_TOGETHER)
    if baseline and not alone and all(n in verdicts for n in BRANCHES.values()):
        return Step(answer, "look at the gates: each branch alone passes, all together fail", 1)
    return Step(answer)


def _same_parameters(verdicts: Verdicts) -> Step:
    missing = [set(v.parameters_missing) for v in verdicts.values() if v.failed and v.parameters_missing]
    common = set.intersection(*missing) if len(missing) > 1 else set()
    answer = f"yes: {', '.join(sorted(common)[:5])}" if common else "no"
    if not common or any(m != common for m in missing):
        return Step(answer)
    owner = sorted(common)[0].rpartition(".")[0]
    return Step(answer, f"look for in-place operations in the module that owns them ({owner})")


def _gloo(verdicts: Verdicts) -> Step:
    gloo = verdicts.get("ddp_gloo_sanity")
    if gloo is None:
        return Step("not run", "", 2)
    if hypotheses.same_backend(verdicts):
        return Step(f"it cannot tell: both ran on {gloo.backend}", "", 2)
    answer = "yes" if gloo.failed else "no"
    if {v.cause for v in verdicts.values() if v.failed} <= _OF_THE_RANK:
        return Step(answer, "", 2)
    if gloo.failed:
        return Step(answer, "look at the autograd graph: the transport is not at fault")
    return Step(answer, "look at NCCL's transport: the same step passes on gloo", 1)


TREE = (
    Question(
        "is one cause, of the ranks and not of the model, behind every failure?", ("yes: do as that cause advises",), _of_the_ranks,
    ),
    Question(
        "does backward fail in one process?",
        ("yes: gradient checkpointing (reentrant? boundaries? in-place writes?)",), _one_process,
    ),
    Question(
        "does one step on one backend end the same way twice?", ("no: contradictory, repeat the run",), _contradicts,
    ),
    Question("does a static graph pass where plain DDP fails?", ("yes: enable static_graph in production",), _static_graph),
    Question(
        "does one branch alone fail?", ("yes: fix that branch's backward", "none, but all together: the gates"), _branch_alone,
    ),
    Question(
        "are the same parameters missing every time?", ("yes: in-place operations in the module that owns them",), _same_parameters,
    ),
    Question(
        "does gloo fail too?",
        ("yes: the autograd graph", "no: NCCL's transport", "it cannot tell: do as the surest verdict advises"), _gloo,
    ),
)  # fmt: skip


def _tree(verdicts: Verdicts, path: list[str]) -> tuple[str, str]:
    """Return the action that the plan's tree gives, '' where it gives none, and the exit that led there; append each question and
    its answer to ``path``.
    """
    for question in TREE:
        step = question.ask(verdicts)
        if step is None:
            continue
        path += (f"{question.text} {step.answer}", *step.more)
        if step.action is not None:
            return step.action, question.exits[step.leads_to]
    return "", ""


def _answer(verdicts: Verdicts, names: tuple[str, ...], failing: list[str]) -> str:
    run = [n for n in names if n in verdicts]
    if not run:
        return "not run"
    return f"yes: {', '.join(failing)}" if failing else f"no ({count(len(run), 'scenario')})"


def _passes(verdict: Verdict | None) -> str:
    return "not run" if verdict is None else f"{'yes' if verdict.outcome == 'PASS' else 'no'} ({verdict.outcome})"
