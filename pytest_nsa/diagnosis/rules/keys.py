"""Ranks that wait for keys of a store, where every other rank waits, too, or has ended its test."""

from __future__ import annotations

from dataclasses import replace

from pytest_nsa.diagnosis.explain.choose import explain
from pytest_nsa.diagnosis.explain.edits import Calls, Edit
from pytest_nsa.diagnosis.explain.keys import Wanted, get_call, get_kind
from pytest_nsa.diagnosis.explain.messages import KEY, ended
from pytest_nsa.diagnosis.facts import STOPS, all_facts, awaited, few, last_seen
from pytest_nsa.diagnosis.rules.calls import make_calls_finding
from pytest_nsa.diagnosis.verdict import Finding, by_ranks, stated
from pytest_nsa.diagnosis.words import because, describe_awaited, list_terms, waits_for_a_key
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence, KeyUse


def unset(evidence: Evidence) -> Finding | None:
    """Find the ranks that did not set a key for which others wait, or that wait for a key that no rank sets."""
    entered = held_for_keys(evidence)
    found = explain(evidence, entered) if entered is not None else None
    if entered is None or found is None:
        return None
    n, wanted, ranks = evidence.job.world_size, found.candidate.wanted, found.candidate.ranks
    if wanted is None:  # another thread of a rank might set the key
        return replace(make_calls_finding(evidence, entered, found), certain=False, is_permanent=False)
    facts, terms = all_facts(evidence.ranks), list_terms(found, n)
    if found.candidate.is_for_all:
        first = evidence.ranks[ranks[0]]
        reason = by_ranks({rank: waits_for_a_key(evidence.ranks[rank]) for rank in ranks}, n)
        return Finding(
            cause="io_stuck", ranks=ranks, where=last_seen(first), reason=reason, confidence=0.6, facts=facts, terms=terms
        )  # fmt: skip
    is_counted = wanted.name in wanted.keys.known
    kind = "; too few ranks have counted in it" if is_counted else " that is not set"
    reason = stated(wanted.waiters, f"waits for a key of a store{kind}: {few(wanted.names)}", n)
    if found.candidate.edit is Edit.NEVER_SET:
        where, called_from = last_seen(evidence.ranks[ranks[0]]), ""
        others = {c.note for r, c in entered.items() if c.op == KEY and r not in ranks}
        reason += f"; the others wait for {few(sorted(others))}" if others else ""
        advice = "see why the rank waits for a key that no rank sets: its name, or a round that the others do not make"
    else:
        use = _usual(evidence, wanted, ranks)
        where, called_from = (
            use.where if use else last_seen(evidence.ranks[wanted.waiters[0]]),
            use.called_from if use else "",
        )
        reason += f"; {describe_awaited(evidence, ranks, entered)}" + (
            f"; such keys are set at {use.where}" if use else ""
        )
        advice = "see why the rank did not set the key that the others wait for"
    return Finding(
        cause=found.candidate.edit.cause, ranks=ranks, where=where, called_from=called_from, advice=advice,
        reason=reason + because(terms), confidence=round(found.probability, 2), facts=facts, terms=terms,
    )  # fmt: skip


def held_for_keys(evidence: Evidence) -> Calls | None:
    """Return what each rank waits in, or its end, where every rank waits or has ended, one or more of them for keys."""
    if evidence.stop not in (*STOPS, "left_alone") or evidence.moved_at_stop or not evidence.was_stalled:
        return None
    entered: dict[int, Collective] = {}
    for rank in evidence.ranks:
        call = awaited(rank)
        if rank.finished:
            entered[rank.rank] = ended(rank)
        elif rank.waits_for_a_key and not rank.is_waiting:
            entered[rank.rank] = get_call(rank)
        elif rank.is_waiting and call is not None:
            entered[rank.rank] = call
        else:
            return None
    return entered if any(c.op == KEY for c in entered.values()) else None


def _usual(evidence: Evidence, wanted: Wanted, ranks: tuple[int, ...]) -> KeyUse | None:
    """Return the latest use by which one of ``ranks``, else any rank, set such a key; None without one."""
    every = [r for r in evidence.ranks if r.rank not in ranks]
    for rank in [*(evidence.ranks[r] for r in ranks), *every]:
        latest = wanted.keys.latest(get_kind(wanted.name), rank.rank)
        if latest is not None:
            return latest[1]
    return None
