"""Sends and receives of which the program dropped the Work without a wait: gloo forgets the message with it."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_nsa.diagnosis.facts import STOPS, all_facts, awaited
from pytest_nsa.diagnosis.rules.circles import has_forgotten
from pytest_nsa.diagnosis.verdict import Finding, by_ranks
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence


def dropped_halves(evidence: Evidence, halves: Mapping[int, Collective]) -> Finding | None:
    """Find ranks that dropped the other half of what other ranks wait in (``halves``, by rank).

    Messages between two ranks, in a group and of a tag, pair in their order.
    """
    dropped = {}
    for waiter, call in halves.items():
        if not 0 <= call.peer < len(evidence.ranks):
            continue
        peer = evidence.ranks[call.peer]
        made = [c for c in evidence.ranks[waiter].collectives if _is_of(c, call, call.peer, sends=call.is_send)]
        answers = [c for c in peer.collectives if _is_of(c, call, waiter, sends=not call.is_send)]
        number = [c.index for c in made].index(call.index)
        if has_forgotten(evidence.ranks[waiter]) or has_forgotten(peer):
            number = len(answers) - 1  # a ring without its first calls does not number them: the latest one
        if 0 <= number < len(answers) and answers[number].dropped:
            dropped[peer.rank] = answers[number]
    return _found(evidence, dropped, halves, certain=True) if dropped else None


def lost_messages(evidence: Evidence) -> Finding | None:
    """Find that all ranks wait, after some have dropped the Work of a send or receive.

    The message may block the connection, so that a call that all ranks have entered does not complete either. A suspicion.
    """
    alive = [r for r in evidence.ranks if not r.finished]
    dropped = {r.rank: c for r in alive for c in r.collectives if c.dropped}
    if evidence.stop not in (*STOPS, "left_alone") or not dropped or any(not r.is_waiting for r in alive):
        return None
    waits = {r.rank: c for r in alive if (c := awaited(r)) is not None}
    return _found(evidence, dropped, waits, certain=False)


def _is_of(call: Collective, like: Collective, peer: int, *, sends: bool) -> bool:
    return call.peer == peer and call.is_send == sends and (call.group, call.note) == (like.group, like.note)


def _found(
    evidence: Evidence, dropped: Mapping[int, Collective], waits: Mapping[int, Collective], *, certain: bool
) -> Finding:
    n, first = evidence.job.world_size, dropped[min(dropped)]
    began = by_ranks({rank: f"began {c.describe()}" for rank, c in dropped.items()}, n)
    waiting = by_ranks({rank: f"in {c.describe()}" for rank, c in waits.items()}, n)
    return Finding(
        cause="p2p_unmatched", ranks=tuple(sorted(dropped)), where=first.site, called_from=next(iter(first.way[1:]), ""),
        reason=f"{began}, and dropped its Work without a wait: gloo then forgets the message; {waiting}",
        certain=certain, confidence=0.95 if certain else 0.7, facts=all_facts(evidence.ranks),
    )  # fmt: skip
