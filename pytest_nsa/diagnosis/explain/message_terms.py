"""The terms of a message that a rank waits for: facts about the waiting rank and about its peer, with words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pytest_nsa.diagnosis.explain.messages import Owed
from pytest_nsa.diagnosis.explain.rhythm import share

Awaited = TypeVar("Awaited")


@dataclass(frozen=True)
class TermOfAWait(Generic[Awaited]):
    """A fact about what a rank waits for: about that rank (``is_of_waiter``), or about the one that it waits for."""

    name: str
    words: str
    is_of_waiter: bool
    value: Callable[[Awaited], float]


Term = TermOfAWait[Owed]


MESSAGE: tuple[Term, ...] = (
    Term("new half", "exchanges a message at this line for the first time", True, lambda o: not o.own),
    Term("surprise of half", "waits for a message that its earlier rounds do not predict", True, lambda o: share(o.bits_of_call())),
    Term("waited for", "is waited for by another rank", True, lambda o: bool(o.messages.waiters[o.waiter])),
    Term("once more", "came to this line more often than each other rank that came there", True, lambda o: o.is_once_more),
    Term("fewer answers", "made fewer matching calls than each other rank at that line", False,
         lambda o: o.has_fewer_answers),
    Term("all alike", "waits in the same direction at the same line, as every rank does", False,
         lambda o: o.messages.are_all_alike),
    Term("surprise of answer", "has no earlier rounds that predict the matching call here", False,
         lambda o: share(o.bits_of_answer())),
    Term("made its half", "exchanged messages at these lines as often as the rank that waits for it, with others", False,
         lambda o: o.entered_as_often),
)  # fmt: skip


def message_values(owed: Owed) -> dict[str, float]:
    """Return the terms of a message that hold, by name."""
    found = {f"{'waiter' if t.is_of_waiter else 'peer'}: {t.name}": float(t.value(owed)) for t in MESSAGE}
    return {name: value for name, value in (found | {"always": 1.0}).items() if value}
