"""What the session and the monitor require of each other: launchers, monitors, limits, and how a launch fails."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from pytest_nsa.wire.messages import GroupSpec, Job


class LaunchError(Exception):
    """The ranks could not be started; the message has the reason and what to do."""


class UnfitError(LaunchError):
    """Ranks must not be forked from the process that collected the tests; the message has the reason."""


class Monitor(Protocol):
    """Something that is polled while the ranks run (`pytest_nsa.monitor`). ``stop_reason`` ends the run."""

    stop_reason: str

    def poll(self) -> float:
        """Called at each look at the ranks; returns the seconds that shall not count as theirs."""
        ...

    def finish(self) -> None:
        """The ranks have ended."""
        ...


class Starter(Protocol):
    """What starts and ends the ranks of a job.

    ``lost`` are ranks of a node that has gone: whatever their status shows, the host did not end them.
    """

    lost: Collection[int]

    def start(self, job: Job) -> list[int]:
        """Start the ranks; returns their process ids. Raises LaunchError."""
        ...

    def exits(self, timeout: float) -> dict[int, int]:
        """Wait statuses of ranks that have ended since the last call, by rank."""
        ...

    def signal(self, rank: int, number: int) -> None:
        """Signal one rank, if it has not ended."""
        ...

    def kill(self) -> None:
        """SIGKILL every rank of the job that is still there, and what they started."""
        ...


class Launcher(Starter, Protocol):
    """What starts the ranks of every job: the zygote (`ZygoteLauncher`) or an interpreter per rank (`ColdLauncher`)."""

    @property
    def has_ended(self) -> bool:
        """Whether it starts no more ranks: another process has ended it."""
        ...

    def expect(self, spec: GroupSpec | None) -> None:
        """What ranks the test after the next job will need (None: unknown): they may be made ready in that time."""
        ...

    def wait_until_ready(self) -> None:
        """Wait for what must come before the first rank. Raises LaunchError; UnfitError where no rank may come from here."""
        ...

    def close(self) -> None:
        """End the launcher and everything it started."""
        ...


class Suspicion(Protocol):
    """What the rules make of a stall."""

    @property
    def ends_the_test(self) -> bool:
        """Whether the test may be ended at once."""
        ...


@dataclass(kw_only=True)
class Limits:
    """Seconds: to form the group, for the body, and of a suspected stall after which to give up (0: never)."""

    start: float
    run: float
    hang_after: float
