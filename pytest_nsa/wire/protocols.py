"""The interfaces between session and monitor: launchers, monitors, limits, and the exceptions of a launch."""

from collections.abc import Collection
from dataclasses import dataclass

from pytest_nsa.wire.messages import GroupSpec, Job


class LaunchError(Exception):
    """The ranks could not be started; the message has the reason and what to do."""


class UnfitError(LaunchError):
    """Ranks must not be forked from the process that collected the tests; the message has the reason."""


class Monitor:
    """Something that is polled while the ranks run (`pytest_nsa.observe`). ``stop_reason`` ends the run."""

    stop_reason = ""

    def poll(self) -> float:
        """Called at each look at the ranks; return the seconds that do not count as the ranks' time."""
        return 0.0

    def finish(self) -> None:
        """Called when the ranks have ended."""


class Starter:
    """Starts and ends the ranks of a job.

    ``lost`` are ranks of a node that is lost: whatever their status is, the host did not end them.
    """

    lost: Collection[int] = ()

    def start(self, job: Job) -> list[int]:
        """Start the ranks; return their process ids. Raises LaunchError."""
        raise NotImplementedError

    def exits(self, timeout: float) -> dict[int, int]:
        """Return wait statuses, by rank, of ranks that ended since the last call; wait up to ``timeout`` seconds for one."""
        raise NotImplementedError

    def signal(self, rank: int, number: int) -> None:
        """Signal one rank, if it has not ended."""

    def kill(self) -> None:
        """SIGKILL every rank of the job that still lives, and what they started."""


class Launcher(Starter):
    """Starts the ranks of all jobs: by the zygote (`ZygoteLauncher`), or as an interpreter per rank (`ColdLauncher`)."""

    @property
    def has_ended(self) -> bool:
        """Whether it starts no more ranks: another process has ended it."""
        return False

    def expect(self, spec: GroupSpec | None) -> None:
        """Announce the ranks that the test after the next job needs (None: unknown), so that they can be made ready before."""

    def wait_until_ready(self) -> None:
        """Wait until ranks can be started. Raises LaunchError; UnfitError if no rank may be forked from this launcher."""

    def close(self) -> None:
        """End the launcher and everything it started."""


@dataclass(kw_only=True)
class Limits:
    """Seconds: to form the group, for the body, and of a suspected stall after which to give up (0: never); ``after_failure``:
    for ranks that do not only wait, once another has failed or died. ``fixtures``: for the set-up and the teardown, where ``run``
    is for the call alone (0: it is for all three).
    """

    start: float
    run: float
    hang_after: float
    after_failure: float
    fixtures: float = 0.0
