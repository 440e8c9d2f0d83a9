"""Suspicions: what the rules make of a stall while the test runs, announced as soon as one fits, and when that changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pytest_nsa.diagnosis.engine import suspect
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.load import load, with_sources
from pytest_nsa.wire.files import append_line
from pytest_nsa.wire.messages import Job
from pytest_nsa.wire.protocols import Limits


class Suspicions:
    """Called by the host at a stall. Keeps what was suspected in ``suspicions.jsonl`` of the test's folder."""

    def __init__(self, folder: Path, job: Job, limits: Limits, announce: Callable[[str], None]) -> None:
        self.folder, self.job, self.limits, self.announce = folder, job, limits, announce
        self._last: tuple[object, ...] = ()  # the key of what was announced

    def __call__(self) -> Finding | None:
        """Return what the rules make of the evidence now; None where none fits."""
        try:
            evidence = with_sources(load(self.folder))
        except Exception as error:  # the test runs: what cannot be read now must not end it
            append_line(
                self.folder / "suspicions.jsonl", {"time": time.time(), "error": f"{type(error).__name__}: {error}"}
            )
            return None
        found = suspect(evidence)
        if found is not None and found.key != self._last:
            self._last = found.key
            append_line(
                self.folder / "suspicions.jsonl",
                {
                    "time": time.time(), "cause": found.cause, "ranks": found.ranks, "where": found.where,
                    "reason": found.reason, "certain": found.certain, "stood_still_s": evidence.waits_s,
                },
            )  # fmt: skip
            self.announce(self._text(found, evidence.waits_s))
        return found

    def _text(self, found: Finding, seconds: float) -> str:
        who = describe_ranks(found.ranks, self.job.world_size)
        test = self.job.scenario or self.job.nodeid
        if found.certain:
            what = "that cannot mend itself: the test is ended"
        elif self.limits.hang_after:
            what = f"a suspicion; the test is ended if it lasts for {self.limits.hang_after:g} s"
        else:
            what = f"a suspicion; the test has {self.job.timeout:g} s in all"
        at = f" at {found.where}" if found.where else ""
        return f"nsa: {test}: {found.cause} on {who}{at}, for {seconds:.1f} s: {found.reason} ({what})"
