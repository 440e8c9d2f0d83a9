"""Replicas that nothing reduces, while other ranks reduce a model of the same form at the same line of the program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pytest_nsa.diagnosis.rules.training_states import grouped
from pytest_nsa.diagnosis.verdict import Fact, Finding, describe_ranks
from pytest_nsa.evidence.values import Evidence, RankEvidence
from pytest_nsa.wire.files import read_lines, with_numbers

TOLERANCE = 1e-6  # relative, of a tensor's norm
Records = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Model:
    """A model that a rank updates: its parameters' names, the line of the update, the ranks that reduce it, the norms at its first
    call, and its records after updates.
    """

    names: tuple[str, ...]
    site: str
    members: tuple[int, ...]
    begun: tuple[float, ...]
    records: Records

    @property
    def form(self) -> tuple[tuple[str, ...], str, int]:
        """What equal models have in common."""
        return self.names, self.site, len(self.records)


def unreduced_replicas(evidence: Evidence) -> Finding | None:
    """Find ranks that began with equal models and updated them alone, until they differed; as many other ranks reduce theirs.

    If these began with the same model, a test that passes may compare both ways to train it.
    """
    return find_unreduced(evidence, of_a_failure=False)


def find_unreduced(evidence: Evidence, *, of_a_failure: bool) -> Finding | None:
    """Find the same; in a test that fails also where both began with the same model, which is not certain then."""
    found = _find(evidence, begins_alike=False)
    alike = _find(evidence, begins_alike=True) if found is None and of_a_failure else None
    return found if alike is None else replace(alike, certain=False, confidence=0.6)


def _find(evidence: Evidence, *, begins_alike: bool) -> Finding | None:
    if not evidence.job.check_divergence:
        return None
    models = [(rank.rank, model) for rank in evidence.ranks for model in _models(rank)]
    for form in dict.fromkeys(model.form for _, model in models):
        alike = [(rank, model) for rank, model in models if model.form == form]
        reduced = {model.members for _, model in alike if len(model.members) > 1}
        reducing = {rank for members in reduced for rank in members}
        alone = {r: m for r, m in alike if m.members == (r,) and m.begun and r not in reducing}
        others = [] if begins_alike else [model.begun for rank, model in alike if rank in reducing and model.begun]
        for ranks in grouped({r: str(m.begun) for r, m in alone.items() if m.begun not in others}):
            members = next((of for of in reduced if len(of) == len(ranks)), ())
            if members and (found := _diverged(evidence, {r: alone[r] for r in ranks}, members)) is not None:
                return found
    return None


def _models(rank: RankEvidence) -> Iterator[_Model]:
    by_model: dict[int, Records] = {}
    for record in map(with_numbers, read_lines(rank.checksums) if rank.checksums.is_file() else ()):
        by_model.setdefault(record.get("model", 0), []).append(record)
    for records in by_model.values():
        updates = [r for r in records if r["kind"] in ("alone", "by_hand", "parameter")]
        groups = {tuple(r.get("ranks", ())) for r in updates}
        names = next((r["names"] for r in records if "names" in r), ())
        begun = next((r["begun"].get("norms", ()) for r in records if r.get("begun")), ())
        if updates and len(groups) == 1:
            yield _Model(tuple(names), updates[0].get("site", ""), groups.pop(), tuple(begun), updates)


def _diverged(evidence: Evidence, alone: Mapping[int, _Model], members: tuple[int, ...]) -> Finding | None:
    ranks, world_size = tuple(alone), evidence.job.world_size
    for records in zip(*(model.records for model in alone.values()), strict=True):
        for name, *norms in zip(alone[ranks[0]].names, *(r["norms"] for r in records), strict=False):
            values = dict(zip(ranks, norms, strict=True))
            if len(grouped(values, TOLERANCE)) > 1:
                shown = ", ".join(f"rank {rank}: {value:.6g}" for rank, value in values.items() if value is not None)
                line = _find_reduction(evidence, members, ranks)
                reason = f"{describe_ranks(ranks, world_size)} began with equal models and nothing reduces them; "
                reason += f"from step {records[0]['step']} on {name} differs; L2 norms: {shown}; "
                reason += f"{describe_ranks(members, world_size)} reduce theirs{f', at {line}' if line else ''}"
                return Finding(
                    cause="silent_divergence", ranks=ranks, where=line or alone[ranks[0]].site, reason=reason, certain=True,
                    module=name.rpartition(".")[0], confidence=0.95,
                    advice="reduce the gradients on these ranks too: see what decides whether the line is reached",
                    facts=tuple(
                        Fact(rank=r, kind="checksum", file=f"rank{r}/checksums.jsonl", text=f"{name}: {v}")
                        for r, v in values.items()
                    ),
                )  # fmt: skip
    return None


def _find_reduction(evidence: Evidence, members: tuple[int, ...], others: tuple[int, ...]) -> str:
    """Return the line at which ``members`` reduce among themselves, if none of the ``others`` calls there; else ''."""
    sites = [
        call.site
        for call in evidence.ranks[members[0]].collectives
        if call.op.startswith("allreduce") and evidence.members(call.process_group) == members
    ]
    called = {call.site for rank in others for call in evidence.ranks[rank].collectives}
    return next((site for site in reversed(sites) if site and site not in called), "")
