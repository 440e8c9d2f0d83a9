"""The second run of a failed test: whether it is made, for how long, and what its recorded control flow adds to the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pytest_nsa.diagnosis.verdict import NO_RANK, Verdict, describe_ranks
from pytest_nsa.evidence.values import Evidence, Fact, RankEvidence
from pytest_nsa.flow.first import FirstDivergence, find_first
from pytest_nsa.flow.read import FILE, read_flow
from pytest_nsa.report.divergence import SECOND_RUN
from pytest_nsa.session.bisect import Variation
from pytest_nsa.settings import Settings

LABEL = "flow"
AUTO = 5  # tests of a session that run again
MOST_S, LEAST_S, TIMES = 60.0, 10.0, 4.0
# Nothing in the program's control flow explains these: the machine, a signal, or the group's addresses.
_FROM_OUTSIDE = frozenset(
    {"oom", "network_unusable", "init_timeout", "rank_died", "rank_stopped", "transport_stuck", "device_busy"}
)
# Causes that the rules choose by weights where ranks are in different calls.
_BY_WEIGHTS = ("calls.", "absence.", "messages.", "keys.", "groups.", "hooks.")


def is_wanted(item: pytest.Item, settings: Settings, verdict: Verdict, made: int) -> bool:
    """Return whether a failed test runs again: its ranks did different things. ``made`` is the number of second runs so far."""
    mark = item.get_closest_marker("rerun")
    if (
        settings.rerun == "off"
        or item.config.getoption("usepdb", False)
        or (mark is not None and mark.args == (False,))
    ):
        return False
    if verdict.world_size < 2 or verdict.outcome not in ("HANG", "FAIL", "CRASH") or verdict.cause in _FROM_OUTSIDE:
        return False
    if verdict.outcome == "FAIL" and len(verdict.ranks) == verdict.world_size:  # all ranks fail alike
        return False
    return settings.rerun == "all" or made < AUTO


def limit_of(evidence: Evidence) -> float:
    """Return the seconds that the second run may take: a multiple of what the first took until it stalled."""
    until = max(0.0, evidence.duration_s - evidence.stalled_s)
    return min(MOST_S, max(LEAST_S, TIMES * until))


def variation_of(evidence: Evidence) -> Variation:
    """Return the test as it runs again: with the same seed, and its control flow recorded."""
    return Variation(label=LABEL, flow=True, seed=evidence.job.seed)


def find_divergence(evidence: Evidence) -> FirstDivergence | None:
    """Return where the ranks of a second run parted first; None where they did not, or where it cannot be seen."""
    flows = [read_flow(rank.folder / FILE, rank.rank) for rank in evidence.ranks]
    if any(flow is not None and flow.is_cut for flow in flows):
        return None
    return find_first([flow for flow in flows if flow is not None], evidence.members, _stuck(evidence))


def _stuck(evidence: Evidence) -> list[Sequence[int]]:
    """Return the ranks of each call in which a rank waits; none where no rank waits."""
    found: list[Sequence[int]] = []
    for rank in evidence.ranks:
        call = rank.board.blocked if rank.board is not None and not rank.finished else None
        if call is not None:
            found.append((rank.rank, call.peer) if call.peer >= 0 else (*evidence.members(call.group), rank.rank))
        elif rank.waits_for_a_key:
            return []
    return found


def add_divergence(verdict: Verdict, first: Evidence, second: Evidence, again: Verdict) -> Verdict:
    """Return the verdict with the first divergence that the second run shows, or with a sentence about that run."""
    if not again.failed:
        return _with_fact(
            verdict, "the second run passed: the failure depends on timing, or on what an earlier test left"
        )
    found = find_divergence(second)
    is_same = _ends(first) == _ends(second)
    if found is None:
        if not is_same:
            return _with_fact(
                verdict, f"the second run ended elsewhere: {again.cause} on {again.culprits()} at {again.where}"
            )
        return verdict
    changed = replace(verdict, first_divergence=found.to_json())
    if verdict.certain or not verdict.rule.startswith(_BY_WEIGHTS):
        return changed
    is_known = is_same and bool(found.exceptional)
    return replace(
        changed,
        cause=_cause(found, verdict),
        ranks=_to_blame(found, verdict),
        where=found.where,
        certain=is_known,
        confidence=1.0 if is_known else verdict.confidence,
        reason=_reason(found, verdict),
        advice=_advice(found),
        called_from="",
        terms={},
    )


def _to_blame(found: FirstDivergence, verdict: Verdict) -> tuple[int, ...]:
    """Return the ranks of the rarer outcomes; without a majority the side that the verdict names, else both."""
    if found.exceptional:
        return found.exceptional
    sides = list(found.outcomes.values())
    return verdict.ranks if verdict.ranks in sides else tuple(sorted(rank for ranks in sides for rank in ranks))


def _with_fact(verdict: Verdict, text: str) -> Verdict:
    return replace(verdict, evidence=(*verdict.evidence, Fact(rank=NO_RANK, kind=SECOND_RUN, file="", text=text)))


def _ends(evidence: Evidence) -> list[tuple[object, ...]]:
    """Return the last call of each rank, and its latest exception: what two runs of a test that fails alike have in common."""
    return [_end(rank) for rank in evidence.ranks]


def _end(rank: RankEvidence) -> tuple[object, ...]:
    call = rank.collectives[-1] if rank.collectives else None
    raised = rank.exceptions[-1].type if rank.exceptions else ""
    return (rank.finished, raised, *((call.op, call.group, call.sequence, call.site) if call is not None else ()))


def _cause(found: FirstDivergence, verdict: Verdict) -> str:
    if found.kind == "argument" and verdict.cause not in ("p2p_unmatched", "group_order_deadlock"):
        return "collective_mismatch"
    return verdict.cause


def _reason(found: FirstDivergence, verdict: Verdict) -> str:
    texts = [f"{describe_ranks(ranks, verdict.world_size)}: {outcome}" for outcome, ranks in found.outcomes.items()]
    return f"the ranks parted at `{found.statement}`: {'; '.join(texts)}"


def _advice(found: FirstDivergence) -> str:
    if found.kind == "argument":
        return "give the call the same arguments on every rank of its group"
    if found.kind == "exception":
        return "handle the exception on all ranks alike, or let it end the test"
    names = [name for name in found.values if "rank" not in name.lower()]
    if names:
        return f"decide by a value that all ranks share: reduce or broadcast `{names[0]}` first"
    return "make every rank of the group reach the same calls, whatever its number"
