"""Models that ranks give DDP with other parameters, or with the same ones in another order: DDP pairs them by position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.rules.training_states import grouped
from pytest_nsa.diagnosis.verdict import Fact, Finding, by_ranks
from pytest_nsa.evidence.values import Evidence, RankEvidence
from pytest_nsa.evidence.wrapped import Wrapped

_ALIKE = "build the model alike on all ranks: DDP pairs parameters by their position, whatever their names"
By = Mapping[int, Wrapped]  # what each rank of a group gave DDP, in one of its wraps


def incompatible(evidence: Evidence) -> Finding | None:
    """Find parameters at one position that DDP cannot pair, where a rank failed, died or stalled in the wrap or after it."""
    for by_rank in _wraps(evidence):
        found = _unlike(by_rank)
        if found is not None and any(_ended_in_wrap(evidence.ranks[rank], by_rank[rank]) for rank in by_rank):
            return _finding(evidence, by_rank, "collective_mismatch", *found)
    return None


def ordered_otherwise(evidence: Evidence) -> Finding | None:
    """Find a parameter that ranks trained as another one, though all of them passed."""
    return _misplaced(evidence) if evidence.job.check_divergence else None


def was_ordered_otherwise(evidence: Evidence) -> Finding | None:
    """Find the same before the test's own assertions failed, where nothing else failed."""
    errors = [e for r in evidence.ranks for e in r.exceptions if not is_victim(e)]
    if not errors or any(e.type != "AssertionError" for e in errors) or any(r.fatal_signal for r in evidence.ranks):
        return None
    return _misplaced(evidence)


def _misplaced(evidence: Evidence) -> Finding | None:
    for by_rank in _wraps(evidence):
        found = _misplaced_name(by_rank)
        if found is not None:
            return _finding(evidence, by_rank, "silent_divergence", *found)
    return None


def _wraps(evidence: Evidence) -> Iterator[By]:
    """Yield the wraps that the ranks of a group made together: the first of each, the second of each, and so on."""
    groups = dict.fromkeys(wrap.ranks for rank in evidence.ranks for wrap in rank.wrapped)
    for ranks in groups:
        made = [[w for w in evidence.ranks[n].wrapped if w.ranks == ranks] for n in ranks if n < len(evidence.ranks)]
        if len(made) == len(ranks) > 1:
            yield from (dict(zip(ranks, of_wrap, strict=True)) for of_wrap in zip(*made, strict=False))


def _unlike(by_rank: By) -> tuple[dict[int, str], str] | None:
    """Return, by rank, the parameters at the first position with several shapes or dtypes, or one that DDP does not reduce
    on all ranks, if it reduces different numbers of them; and the module.
    """
    trained = {rank: wrap.trained for rank, wrap in by_rank.items()}
    for at in zip(*trained.values(), strict=False):
        if len({p.kind for p in at}) > 1:
            return {rank: f"has {p.text}" for rank, p in zip(by_rank, at, strict=True)}, at[0].name.rpartition(".")[0]
    if len(set(map(len, trained.values()))) == 1:
        return None
    return next(_unequal_names(by_rank, [p.name for of in trained.values() for p in of]), None)


def _misplaced_name(by_rank: By) -> tuple[dict[int, str], str] | None:
    """Return a name that is at several positions among the trained parameters, or frozen on some ranks only; and the module.

    A name that only some ranks have proves nothing: DDP reduces what is at its position.
    """
    names = [{p.name for p in wrap.parameters} for wrap in by_rank.values()]
    first = next(iter(by_rank.values())).parameters
    return next(_unequal_names(by_rank, [p.name for p in first if all(p.name in of for of in names)]), None)


def _unequal_names(by_rank: By, names: Iterable[str]) -> Iterator[tuple[dict[int, str], str]]:
    places = {rank: {p.name: f"as parameter {n}" for n, p in enumerate(wrap.trained)} for rank, wrap in by_rank.items()}
    held = {rank: {p.name for p in wrap.parameters} for rank, wrap in by_rank.items()}
    for name in names:
        at = {rank: of.get(name, "frozen" if name in held[rank] else "") for rank, of in places.items()}
        if len(set(at.values())) > 1:
            texts = {rank: f"has {name} {place}" if place else f"has no {name}" for rank, place in at.items()}
            yield texts, name.rpartition(".")[0]


def _ended_in_wrap(rank: RankEvidence, wrap: Wrapped) -> bool:
    """Return whether a rank died, was stopped, or raised in a line that led to the wrap."""
    if rank.fatal_signal or not rank.finished:
        return True
    return any(wrap.where in (e.where, *(frame.describe() for frame in e.frames)) for e in rank.exceptions)


def _finding(evidence: Evidence, by_rank: By, cause: str, texts: Mapping[int, str], module: str) -> Finding:
    alike = max(grouped(texts), key=len)
    culprits = tuple(rank for rank in texts if rank not in alike)
    ranks = culprits if len(alike) > len(texts) / 2 else tuple(texts)
    shown = by_ranks(texts, evidence.job.world_size)
    return Finding(
        cause=cause, ranks=ranks, where=by_rank[ranks[0]].where, module=module, certain=True, confidence=0.95, advice=_ALIKE,
        reason=f"the models differ: {shown}",
        facts=tuple(
            Fact(rank=rank, kind="wrapped", file=f"rank{rank}/events.jsonl", text=text) for rank, text in texts.items()
        ),
    )  # fmt: skip
