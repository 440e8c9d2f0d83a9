"""With which processes a pytest process runs the ranks of its tests: alone, or with the others of an outer launcher."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.observe.supervise import RanksRun
from pytest_nsa.session.phases import Phases
from pytest_nsa.wire.messages import Job


class Group:
    """The pytest processes that run the ranks of a test together: this one alone; `outer.attachment` has that of several."""

    is_alone = True

    def __init__(self) -> None:
        self.exit_status = 0  # of this session, once it is known

    def ranks_here(self, world_size: int) -> Sequence[int]:
        """Return the ranks of a test that this process starts."""
        return range(world_size)

    def local(self, job: Job) -> Job:
        """Return ``job`` as this process runs it."""
        return job

    def run(self, run: RanksRun) -> None:
        """Run this process's ranks of a job to their end. Raises LaunchError."""
        run.run()

    def refuse(self, reason: str) -> None:
        """Inform the other processes that this one could not start its ranks."""

    def agree(self, verdict: Verdict, evidence: Evidence, found: Phases) -> tuple[Verdict, Evidence, Phases]:
        """Return what all processes conclude from a test."""
        return verdict, evidence, found
