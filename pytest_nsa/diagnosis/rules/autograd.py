"""What torch states about autograd and DDP, and gradients that never arrived."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pytest_nsa.diagnosis.facts import all_facts, exception_fact, few, missing_fact
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.values import Evidence, RaisedException, RankEvidence

_TWICE = re.compile(r"Parameter at index (\d+)(?: with name (\S+?))? has been marked as ready twice")


def _raised(evidence: Evidence, *texts: str) -> Iterator[tuple[RankEvidence, RaisedException]]:
    for rank in evidence.ranks:
        for error in rank.exceptions:
            if any(text in error.message for text in texts):
                yield rank, error
                break


def ready_twice(evidence: Evidence) -> Finding | None:
    """Find that a parameter was marked ready twice, usually by reentrant checkpointing under DDP."""
    found = list(_raised(evidence, "marked as ready twice", "Expected to mark a variable ready only once"))
    if not found:
        return None
    rank, error = found[0]
    match = _TWICE.search(error.message)
    index = int(match[1]) if match else None
    name = (match[2] or "") if match else ""
    if not name and index is not None and index < len(rank.parameter_names):
        name = rank.parameter_names[index]
    name = name.removeprefix("module.")
    which = f"parameter {index} ({name or 'name unknown'})" if index is not None else "a parameter"
    return Finding(
        cause="ready_twice",
        ranks=tuple(r.rank for r, _ in found),
        where=error.where,
        module=name,
        reason=f"{which} was marked as ready twice in one backward: its hook fired twice, as under reentrant checkpointing",
        certain=True,
        confidence=0.99,
        facts=tuple(exception_fact(r, e) for r, e in found),
    )


def unused_parameters(evidence: Evidence) -> Finding | None:
    """Find that a forward began before the last backward had reduced every parameter."""
    found = list(_raised(evidence, "Expected to have finished reduction in the prior iteration"))
    if not found:
        return None
    rank, error = found[0]
    indices = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", error.message)
    names = (
        [rank.parameter_names[int(i)] for i in indices[1].split() if int(i) < len(rank.parameter_names)]
        if indices
        else []
    )
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return Finding(
        cause="unused_parameters",
        ranks=tuple(r.rank for r, _ in found),
        where=error.where,
        module=names[0] if names else "",
        reason=f"parameters took no part in the last backward: {shown or 'torch names none'}",
        certain=True,
        confidence=0.97,
        facts=tuple(exception_fact(r, e) for r, e in found),
    )


def static_graph_changed(evidence: Evidence) -> Finding | None:
    """Find that the graph changed though DDP was configured with a static graph."""
    found = list(_raised(evidence, "our training graph has changed in this iteration"))
    if not found:
        return None
    return Finding(
        cause="static_graph_changed",
        ranks=tuple(r.rank for r, _ in found),
        where=found[0][1].where,
        reason="under static_graph=True the autograd graph of this step differs from the first step's",
        certain=True,
        confidence=0.97,
        facts=tuple(exception_fact(r, e) for r, e in found),
    )


def never_arrived(evidence: Evidence) -> Finding | None:
    """Find the parameters without a gradient that explain why a test fails.

    DDP waits for each gradient; replicas that reduce by hand lack some; or the test's assertion names the parameter.
    Otherwise a parameter may be unused on purpose.
    """
    without = [r for r in evidence.ranks if r.gradients_missing]
    asserted = [(r, error) for r in without if (error := _asserts_on_it(r)) is not None]
    waited_for = [r for r in without if r.needs_every_gradient]
    blamed = waited_for or [r for r, _ in asserted]
    if not blamed:
        return None
    ranks, n = tuple(r.rank for r in blamed), evidence.job.world_size
    first = min((r.gradients_missing[0] for r in blamed), key=lambda found: found.step)
    others = f"; on {'the other rank' if n == 2 else 'the others'} all arrived" if len(without) < n else ""
    return Finding(
        cause="unused_parameters",
        ranks=ranks,
        where=asserted[0][1].where if asserted else first.where,
        module=first.names[0].rpartition(".")[0],
        reason=f"after the backward of step {first.step} no gradient had arrived on {describe_ranks(ranks, n)} for "
        f"{few(first.names)}{others}",
        certain=True,
        confidence=0.95,
        facts=(
            *(fact for r in blamed if (fact := missing_fact(r)) is not None),
            *(exception_fact(r, error) for r, error in asserted),
            *all_facts(tuple(r for r in evidence.ranks if r not in blamed)),
        ),
    )


def _asserts_on_it(rank: RankEvidence) -> RaisedException | None:
    """Return the failed assertion of the rank that names a parameter without a gradient."""
    names = [name for found in rank.gradients_missing for name in found.names]
    failed = (error for error in rank.exceptions if error.type == "AssertionError")
    return next((error for error in failed if any(name in error.message for name in names)), None)
