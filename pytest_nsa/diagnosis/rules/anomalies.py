"""Steps that went otherwise on some ranks than on the others: why a collective was skipped."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_nsa.diagnosis.rules.exits import is_victim_text
from pytest_nsa.evidence.values import Evidence, RankEvidence

HABIT = 0.5  # of a rank's steps: what happens so often is how this program trains


@dataclass(frozen=True, kw_only=True, slots=True)
class Anomaly:
    """What some ranks did in a step and the others did not; ``why`` is the reason of the plan's list, with what is known.

    ``is_habit``: of what programs do in some of their steps, as they do not synchronise while they accumulate.
    """

    ranks: tuple[int, ...]
    step: int
    why: str
    is_habit: bool = False


def anomaly(evidence: Evidence) -> Anomaly | None:
    """Return the last step that went otherwise on some ranks, but not on all."""
    by_step: dict[tuple[int, str], dict[int, dict[str, object]]] = {}
    habits = [_habits(rank) for rank in evidence.ranks]
    # A program that evaluates with gradients on does so on every rank, whichever has made more of it so far.
    everywhere = {"no_backward"} & set().union(*habits)
    for rank, usual in zip(evidence.ranks, habits, strict=True):
        for event in rank.anomalies:
            if event["kind"] == "not_finite" or (event["kind"] == "forward_failed" and _is_no_cause(rank, event)):
                continue
            is_consequence = any(error.time <= event["time"] for error in rank.exceptions)
            if event["kind"] not in usual | everywhere and not is_consequence:
                by_step.setdefault((event["step"], event["kind"]), {})[rank.rank] = event
    for (step, kind), ranks in sorted(by_step.items(), reverse=True):
        if len(ranks) < len(evidence.ranks):
            event = next(iter(ranks.values()))
            is_habit = kind == "not_synchronised"
            return Anomaly(ranks=tuple(sorted(ranks)), step=step, why=_why(kind, event), is_habit=is_habit)
    return None


def _habits(rank: RankEvidence) -> set[str]:
    """Return the kinds of anomaly that most of a rank's steps have, and more than one."""
    steps = rank.board.numbers["step"] if rank.board is not None else 0.0
    kinds = [e["kind"] for e in rank.anomalies]
    return {kind for kind in kinds if kinds.count(kind) >= max(2.0, HABIT * steps)}


def _is_no_cause(rank: RankEvidence, event: dict[str, object]) -> bool:
    """Return whether what ended a forward is what another rank's end looks like, or ended the test: no handler swallowed it."""
    error = str(event.get("error", ""))
    told = any(f"{e.type}: {e.message}"[: len(error)] == error for e in rank.exceptions)
    return told or is_victim_text(error)


def _why(kind: str, event: dict[str, object]) -> str:
    if kind == "forward_failed":
        return f"forward aborted by a swallowed exception in {event.get('module') or 'the model'}: {event.get('error')}"
    if kind == "not_synchronised":
        return "no_sync on some ranks only"
    return "batch skipped, no backward" if event.get("finite", True) else "batch skipped after NaN, no backward"


def other_path(evidence: Evidence, culprits: tuple[int, ...]) -> str:
    """Return how the culprits' way through the model differs from the others', as 'entered b where the others entered a'; or ''.

    A rank that has only come less far in its forward has taken no other path, nor one whose latest forward is of another module: of
    what DDP wraps, called to evaluate, where the others train.
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
            if _is_another_model(evidence, culprits, a) or _is_another_model(evidence, culprits, b):
                return ""
            return f"entered {a} where the others entered {b}"
    left_out = others[0][1][len(mine[1]) :]
    is_whole = len(whole) == 1 and 0.0 not in whole
    if not left_out or not left_out[0] or not is_whole or _is_another_model(evidence, culprits, left_out[0]):
        return ""
    return f"has not entered {left_out[0]}, as the others have"


def _is_another_model(evidence: Evidence, culprits: tuple[int, ...], module: str) -> bool:
    """Return whether a module with parameters is in the culprits' model or in the others' alone: stages of a pipeline differ so."""
    has = {
        rank.rank in culprits: any(name.startswith(f"{module}.") for name in rank.parameter_names)
        for rank in evidence.ranks
        if rank.parameter_names
    }
    return len(set(has.values())) > 1


def _step_of_backward(rank: RankEvidence) -> float:
    """Return the step whose backward a rank is in or has made, and so no forward since; 0 where it is elsewhere."""
    board = rank.board
    is_past = board is not None and (
        board.phase == "backward" or (board.phase != "forward" and board.numbers["gradients"] > 0)
    )
    return board.numbers["step"] if board is not None and is_past else 0.0
