"""What torch states about autograd and DDP, and gradients that never arrived."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pytest_nsa.diagnosis.facts import all_facts, exception_fact, few, missing_fact
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.values import Evidence, RaisedException, RankEvidence

_TWICE = re.compile(r"Parameter at index (\d+)(?: with name (\S+?))? has been marked as ready twice")
_NAMED = re.compile(r"Parameters which did not receive grad for rank \d+: ([^\n]+)")  # by TORCH_DISTRIBUTED_DEBUG
_WITHOUT_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")


def ready_twice(evidence: Evidence) -> Finding | None:
    """Find that a parameter was marked ready twice, usually by reentrant checkpointing under DDP."""

    def details(rank: RankEvidence, error: RaisedException) -> tuple[str, str]:
        match = _TWICE.search(error.message)
        name = (match[2] or "".join(_find_names(rank, [match[1]]))).removeprefix("module.") if match else ""
        which = f"parameter {match[1]} ({name or 'name unknown'})" if match else "a parameter"
        return (
            f"{which} was marked as ready twice in one backward: its hook fired twice, as under reentrant checkpointing",
            name,
        )

    texts = ("marked as ready twice", "Expected to mark a variable ready only once")
    return _stated_by_torch(evidence, "ready_twice", texts, details)


def unused_parameters(evidence: Evidence) -> Finding | None:
    """Find that a forward began before the last backward had reduced every parameter."""

    def details(rank: RankEvidence, error: RaisedException) -> tuple[str, str]:
        named, match = _NAMED.search(error.message), _WITHOUT_GRADIENT.search(error.message)
        names = _find_names(rank, match[1].split()) if match else []
        if named:  # in any order
            listed = [p.name for wrap in rank.wrapped for p in wrap.trained] or rank.parameter_names
            places = {name: n for n, name in enumerate(listed)}
            names = sorted(named[1].strip().split(", "), key=lambda name: places.get(name, 0))
        reason = f"parameters took no part in the last backward: {few(names) or 'torch names none'}"
        return reason, names[0].rpartition(".")[0] if names else ""

    texts = ("Expected to have finished reduction in the prior iteration",)
    return _stated_by_torch(evidence, "unused_parameters", texts, details)


def _find_names(rank: RankEvidence, indices: Sequence[str]) -> list[str]:
    """Return the names of parameters by torch's indices: of the one model that DDP has wrapped, as it was then; [] if one does not
    fit. Later a program may have frozen some.
    """
    lists = {tuple(p.name for p in wrap.trained) for wrap in rank.wrapped} or {tuple(rank.parameter_names)}
    names = lists.pop()
    numbers = [int(index) for index in indices]
    return [names[n] for n in numbers] if not lists and max(numbers, default=0) < len(names) else []


def static_graph_changed(evidence: Evidence) -> Finding | None:
    """Find that the graph changed though DDP was configured with a static graph."""
    reason = "under static_graph=True the autograd graph of this step differs from the first step's"
    texts = ("our training graph has changed in this iteration",)
    return _stated_by_torch(evidence, "static_graph_changed", texts, lambda *_: (reason, ""))


def _stated_by_torch(
    evidence: Evidence, cause: str, texts: tuple[str, ...], details: Callable[[RankEvidence, RaisedException], tuple[str, str]]
) -> Finding | None:  # fmt: skip
    """Find the ranks that raised an exception with one of ``texts``; ``details`` returns the reason and the module."""
    raised = ((r, [e for e in r.exceptions if any(text in e.message for text in texts)]) for r in evidence.ranks)
    found = [(rank, errors[0]) for rank, errors in raised if errors]
    if not found:
        return None
    n, module = evidence.job.world_size, ""
    by_reason: dict[str, tuple[int, ...]] = {}
    for rank, error in found:
        reason, of_rank = details(rank, error)
        module = module or of_rank
        by_reason[reason] = (*by_reason.get(reason, ()), rank.rank)
    if len(by_reason) > 1:
        reason = "; ".join(f"on {describe_ranks(ranks, n)} {text}" for text, ranks in by_reason.items())
    return Finding(
        cause=cause, ranks=tuple(r.rank for r, _ in found), where=found[0][1].where, module=module, reason=reason,
        certain=True, confidence=0.97, facts=tuple(exception_fact(r, e) for r, e in found),
    )  # fmt: skip


def never_arrived(evidence: Evidence) -> Finding | None:
    """Find the parameters without a gradient that explain why a test fails.

    DDP waits for each gradient; replicas that reduce by hand lack some; or the test's assertion names the parameter.
    Otherwise a parameter may be unused on purpose.
    """
    without = [r for r in evidence.ranks if r.gradients_missing]
    asserted = [(r, error) for r in without if (error := _assertion_on_missing_gradient(r)) is not None]
    find_awaited_ranks = [r for r in without if r.needs_every_gradient]
    blamed = find_awaited_ranks or [r for r, _ in asserted]
    if not blamed:
        return None
    ranks, n = tuple(r.rank for r in blamed), evidence.job.world_size
    first = min((r.gradients_missing[0] for r in blamed), key=lambda found: found.step)
    others = f"; on {'the other rank' if n == 2 else 'the others'} all arrived" if len(without) < n else ""
    return Finding(
        cause="unused_parameters", ranks=ranks, where=asserted[0][1].where if asserted else first.where,
        module=first.names[0].rpartition(".")[0],
        reason=f"no gradient arrived in step {first.step} on {describe_ranks(ranks, n)}; missing: "
        f"{few(first.names)}{others}",
        certain=True, confidence=0.95,
        facts=(
            *(fact for r in blamed if (fact := missing_fact(r)) is not None),
            *(exception_fact(r, error) for r, error in asserted),
            *all_facts(tuple(r for r in evidence.ranks if r not in blamed)),
        ),
    )  # fmt: skip


def _assertion_on_missing_gradient(rank: RankEvidence) -> RaisedException | None:
    """Return the failed assertion of the rank that names a parameter without a gradient."""
    names = [name for found in rank.gradients_missing for name in found.names]
    failed = (error for error in rank.exceptions if error.type == "AssertionError")
    return next((error for error in failed if any(name in error.message for name in names)), None)
