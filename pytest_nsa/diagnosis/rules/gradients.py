"""Gradients that never arrived in a backward that ended, as a requested trace found."""

from __future__ import annotations

from pytest_nsa.diagnosis.facts import all_facts, exception_fact, few, missing_fact
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.values import Evidence, RaisedException, RankEvidence


def never_arrived(evidence: Evidence) -> Finding | None:
    """Find the parameters without a gradient where a test fails by them.

    DDP waits for each; of replicas that reduce by hand some lack it; or the test's assertion names one. Elsewhere a parameter may
    be unused on purpose.
    """
    without = [r for r in evidence.ranks if r.gradients_missing]
    asserted = [(r, error) for r in without if (error := _asserts_on_it(r)) is not None]
    waited_for = [r for r in without if r.needs_every_gradient]
    apart = without if len(without) < len(evidence.ranks) and _reduce_by_hand(evidence) else []
    blamed = waited_for or apart or [r for r, _ in asserted]
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


def _reduce_by_hand(evidence: Evidence) -> bool:
    """Return whether the ranks have one model each, equal, that nothing wraps: what one lacks, the others reduce."""
    return all(r.parallel is None and r.parameter_names == evidence.ranks[0].parameter_names for r in evidence.ranks)


def _asserts_on_it(rank: RankEvidence) -> RaisedException | None:
    """Return the failed assertion of the rank that names a parameter without a gradient."""
    names = [name for found in rank.gradients_missing for name in found.names]
    failed = (error for error in rank.exceptions if error.type == "AssertionError")
    return next((error for error in failed if any(name in error.message for name in names)), None)
