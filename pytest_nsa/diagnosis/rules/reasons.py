"""Why ranks left the common order, by evidence other than their calls: steps, paths through the model, hooks, threads,
loaders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_nsa.diagnosis.explain.contrast import Contrast
from pytest_nsa.diagnosis.explain.counters import alike
from pytest_nsa.diagnosis.explain.locations import split_place
from pytest_nsa.diagnosis.explain.program import Order
from pytest_nsa.diagnosis.facts import awaited, find_awaited
from pytest_nsa.diagnosis.rules.exits import is_victim_text
from pytest_nsa.diagnosis.verdict import describe_ranks
from pytest_nsa.diagnosis.words import step_that_differs
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.source import file_name
from pytest_nsa.evidence.values import Evidence, RankEvidence


def explained(
    evidence: Evidence,
    culprits: tuple[int, ...],
    cause: str,
    reason: str,
    entered: Mapping[int, Collective] | None = None,
) -> tuple[tuple[int, ...], str, str]:
    """Return the finding with what other evidence shows about the culprits: differing steps, paths, hooks, threads."""
    # A rank that is behind has not reached the rest of its step.
    odd = None if cause == "extra_collective" and have_fallen_back(evidence, culprits) else anomaly(evidence)
    if odd is not None and odd.is_habit and not set(odd.ranks) & set(culprits):
        odd = None  # a rank that accumulates at another rhythm synchronises at other steps
    if odd is not None and cause in ("skipped_collective", "collective_mismatch", "extra_collective"):
        who = describe_ranks(odd.ranks, evidence.job.world_size)
        # A rank that went on without the call skipped it, even where the step is unknown.
        blamed = culprits if cause == "skipped_collective" and set(odd.ranks) < set(culprits) else odd.ranks
        return (
            blamed,
            "skipped_collective",
            f"{who} made step {odd.step} otherwise than the others: {odd.reason}; {reason}",
        )
    # An aborted rank may have no stack.
    stacks = [r.stack for r in evidence.ranks if r.rank in culprits and r.stack is not None]
    if cause != "skipped_collective" and stacks and all(s.is_in_hook for s in stacks):
        return culprits, "hook_deadlock", f"in a gradient hook, {reason}"
    if len(culprits) == len(evidence.ranks):
        return culprits, cause, reason
    waiting = [r for r in evidence.ranks if r.rank not in culprits and (r.stack is not None or awaited(r) is not None)]
    if (
        cause == "skipped_collective"
        and waiting
        and all(map(_is_in_hook, waiting))
        and not any(s.is_in_hook for s in stacks)
    ):
        cause = "hook_deadlock"
        reason = (
            f"in a gradient hook, which did not run on {describe_ranks(culprits, evidence.job.world_size)}: {reason}"
        )
    if cause == "collective_mismatch" and len({(c.way, c.op) for c in (entered or {}).values()}) == 1:
        return culprits, cause, reason  # one call with other arguments: no other path
    path = other_path(evidence, culprits)
    if path:
        who = describe_ranks(culprits, evidence.job.world_size)
        return culprits, "data_dependent_branch", f"{who} {path}; {reason}"
    return culprits, cause, reason


def _is_in_hook(rank: RankEvidence) -> bool:
    """Return whether a rank is in a gradient hook: by its stack, or, without a usable one, by the lines that led to its
    call.
    """
    call = awaited(rank)
    if call is None or (rank.stack is not None and not rank.exceptions):
        return rank.stack is not None and rank.stack.is_in_hook
    file, _, function = split_place(call.site)
    if rank.exceptions and not any((e.file, e.function) == (file, function) for e in rank.exceptions):
        return False  # the call was begun there, and waited for elsewhere
    callers = [split_place(place) for place in call.way[1:]]
    begins = any(file_name(file) == f and ".backward(" in rank.sources.line(file, line) for f, line, _ in callers)
    return begins and not {function, *(name for *_, name in callers)} & {"backward", "forward"}


def have_fallen_back(evidence: Evidence, culprits: tuple[int, ...]) -> bool:
    """Return whether the loops' counters place the culprits before the call that each other rank waits in."""
    found = find_awaited(evidence.ranks)
    if any(rank not in found for rank in culprits):
        return False
    mine = alike(evidence, found, culprits)
    others = alike(evidence, found, found.keys() - set(culprits))
    return bool(mine and others) and all(
        Contrast(evidence, a[0], found[a[0]], b[0], found[b[0]]).order is Order.BEFORE for a in mine for b in others
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Anomaly:
    """What some ranks did in a step and the others did not. ``reason`` is the plan's reason, with details.

    ``is_habit``: programs do it in some of their steps, such as not synchronising while they accumulate gradients.
    """

    ranks: tuple[int, ...]
    step: int
    reason: str
    is_habit: bool = False


def anomaly(evidence: Evidence) -> Anomaly | None:
    """Return the last step in which some ranks, but not all, departed from the others."""
    by_step: dict[tuple[int, str], dict[int, dict[str, object]]] = {}
    for rank in evidence.ranks:
        for event in rank.anomalies:
            if event["kind"] == "not_finite" or (event["kind"] == "forward_failed" and _is_no_cause(rank, event)):
                continue
            is_consequence = any(error.time <= event["time"] for error in rank.exceptions)
            if not is_consequence:
                by_step.setdefault((event["step"], event["kind"]), {})[rank.rank] = event
    for (step, kind), ranks in sorted(by_step.items(), reverse=True):
        if len(ranks) < len(evidence.ranks):
            event = next(iter(ranks.values()))
            others = (rank for rank in evidence.ranks if rank.rank not in ranks)
            if kind == "no_backward" and not all(_is_past_forward(rank, step) for rank in others):
                continue
            is_habit = kind == "not_synchronised"
            return Anomaly(
                ranks=tuple(sorted(ranks)), step=step, reason=step_that_differs(kind, event), is_habit=is_habit
            )
    return None


def _is_past_forward(rank: RankEvidence, step: int) -> bool:
    """Return whether a rank has begun the backward of a step, or a later step."""
    if rank.board is None:
        return False
    now, length = rank.board.numbers["step"], rank.board.numbers.get("path_length", -1)  # -1 during a forward
    return now > step or (now == step and length >= 0)


def _is_no_cause(rank: RankEvidence, event: dict[str, object]) -> bool:
    """Return whether the exception that ended a forward is a victim's error, or ended the test, so that no handler
    swallowed it.
    """
    error = str(event.get("error", ""))
    was_raised = any(f"{e.type}: {e.message}"[: len(error)] == error for e in rank.exceptions)
    return was_raised or is_victim_text(error)


def other_path(evidence: Evidence, culprits: tuple[int, ...]) -> str:
    """Return how the culprits' path through the model differs, as 'entered b where the others entered a'; or ''.

    A rank that is less far in its forward has taken no other path. Nor has a rank with another root module, such as one
    that evaluates what DDP wraps while the others train.
    """
    paths = {r.rank: (r.board.path, r.modules) for r in evidence.ranks if r.board is not None and r.modules}
    whole = {step for r in evidence.ranks if r.rank in paths for step in [_step_of_backward(r)]}
    mine = next((paths[rank] for rank in paths if rank in culprits), None)
    others = [path for rank, path in paths.items() if rank not in culprits]
    if mine is None or not others or any(o != others[0] for o in others if len(o[0]) == len(others[0][0])):
        return ""
    if mine[0][:1] != others[0][0][:1]:
        return ""
    for a, b in zip(mine[1], others[0][1], strict=False):
        if a != b:
            return f"entered {a} where the others entered {b}"
    omitted = others[0][1][len(mine[1]) :]
    is_whole = len(whole) == 1 and 0.0 not in whole
    if not omitted or not omitted[0] or not is_whole:
        return ""
    return f"has not entered {omitted[0]}, as the others have"


def _step_of_backward(rank: RankEvidence) -> float:
    """Return the step for which a rank is in backward, or has left it without a further forward; 0 in any other phase."""
    board = rank.board
    is_past = board is not None and (
        board.phase == "backward" or (board.phase != "forward" and board.numbers["gradients"] > 0)
    )
    return board.numbers["step"] if board is not None and is_past else 0.0
