"""Why ranks left the others' order, by what is known beyond their calls: steps, ways through the model, hooks, threads, loaders."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_nsa.diagnosis.explain.contrast import Contrast
from pytest_nsa.diagnosis.explain.counters import alike
from pytest_nsa.diagnosis.explain.hooks import is_in_hook
from pytest_nsa.diagnosis.explain.program import Order
from pytest_nsa.diagnosis.explain.side_threads import raced
from pytest_nsa.diagnosis.facts import awaited
from pytest_nsa.diagnosis.rules.anomalies import anomaly, other_path
from pytest_nsa.diagnosis.verdict import describe_ranks
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence


def explained(
    evidence: Evidence, culprits: tuple[int, ...], cause: str, why: str, entered: Mapping[int, Collective] | None = None
) -> tuple[tuple[int, ...], str, str]:
    """Blame, with what is known of the ranks beyond their collectives: steps that went otherwise, other paths, hooks, threads."""
    if cause in ("extra_collective", "skipped_collective") and raced(evidence, culprits, entered or {}):
        told = "one of the two is made in a thread beside the main one, which all of them have: which comes first is chance"
        return culprits, "collective_mismatch", f"{why}: {told}"
    # Who is behind has not come to what its step lacks.
    odd = None if cause == "extra_collective" and are_behind(evidence, culprits) else anomaly(evidence)
    if odd is not None and odd.is_habit and not set(odd.ranks) & set(culprits):
        odd = None  # who accumulates by another rhythm synchronises at other steps
    if odd is not None and cause in ("skipped_collective", "collective_mismatch", "extra_collective"):
        who = describe_ranks(odd.ranks, evidence.job.world_size)
        # Each that went on without the call has left it out, whether or not the step in which it did so is known.
        blamed = culprits if cause == "skipped_collective" and set(odd.ranks) < set(culprits) else odd.ranks
        return blamed, "skipped_collective", f"{who} made no whole step {odd.step}: {odd.why}. {why}"
    # Who was aborted may have no stack.
    stacks = [r.stack for r in evidence.ranks if r.rank in culprits and r.stack is not None]
    if cause != "skipped_collective" and stacks and all(s.is_in_hook for s in stacks):
        return culprits, "hook_deadlock", f"in a gradient hook, {why}"
    if len(culprits) == len(evidence.ranks):
        return culprits, cause, why
    waiting = [r for r in evidence.ranks if r.rank not in culprits and (r.stack is not None or awaited(r) is not None)]
    if (
        cause == "skipped_collective"
        and waiting
        and all(map(is_in_hook, waiting))
        and not any(s.is_in_hook for s in stacks)
    ):
        cause = "hook_deadlock"
        why = f"in a gradient hook, which did not run on {describe_ranks(culprits, evidence.job.world_size)}: {why}"
    if cause == "collective_mismatch" and len({c.way for c in (entered or {}).values()}) == 1:
        return culprits, cause, why  # one line, and what it carries: no other way
    path = other_path(evidence, culprits)
    if path:
        who = describe_ranks(culprits, evidence.job.world_size)
        return culprits, "data_dependent_branch", f"{who} {path}. {why}"
    return culprits, cause, why


def are_behind(evidence: Evidence, culprits: tuple[int, ...]) -> bool:
    """Return whether the culprits are, by the loops' counters, before what each other rank waits in."""
    found = {r.rank: c for r in evidence.ranks if (c := awaited(r)) is not None}
    if any(rank not in found for rank in culprits):
        return False
    mine = alike(evidence, found, culprits)
    others = alike(evidence, found, found.keys() - set(culprits))
    return bool(mine and others) and all(
        Contrast(evidence, a[0], found[a[0]], b[0], found[b[0]]).order is Order.BEFORE for a in mine for b in others
    )


def ran_out(evidence: Evidence, culprits: tuple[int, ...], cause: str) -> str:
    """Return that the culprits' data loaders came to their end and the others' did not, where they did; else ''."""
    ended = {r.rank: r.board.numbers.get("loaders_ended", 0.0) for r in evidence.ranks if r.board is not None}
    others = [n for rank, n in ended.items() if rank not in culprits]
    if cause != "skipped_collective" or not others or not all(ended.get(r, 0.0) > max(others) for r in culprits):
        return ""
    return f"; the data loader of {describe_ranks(culprits, evidence.job.world_size)} ran out of data: uneven batches"
