"""Unpaired sends and receives: which rank waits for which, and what each pair exchanged before."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from pytest_nsa.diagnosis.explain.rhythm import MOST_BITS, surprise
from pytest_nsa.diagnosis.facts import has_lost_calls, list_earlier_calls
from pytest_nsa.evidence.board import ANY, Collective
from pytest_nsa.evidence.values import Evidence, RankEvidence

FEW_BITS = 3.0  # a call with less surprise is expected
# Operations of the calls that represent the end of a test, and a wait for keys of a store.
END, KEY = "end", "key"
Signature = tuple[str, tuple[str, ...], int]  # operation, call path, peer
Line = tuple[bool, tuple[str, ...]]  # whether it sends, its line, or those of the library that made it


def make_signature(call: Collective) -> Signature:
    """Return what repeats when a rank exchanges a message with the same peer again."""
    return call.op, call.way, call.peer


def get_line(call: Collective) -> Line:
    """Return the direction and the line of a send or receive. Of one that a library made for the user, the library's lines: ranks
    with different roles may call it from different lines.
    """
    return call.is_send, call.library or (call.site,)


def list_halves(calls: Iterable[Collective], call: Collective, waiter: int) -> list[Collective]:
    """Return the calls of the awaited rank that could be the other half of the message ``call`` of the rank ``waiter``."""
    return [c for c in calls if c.peer in (waiter, ANY) and c.is_send != call.is_send and not c.dropped]


def is_collective(call: Collective) -> bool:
    """Return whether a call is a collective: no send or receive, and no state that is no call."""
    return call.peer == -1 and call.op not in (END, KEY)


def ended(rank: RankEvidence) -> Collective:
    """Return the call that represents the end of a rank's test."""
    step = int(rank.board.numbers["step"]) if rank.board is not None else 0
    return Collective(
        index=sys.maxsize, op=END, group="", sequence=0, dtype="", count=0, site="", step=step, phase="", peer=-1, size=0,
        entered=0.0, left=0.0,
    )  # fmt: skip


class Messages:
    """The sends and receives of all ranks. ``waits`` has the call that each rank waits in; a rank that ended is not in
    it.
    """

    def __init__(self, evidence: Evidence, waits: Mapping[int, Collective]) -> None:
        self.evidence, self.waits, self.has_lost_calls = evidence, waits, has_lost_calls(evidence)
        self.pending = {rank: c for rank, c in waits.items() if c.peer != -1}
        self.waiters: dict[int, list[int]] = defaultdict(list)
        for rank, call in sorted(self.pending.items()):
            self.waiters[call.peer].append(rank)

    @cached_property
    def completed(self) -> dict[int, list[Collective]]:
        """The calls that each rank completed."""
        return {r.rank: [c for c in r.collectives if not c.is_inside and not c.dropped] for r in self.evidence.ranks}

    @cached_property
    def at_line(self) -> dict[Line, dict[int, list[Collective]]]:
        """By direction and line, the sends or receives that each rank entered there, oldest first."""
        found: dict[Line, dict[int, list[Collective]]] = {}
        for rank in self.evidence.ranks:
            for c in rank.collectives:
                if c.peer != -1:
                    found.setdefault(get_line(c), {}).setdefault(rank.rank, []).append(c)
        return found

    def counts(self, call: Collective, rank: int) -> tuple[int, list[int]]:
        """Return how often a rank entered the line of a call, and how often each other rank that came there did."""
        made = {r: len(calls) for r, calls in self.at_line.get(get_line(call), {}).items()}
        return made.pop(rank, 0), list(made.values())

    @cached_property
    def are_all_alike(self) -> bool:
        """Whether every rank waits in a send at one line, or every rank in a receive, so that no wait can match
        another.
        """
        kinds = set(map(get_line, self.pending.values()))
        return len(self.pending) == len(self.evidence.ranks) and len(kinds) == 1

    @cached_property
    def offers(self) -> dict[tuple[bool, int], set[int]]:
        """By direction and addressee, the ranks that entered more sends or receives than the addressee answered."""
        made: Counter[tuple[bool, int, int]] = Counter()  # whether it sends, caller, peer
        for rank in self.evidence.ranks:
            made.update((c.is_send, rank.rank, c.peer) for c in rank.collectives if c.peer != -1)
        found: dict[tuple[bool, int], set[int]] = defaultdict(set)
        for (sends, caller, peer), number in made.items():
            if number > made[not sends, peer, caller]:
                found[sends, peer].add(caller)
        return found

    def pairs(self) -> Iterator[Owed]:
        """Yield each waiting rank with the rank that it waits for; for a receive from any rank, with every other rank."""
        for rank, call in sorted(self.pending.items()):
            peers = range(len(self.evidence.ranks)) if call.peer == ANY else (call.peer,)
            for peer in peers:
                if peer != rank and 0 <= peer < len(self.evidence.ranks):
                    yield Owed(self, rank, call, peer)


@dataclass(frozen=True)
class Owed:
    """Rank ``waiter`` waits in ``call`` for rank ``peer`` to send or to receive."""

    messages: Messages
    waiter: int
    call: Collective
    peer: int

    @cached_property
    def own(self) -> list[Collective]:
        """The sends and receives that the waiter completed at the line of its call."""
        line = get_line(self.call)
        return [c for c in self.messages.completed[self.waiter] if c.peer != -1 and get_line(c) == line]

    @cached_property
    def before(self) -> list[Signature]:
        return [make_signature(c) for c in list_earlier_calls(self.messages.evidence, self.waiter, self.call)]

    @cached_property
    def theirs(self) -> Collective | None:
        """The call that the peer waits in; None where its test ended."""
        return self.messages.waits.get(self.peer)

    @cached_property
    def peers_calls(self) -> list[Collective]:
        """The peer's calls before the one that it waits in."""
        rank, mine = self.messages.evidence.ranks[self.peer], self.theirs
        return (
            list_earlier_calls(self.messages.evidence, self.peer, mine) if mine is not None else list(rank.collectives)
        )

    @cached_property
    def peers_history(self) -> list[Signature]:
        return [make_signature(c) for c in self.peers_calls]

    @cached_property
    def answers(self) -> list[Collective]:
        """The matching calls that the peer made for the waiter before."""
        return list_halves(self.peers_calls, self.call, self.waiter)

    def bits_of_answer(self) -> float:
        """Return the surprise of the peer's next answer, if it had made one in place of the call that it waits in."""
        return surprise(self.peers_history, make_signature(self.answers[-1])) if self.answers else MOST_BITS

    @property
    def was_skipped(self) -> bool:
        """Whether the peer waits in a collective, or in the message that follows its answer in earlier rounds."""
        if not self.answers:
            return False
        return self.theirs is None or self.theirs.peer == -1 or self.bits_after_answer() < FEW_BITS

    def bits_after_answer(self) -> float:
        """Return the surprise of the call that the peer waits in, if it follows an answer."""
        if not self.answers or self.theirs is None:
            return MOST_BITS
        return surprise([*self.peers_history, make_signature(self.answers[-1])], make_signature(self.theirs))

    def bits_of_call(self) -> float:
        """Return the surprise of the waiter's call."""
        return surprise(self.before, make_signature(self.call))

    @property
    def is_offered(self) -> bool:
        """Whether a rank other than the peer entered more matching calls for the waiter than the waiter answered."""
        return bool(self.messages.offers[not self.call.is_send, self.waiter] - {self.waiter, self.peer})

    @property
    def is_once_more(self) -> bool:
        """Whether the waiter came to its line once more than each other rank that came there."""
        mine, others = self._counts(self.call, self.waiter)
        return set(others) == {mine - 1}

    @property
    def has_fewer_answers(self) -> bool:
        """Whether the peer made fewer matching calls than each other rank that came to the line of them."""
        mine, others = self._counts(self.answers[-1], self.peer) if self.answers else (0, [])
        return bool(others) and mine < min(others)

    def _counts(self, call: Collective, rank: int) -> tuple[int, list[int]]:
        """Return how often a rank came to the line of a call, and each other rank that did; (0, []) where a ring has lost calls."""
        return (0, []) if self.messages.has_lost_calls else self.messages.counts(call, rank)

    @property
    def is_asked_once_too_often(self) -> bool:
        """Whether the waiter came to its line once more than a third rank and each other, and the peer answered as often as each
        other rank that makes this half.
        """
        mine, others = self._counts(self.answers[-1], self.peer) if self.answers else (0, [])
        third = self.messages.at_line[get_line(self.call)].keys() - {self.waiter, self.peer}
        return bool(third) and self.is_once_more and set(others) == {mine}

    @property
    def entered_as_often(self) -> bool:
        """Whether the peer entered both lines of the exchange as often as the waiter did, and so exchanged with other
        ranks.
        """
        at_line = self.messages.at_line
        here = at_line[get_line(self.call)]
        tried, theirs = len(here[self.waiter]), len(here.get(self.peer, ()))
        opposite = [made for (sends, _), made in at_line.items() if sends != self.call.is_send and self.waiter in made]
        answers = sum(len(made.get(self.peer, ())) for made in opposite)
        return theirs >= tried and answers >= tried
