"""Rounds over all groups, sends and receives: what each rank's own calls so far expect, and which ranks depart from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_nsa.diagnosis.explain.contrast import Contrast
from pytest_nsa.diagnosis.explain.locations import parts_of
from pytest_nsa.diagnosis.explain.program import Order
from pytest_nsa.diagnosis.explain.rhythm import is_new_call
from pytest_nsa.evidence.board import NEW_GROUP, Collective
from pytest_nsa.evidence.source import file_name
from pytest_nsa.evidence.values import Evidence

LATEST = 64  # calls of a rank that are looked at
AHEAD = 16  # calls that a rank may have left out at once

Token = tuple[str, str, int, tuple[str, ...]]  # group, operation, peer, and the way to the call


@dataclass(frozen=True, slots=True)
class Round:
    """A rank's latest round: the call ``expected`` that it did not make, None where it made all of them, and what it made instead.

    ``before`` has its calls up to there; its rounds have ``length`` calls.
    """

    expected: Token | None
    made: Collective
    before: tuple[Collective, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Apart:
    """Ranks that left the round: they went on without ``missed``, in which others wait, or made ``extra`` in between; or it is
    not known which.
    """

    ranks: tuple[int, ...]
    missed: Collective | None = None
    extra: Collective | None = None


def out_of_their_round(evidence: Evidence, waits: Mapping[int, Collective]) -> Apart | None:
    """Return the ranks whose calls are not what their own rounds expect, while all others' are, and what they did otherwise.

    A rank that goes past a call that the others wait in blocks where its partners of another group, of a send or receive, do
    not come: by what each waits for, the two sides are alike. None where rounds are not regular, or most ranks depart.
    """
    departed: dict[int, Round] = {}
    for rank, call in waits.items():
        found = _latest_round(evidence, rank, call)
        if found is None:
            return None
        if found.expected is not None:
            departed[rank] = found
    others = [rank for rank in waits if rank not in departed]
    if not departed or not others or len(departed) > len(others) or len({_line(d) for d in departed.values()}) > 1:
        return None
    ranks = tuple(sorted(departed))
    left_out = {rank: _left_out(d) for rank, d in departed.items()}
    tokens = {t for found in left_out.values() for t in found}
    missed = next((waits[r] for r in others if waits[r].peer == -1 and token(waits[r]) in tokens), None)
    if missed is not None and all(left_out.values()):
        return Apart(ranks, missed=missed)
    if all(_is_extra(evidence, rank, d, others[0], waits) for rank, d in departed.items()):
        return Apart(ranks, extra=departed[ranks[0]].made)
    return Apart(ranks)


def first_left_out(evidence: Evidence, rank: int, missed: Collective) -> tuple[str, ...] | None:
    """Return the way to the first of the calls, of any group, that a rank's round so far has where it went on without
    ``missed``; None where its rounds do not show that.
    """
    board = evidence.ranks[rank].board
    at = board.waits_in if board is not None else None
    found = _latest_round(evidence, rank, at) if at is not None else None
    if found is None or found.expected is None:
        return None
    if found.made.group == missed.group and found.made.sequence < missed.sequence:
        return None  # the others answered it, so it was none that they did not know
    # What its rounds have next, up to what it made instead; to the end, where it has left the loop.
    following, made = _following(found), token(found.made)
    left_out = following[: following.index(made)] if made in following else following
    own = [t for t in left_out if not t[0].startswith("ddp")]  # DDP's own calls are no line of the user's
    return own[0][3] if any((op, way) == (missed.op, missed.way) for _, op, _, way in own) else None


def token(call: Collective) -> Token:
    """Return what tells a rank's calls apart, whatever they carry."""
    return call.group, call.op, call.peer, call.way


def _line(found: Round) -> tuple[object, ...]:
    """Return what is left out, or made instead, whatever the group and peer."""
    assert found.expected is not None
    return found.expected[1], found.expected[3], found.made.op, found.made.way


def _latest_round(evidence: Evidence, rank: int, at: Collective) -> Round | None:
    """Return a rank's round up to the call that it waits in; None where its calls do not repeat."""
    ring = [c for c in evidence.ranks[rank].collectives if c.op != NEW_GROUP and c.index <= at.index]
    calls = ring[-LATEST:]
    tokens = [token(c) for c in calls]
    found = _period(tokens)
    if found is None:
        return None
    length, end = found
    for place in range(end, len(tokens)):
        if tokens[place] != tokens[place - length]:
            return Round(tokens[place - length], calls[place], tuple(calls[:place]), length)
    return Round(None, at, tuple(calls[:-1]), length)


def _period(tokens: list[Token]) -> tuple[int, int] | None:
    """Return the length of the rounds that explains most of the latest calls, and where the regular ones end; None where no two
    rounds are alike. What is not regular is less than a round, and comes last.
    """
    best: tuple[int, int, int] | None = None
    for length in range(1, len(tokens) // 2 + 1):
        run = 0  # of calls that repeat the one a round before
        for place in range(length, len(tokens)):
            run = run + 1 if tokens[place] == tokens[place - length] else 0
            end = place + 1
            if run >= length and end >= len(tokens) - length and (best is None or run + length > best[0]):
                best = (run + length, length, end)
    return None if best is None else best[1:]


def _left_out(found: Round) -> list[Token]:
    """Return what a rank's rounds have from the call that it did not make to the one that it made instead; [] where they do not
    lead there soon.

    Calls that one line makes, of several groups in turn, may as well have been made in another order.
    """
    assert found.expected is not None
    made = token(found.made)
    following = _following(found)
    return following[: following.index(made)] if made in following[1:] else []


def _following(found: Round) -> list[Token]:
    """Return what a rank's rounds have next, from the call that it did not make."""
    return [token(c) for c in found.before[-found.length :]][:AHEAD]


def _lines(way: tuple[str, ...]) -> list[tuple[str, int, str]]:
    """Return file name, line and function of a way, outermost first."""
    return [(file_name(file), line, function) for file, line, function in map(parts_of, reversed(way))]


def _is_extra(evidence: Evidence, rank: int, found: Round, other: int, waits: Mapping[int, Collective]) -> bool:
    """Return whether a rank waits in a call that no round before had, and that lies before what another one waits in."""
    made = found.made
    if made != waits[rank] or made.peer != -1 or not is_new_call(list(found.before), made):
        return False
    if any((group, op, way[0]) == (made.group, made.op, made.site) for group, op, _, way in _following(found)):
        return False  # called by another way: its rounds have it, later
    return Contrast(evidence, rank, made, other, waits[other]).order is Order.BEFORE
