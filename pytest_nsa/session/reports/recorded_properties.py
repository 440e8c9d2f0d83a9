"""What ranks recorded for reports: rank 0's properties unchanged; those in which another rank differs as `rankR.NAME`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pytest_nsa.evidence.values import RankEvidence

Properties = list[tuple[str, Any]]


def item_properties(ranks: Sequence[RankEvidence]) -> Iterator[tuple[str, Any]]:
    """Yield what `record_property` was given: the properties of each rank's last report, which has all recorded so far."""
    return _by_rank(
        [[p for e in r.reports[-1:] for p in _pairs(e["report"].get("user_properties"))] for r in ranks], ranks
    )


def suite_properties(ranks: Sequence[RankEvidence]) -> Iterator[tuple[str, Any]]:
    """Yield what `record_testsuite_property` was given."""
    return _by_rank([[pair for entry in r.reports for pair in _pairs(entry.get("of_the_suite"))] for r in ranks], ranks)


def _by_rank(recorded: list[Properties], ranks: Sequence[RankEvidence]) -> Iterator[tuple[str, Any]]:
    for rank, found in zip(ranks, recorded, strict=True):
        if rank.rank == 0:
            yield from found
        else:
            yield from ((f"rank{rank.rank}.{name}", value) for name, value in found if (name, value) not in recorded[0])


def _pairs(found: Any) -> Properties:
    """Return names and values of what was read from a folder; drop what has another form, as any program may have written it."""
    if not isinstance(found, list):
        return []
    return [(str(pair[0]), pair[1]) for pair in found if isinstance(pair, list) and len(pair) == 2]
