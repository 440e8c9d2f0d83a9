"""Sends and receives that a rank owes: skipped, by its own calls so far, or dropped by the program without a wait."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_nsa.diagnosis.explain.rhythm import expected_next
from pytest_nsa.diagnosis.facts import STOPS, all_facts, awaited
from pytest_nsa.diagnosis.rules.circles import has_forgotten
from pytest_nsa.diagnosis.verdict import Finding, by_ranks
from pytest_nsa.evidence.board import ANY, Collective
from pytest_nsa.evidence.values import Evidence

_LATEST = 8  # calls since one was left out: what does not wait for it


def left_out_half(evidence: Evidence, culprit: int, halves: dict[int, Collective]) -> Collective | None:
    """Return the latest call like the send or receive that a rank left out, and that another one waits for: `expected_half`; else
    one that it last made before the latest call like the one that it waits in, or that it has gone past to a collective. None
    where that is not known.
    """
    expected = expected_half(evidence, culprit, halves)
    mine, calls = _calls_until(evidence, culprit)
    alike = [c.index for c in calls if mine is not None and half_of(c) == half_of(mine)]
    if expected is not None or (mine is not None and mine.peer != -1 and not alike):
        return expected  # or one more, of which its rounds say nothing
    latest = next((c for c in reversed(calls) if _answers(c, culprit, halves)), None)
    is_past = mine is None or mine.peer == -1 or (latest is not None and alike[-1] > latest.index)
    return latest if is_past else None


def the_silent_one(
    evidence: Evidence, ends: set[int], waits: dict[int, Collective], halves: dict[int, Collective]
) -> tuple[int, ...]:
    """Return the one rank whose own calls so far expect a message that another rank waits for; () where there are several or
    none, or where the ranks at which no chain ends have all called another one in place of that line's, too: or in place of what
    their own calls expected, as the other rank at which a chain ends has not.
    """
    if len(ends) == 1 and ends <= halves.keys() and halves[min(ends)].peer == ANY:
        # It takes from anybody: who waits for it, and left a message to it out, holds both up.
        found = tuple(r for r, c in sorted(halves.items()) if c.peer in ends and left_out_half(evidence, r, halves))
    else:
        found = tuple(rank for rank in sorted(waits) if expected_half(evidence, rank, halves) is not None)
    if len(found) != 1:
        return ()
    half = expected_half(evidence, found[0], halves)
    others = [r.rank for r in evidence.ranks if r.rank not in (*ends, *found)]
    is_common = half is not None and others and all(_went_on_without(evidence, rank, half) for rank in others)
    keeps = [rank for rank in ends - set(found) if not _went_on_without(evidence, rank)]
    has_changed = others and keeps and all(_went_on_without(evidence, rank) for rank in others)
    return () if is_common or has_changed else found


def _went_on_without(evidence: Evidence, rank: int, half: Collective | None = None) -> bool:
    """Return whether a rank's own calls so far expected one of the line of ``half``, or any, where it lately sent or received at
    another.
    """
    made = [half_of(c) for c in evidence.ranks[rank].collectives]
    for place in range(len(made) - 1, max(len(made) - _LATEST, 0), -1):
        expected, came = expected_next(made[:place]), made[place]
        if (
            expected is not None
            and came != expected
            and came[1] != -1
            and (half is None or (expected[0], expected[2]) == (half.op, half.site))
        ):
            return True
    return False


def expected_half(evidence: Evidence, rank: int, halves: dict[int, Collective]) -> Collective | None:
    """Return the latest call like the send or receive that a rank's own calls so far expect where it made another one, or none, and
    that another rank waits for; None where they do not show that.
    """
    mine, calls = _calls_until(evidence, rank)
    has_begun = mine is not None and mine.index < evidence.ranks[rank].collectives[-1].index
    if mine is not None and mine.peer != -1 and has_begun:
        return None  # it waits for one that it began earlier, and has not come to another
    made = [half_of(c) for c in calls]
    if mine is not None and half_of(mine) not in made:
        return None  # a loop that has come to its end, or a call that no round has
    made = [*made, half_of(mine)] if mine is not None else made
    # The call that should have come at the latest place of its calls, or one of those before it in its round.
    for place in range(len(calls), max(len(calls) - _LATEST, 0), -1):
        expected = expected_next(made[:place])
        if expected is None or expected in made[place:]:
            continue  # it came, if later
        usual = next((c for c in reversed(calls[:place]) if half_of(c) == expected), None)
        if usual is not None and _answers(usual, rank, halves) and place > _met_at(evidence, calls, usual.peer, halves):
            return usual
    return None


def _met_at(evidence: Evidence, calls: list[Collective], other: int, halves: dict[int, Collective]) -> int:
    """Return how many of a rank's calls come up to the last collective that it and another rank completed before that one entered
    the half that it waits in: what was left out before that is not what it waits for.
    """
    before = [c for c in evidence.ranks[other].collectives if c.index < halves[other].index]
    met = {c.place for c in before if c.peer == -1 and not c.is_inside}
    return max((i for i, c in enumerate(calls, 1) if c.peer == -1 and not c.is_inside and c.place in met), default=0)


def _calls_until(evidence: Evidence, rank: int) -> tuple[Collective | None, list[Collective]]:
    """Return what a rank waits in, and its calls before that."""
    mine = awaited(evidence.ranks[rank])
    return mine, [c for c in evidence.ranks[rank].collectives if mine is None or c.index < mine.index]


def _answers(call: Collective, rank: int, halves: dict[int, Collective]) -> bool:
    """Return whether a call of a rank is such as its peer waits for."""
    waiting = halves.get(call.peer)
    return waiting is not None and waiting.peer in (rank, ANY) and waiting.is_send != call.is_send


def half_of(call: Collective) -> tuple[object, ...]:
    return call.op, call.peer, call.site


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
