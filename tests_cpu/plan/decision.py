"""Verdicts to decision: the plan's tree, a pure function over the scenarios' verdicts. The plugin calls it by its hook."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from pytest_nsa.diagnosis.decision import (
    Decision,
    advice_of,
    count,
    nothing_wrong,
    sentence,
    surest,
    without_ranks,
)
from pytest_nsa.diagnosis.verdict import Verdict, describe_ranks
from tests_cpu.plan import hypotheses
from tests_cpu.plan.reading import (
    BRANCHES,
    EVERY_NAME,
    GLOO,
    HALVES,
    STATIC,
    STOPPED_GATES,
    TOGETHER,
    VANILLA,
    WITH_CHECKPOINTING,
    WITHOUT_CHECKPOINTING,
    Verdicts,
    absent,
    backward_fails,
    contradicts,
    failing,
    found_by_its_check,
    is_of_the_ranks,
    lone_branch,
    passing,
    ran,
    same_backend,
)

CONTRADICTORY = 0.3
UNCONTROLLED = 0.5  # of what no control has confirmed
# Where backward fails in one process, what is asked of checkpointing, and the scenario that answers.
CHECKPOINTING = {
    "gc_reentrant_one_process": "is it the reentrant form?",
    "gc_boundaries": "is it a boundary, one layer checkpointed alone?",
    "gc_inplace_writes": "is it a write in place, into what the region did not make?",
}


def is_of_the_plan(verdicts: Verdicts) -> bool:
    """Return whether scenarios of the plan were run."""
    return not EVERY_NAME.isdisjoint(verdicts)


def decide(verdicts: Verdicts) -> Decision:
    """Return the decision over verdicts by scenario. The path reports scenarios that were not run; they decide nothing."""
    failed = {name: v for name, v in verdicts.items() if v.failed}
    judged: dict[str, Any] = {"hypotheses": hypotheses.table(verdicts), "readiness": hypotheses.readiness(verdicts)}
    if not failed:
        return replace(nothing_wrong(verdicts), readiness=judged["readiness"])
    refused = without_ranks(verdicts)
    if refused is not None:
        return replace(refused, **judged)
    name, first = _telling(failed)
    taken = _tree(verdicts)
    step, path = taken.step, taken.path
    action = step.action or ""
    if not action:
        action, said = _advice(failed, name, first)
        path.append(said)
    confidence = CONTRADICTORY if contradicts(verdicts) else min(first.confidence, step.confidence)
    return Decision(
        sentence=sentence(verdicts, failed, name, first),
        action=action,
        path=tuple(path),
        confidence=confidence,
        tree=tuple((question.text, *question.exits) for question in TREE),
        taken=taken.exit,
        **judged,
    )


def _telling(failed: Verdicts) -> tuple[str, Verdict]:
    """Return the most specific verdict and its scenario: of what a row's check found, of the only branch that fails, the surest."""
    checked = [name for name in CHECKPOINTING if found_by_its_check(failed, name)]
    alone = [name for name in BRANCHES.values() if name in failed]
    if checked or len(alone) == 1:
        name = checked[-1] if checked else alone[0]
        return name, failed[name]
    return surest({n: v for n, v in failed.items() if ran(failed, [n])})


def _advice(failed: Verdicts, name: str, first: Verdict) -> tuple[str, str]:
    """Return what to do by the surest verdict alone: of an ordinary failure, what it found."""
    action, step = advice_of(failed, name, first)
    if first.cause == "assertion" and not is_of_the_ranks(first):
        action = f"mend what {name} found: {first.reason}" + (f" ({first.where})" if first.where else "")
    return action, step


class Step(NamedTuple):
    """The answer to a question, and the action that it ends with: None where the tree goes on, '' for the advice of the verdicts.

    ``leads_to`` is the number of the question's exit that is taken.
    """

    answer: str
    action: str | None = None
    leads_to: int = 0
    more: tuple[str, ...] = ()  # of the way: what is asked behind this exit
    confidence: float = 1.0  # at most


class Question(NamedTuple):
    """A question of the tree; ``exits`` are its answers that end the way, with what is then to do. ``ask`` returns None where the
    question does not arise.
    """

    text: str
    exits: tuple[str, ...]
    ask: Callable[[Verdicts], Step | None]


def _of_the_ranks(verdicts: Verdicts) -> Step | None:
    failed = [verdicts[name] for name in failing(verdicts, verdicts)]
    if all(map(is_of_the_ranks, failed)):
        return Step(f"yes: {', '.join(dict.fromkeys(v.cause for v in failed))}; the tree ends here", "")
    return None


def _found(verdicts: Verdicts) -> Step | None:
    written = found_by_its_check(verdicts, "gc_inplace_writes")
    if written:
        return Step(f"yes: gc_inplace_writes: {written}", f"take the write out of the checkpointed region: {written}")
    for name in ("gc_boundaries", "gc_reentrant_one_process"):
        found = found_by_its_check(verdicts, name)
        if found:
            return Step(f"yes: {name}: {found}", f"look at gradient checkpointing: {found}", 1)
    return None


def _one_process(verdicts: Verdicts) -> Step:
    wrong = backward_fails(verdicts, WITH_CHECKPOINTING)
    without, spared = backward_fails(verdicts, WITHOUT_CHECKPOINTING), passing(verdicts, WITHOUT_CHECKPOINTING)
    if not wrong:
        if not without:
            return Step(_answer(verdicts, WITH_CHECKPOINTING, []))
        return Step(f"only without checkpointing: {', '.join(without)}")
    answer = f"yes: {', '.join(wrong)}"
    if without:
        return Step(f"{answer}; and without checkpointing, which it is not: {', '.join(without)}")
    branch = lone_branch(verdicts)
    if branch:
        others = " and ".join(passing(verdicts, BRANCHES.values()))
        return Step(f"{answer}; {others}, checkpointed alike, pass")
    halves = [HALVES[n] for n in wrong if n in HALVES]
    action = f"look at gradient checkpointing{f', {halves[0]}' if len(halves) == 1 else ''}"
    action += ": reentrant or not, boundaries, in-place writes in a checkpointed region"
    places = {verdicts[name].where for name in wrong}
    action += f" ({places.pop()})" if len(places) == 1 and "" not in places else ""
    asked = tuple(f"{question} {_own_answer(verdicts, name)}" for name, question in CHECKPOINTING.items())
    right = f"yes: {', '.join(spared)}" if spared else "not run (--phases 8)"
    # Of the halves one that passes is a control, too: it checkpoints the other layers.
    confidence = 1.0 if spared or passing(verdicts, HALVES) else UNCONTROLLED
    return Step(answer, action, more=(f"does it pass without checkpointing? {right}", *asked), confidence=confidence)


def _own_answer(verdicts: Verdicts, name: str) -> str:
    if not ran(verdicts, [name]):
        return "not run (--phases 6)"
    if not failing(verdicts, [name]):
        return "no"
    # It runs the backward that fails anyhow: only what it asserts itself is an answer, and that has ended the way before.
    return f"it cannot tell: it ends in {verdicts[name].cause}, too"


def _contradicts(verdicts: Verdicts) -> Step | None:
    if not contradicts(verdicts):
        return None
    pair = " and ".join(f"{n} ({verdicts[n].outcome})" for n in TOGETHER)
    action = (
        "contradictory: repeat the run; the same step fails and passes by turns, so nothing follows from what passes"
    )
    return Step(f"no: {pair}, both on {verdicts[TOGETHER[0]].backend}", action)


def _static_graph(verdicts: Verdicts) -> Step:
    static = verdicts.get(STATIC)
    fails_under_ddp_alone = failing(verdicts, TOGETHER) and not backward_fails(verdicts, WITH_CHECKPOINTING)
    if static is None or not fails_under_ddp_alone or static.outcome != "PASS":
        return Step(_passes(static))
    action = "enable static_graph in production (NSA_DDP_STATIC_GRAPH=1); it requires that every step touches every parameter"
    return Step(_passes(static), action)


def _branch_alone(verdicts: Verdicts) -> Step:
    wrong = failing(verdicts, BRANCHES.values())
    answer = _answer(verdicts, tuple(BRANCHES.values()), wrong)
    branch = lone_branch(verdicts)
    if branch:
        v = verdicts[BRANCHES[branch]]
        spared = passing(verdicts, WITHOUT_CHECKPOINTING) if backward_fails(verdicts, WITH_CHECKPOINTING) else []
        where = f" ({v.where})" if v.where else ""
        only = f", where its layers are checkpointed: {', '.join(spared)} pass" if spared else ""
        return Step(
            f"{answer}; {' and '.join(passing(verdicts, BRANCHES.values()))} pass",
            f"fix the backward of branch {branch}{where}{only}",
        )
    if wrong:
        lacking = absent(verdicts, BRANCHES.values())
        return Step(
            f"{', '.join(wrong)}; not run: {', '.join(lacking)}" if lacking else f"no, several: {', '.join(wrong)}"
        )
    if failing(verdicts, TOGETHER) and len(passing(verdicts, BRANCHES.values())) == len(BRANCHES):
        against = failing(verdicts, (*STOPPED_GATES, *VANILLA))
        if against:
            return Step(f"{answer}; nor is it the gates: {', '.join(against)} fails too")
        spared = passing(verdicts, STOPPED_GATES)
        answer += f"; {', '.join(spared)} passes" if spared else ""
        return Step(answer, "look at the gates: each branch alone passes, all together fail", 1)
    return Step(answer)


def _same_parameters(verdicts: Verdicts) -> Step:
    failed = [verdicts[name] for name in failing(verdicts, verdicts)]
    lacking = [v for v in failed if v.cause == "unused_parameters" and v.parameters_missing]
    has_ended = bool(lacking)  # then each list is complete; that of a stall has what was still to come
    lacking = lacking or [v for v in failed if v.parameters_missing]
    missing = [set(v.parameters_missing) for v in lacking]
    common = set.intersection(*missing) if len(missing) > 1 else set()
    answer = f"yes: {', '.join(sorted(common)[:5])}" if common else "no"
    if not common or (any(m != common for m in missing) and not has_ended):
        return Step(answer)
    if not has_ended:  # the last of the model is the first that backward comes to
        owner = next(n for n in reversed(lacking[0].parameters_missing) if n in common).rpartition(".")[0]
        return Step(answer, f"look for in-place operations in the module that owns them ({owner})")
    where = f"look in the module that owns them ({_owner(sorted(common))}){_only_on(lacking)}"
    return Step(answer, f"{where} for what keeps their gradient from them: a detached tensor, an operation in place")


def _only_on(verdicts: list[Verdict]) -> str:
    """Return ', on rank 1 alone,' where all of these blame that, and other ranks ran."""
    parts = {(v.ranks, v.world_size) for v in verdicts}
    ranks, n = next(iter(parts))
    return f", on {describe_ranks(ranks, n)} alone," if len(parts) == 1 and len(ranks) < n else ""


def _owner(names: list[str]) -> str:
    """Return the module that owns parameters: the innermost that has all of them, or the first one's where that is the model."""
    owners = [name.rpartition(".")[0].split(".") for name in names]
    shared = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))]
    return ".".join(shared if len(shared) > 1 else owners[0])


def _vanilla(verdicts: Verdicts) -> Step:
    right, wrong = passing(verdicts, VANILLA), failing(verdicts, VANILLA)
    alone = backward_fails(verdicts, (*WITH_CHECKPOINTING, *WITHOUT_CHECKPOINTING))
    if right:
        answer = f"yes: NSA is at fault ({', '.join(right)})"
        first = verdicts[alone[0]] if alone else None
        if first is None:
            return Step(answer)
        where = f" ({first.where})" if first.where else ""
        return Step(answer, f"look at NSA's own backward{where}: the same model with plain attention passes")
    if not wrong:
        return Step("not run (--phases 7)")
    answer = f"no: NSA is not at fault alone ({', '.join(wrong)})"
    if not alone:
        return Step(answer)
    return Step(
        answer, "look at what both models share (embedding, norms, MLP, head, loss): plain attention fails too", 1
    )


def _gloo(verdicts: Verdicts) -> Step:
    gloo = verdicts.get(GLOO)
    if gloo is None:
        return Step("not run", "", 2)
    if not failing(verdicts, TOGETHER):
        return Step("no, and the step passes elsewhere, too", "", 2)
    alone = backward_fails(verdicts, (*WITH_CHECKPOINTING, *WITHOUT_CHECKPOINTING))
    if alone:
        return Step(f"it does not matter: one process has no transport, and fails ({alone[0]})", "", 2)
    if same_backend(verdicts):
        return Step(f"it cannot tell: both ran on {gloo.backend}", "", 2)
    answer = "yes" if gloo.failed else "no"
    if gloo.failed:
        nsa = ", of NSA's attention" if passing(verdicts, VANILLA) else ""
        return Step(answer, f"look at the autograd graph{nsa}: the transport is not at fault")
    return Step(answer, "look at NCCL's transport: the same step passes on gloo", 1)


TREE = (
    Question(
        "is every failure the ranks' own, and not the model's?", ("yes: do as its cause advises",), _of_the_ranks,
    ),
    Question(
        "has a check of checkpointing found the operation or the layer?",
        ("yes: take the write out of the region", "yes: gradient checkpointing, of that layer"), _found,
    ),
    Question(
        "does backward fail in one process?",
        ("yes, and only with checkpointing: gradient checkpointing (reentrant? boundaries? in-place writes?)",), _one_process,
    ),
    Question(
        "does one step on one backend end the same way twice?", ("no: contradictory, repeat the run",), _contradicts,
    ),
    Question("does a static graph pass where plain DDP fails?", ("yes: enable static_graph in production",), _static_graph),
    Question(
        "does one branch alone fail?", ("yes: fix that branch's backward", "none, but all together: the gates"), _branch_alone,
    ),
    Question(
        "are the same parameters missing every time?", ("yes: the module that owns them",), _same_parameters,
    ),
    Question(
        "does plain attention pass?",
        ("yes, and one process fails: NSA's own backward", "no, and one process fails: what both models share"), _vanilla,
    ),
    Question(
        "does gloo fail too?",
        ("yes: the autograd graph", "no: NCCL's transport", "it cannot tell: do as the surest verdict advises"), _gloo,
    ),
)  # fmt: skip


class Taken(NamedTuple):
    """The step that ended the way, the exit that it took ('' where none fits), and the questions with their answers."""

    step: Step
    exit: str
    path: list[str]


def _tree(verdicts: Verdicts) -> Taken:
    """Ask the questions in their order, until one gives an action."""
    path: list[str] = []
    for question in TREE:
        step = question.ask(verdicts)
        if step is None:
            continue
        path += (f"{question.text} {step.answer}", *step.more)
        if step.action is not None:
            return Taken(step, question.exits[step.leads_to], path)
    return Taken(Step(""), "", path)


def _answer(verdicts: Verdicts, names: tuple[str, ...], wrong: list[str]) -> str:
    told = ran(verdicts, names)
    if not told:
        return "not run"
    return f"yes: {', '.join(wrong)}" if wrong else f"no ({count(len(told), 'scenario')})"


def _passes(verdict: Verdict | None) -> str:
    return "not run" if verdict is None else f"{'yes' if verdict.outcome == 'PASS' else 'no'} ({verdict.outcome})"
