"""The values that every reader of foreign evidence returns: calls and counters by rank, groups, stacks, and what a text states."""

from dataclasses import dataclass, field

from pytest_nsa.evidence.stacks import Frame

MOST_RANKS = 1 << 16
MOST_CALLS = 1 << 16  # of a rank; the newest are kept


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignCall:
    """A call of a rank. ``number`` counts the calls of ``group``; ``peer`` is -1 except for a send or receive.

    Frames are innermost first.
    """

    group: str
    number: int
    op: str
    dtype: str = ""
    count: int = 0
    peer: int = -1
    is_complete: bool = False
    has_end: bool = True  # whether its recorder would note that it is complete
    created: float = 0.0
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class Counts:
    """How many calls of a group a rank has enqueued and completed."""

    enqueued: int
    completed: int


@dataclass(slots=True)
class ForeignRank:
    """What is known of a rank. ``has_dump``: a recorder's dump, or a watchdog's report, is from this rank."""

    calls: list[ForeignCall] = field(default_factory=list)
    counts: dict[str, Counts] = field(default_factory=dict)
    stack: tuple[Frame, ...] = ()
    error: str = ""
    signal: int = 0
    has_dump: bool = False

    @property
    def pending(self) -> list[ForeignCall]:
        """The calls that are not known to be complete, oldest first."""
        done = {group: counts.completed for group, counts in self.counts.items()}
        return [c for c in self.calls if not c.is_complete and (c.peer != -1 or c.number > done.get(c.group, -1))]

    @property
    def has_pending(self) -> bool:
        """Whether the rank has enqueued a call that it has not completed."""
        return bool(self.pending) or any(c.enqueued > c.completed for c in self.counts.values())


@dataclass(frozen=True, slots=True)
class Statement:
    """What a text states of ranks: ``kind`` is missing, mismatch or behind."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    where: str = ""


@dataclass(slots=True)
class ForeignJob:
    """Everything that was read: by rank, the groups' members, statements, a line per kind of file, and what could not be read."""

    ranks: dict[int, ForeignRank] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    backend: str = "nccl"
    world_size: int = 0

    def rank(self, number: int) -> ForeignRank:
        """Return the values of a rank, which is added if it is new. Raise ValueError for a number that no rank has."""
        if not 0 <= number < MOST_RANKS:
            raise ValueError(f"rank {number}: from 0 to {MOST_RANKS - 1} can be read")
        return self.ranks.setdefault(number, ForeignRank())

    @property
    def size(self) -> int:
        """The number of ranks, as far as it is known."""
        members = (rank for of in self.groups.values() for rank in of)
        stated = (rank for statement in self.statements for rank in statement.ranks)
        return min(MOST_RANKS, max(self.world_size, 1 + max((*self.ranks, *members, *stated), default=0)))
