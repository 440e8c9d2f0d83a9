"""Suspicions: what the rules find at a stall while the test runs; announced when one has lasted (`announce_delay`), or changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.load import load, with_sources
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.observe.announce_delay import AnnounceDelay, may_act
from pytest_nsa.observe.progress import ProgressWatch
from pytest_nsa.observe.second_look import await_counters
from pytest_nsa.system.clock import monotonic, wall_clock
from pytest_nsa.wire.files import append_line
from pytest_nsa.wire.messages import Job
from pytest_nsa.wire.protocols import Limits

MOVING = ("straggler", "graph_explosion", "slow")  # causes of ranks that move


class Suspicions:
    """Called by the host at a stall. Writes each announcement to ``suspicions.jsonl`` in the test's folder."""

    def __init__(self, folder: Path, job: Job, limits: Limits, announce: Callable[[str], None]) -> None:
        self.folder, self.job, self.limits, self.announce = folder, job, limits, announce
        self._delay = AnnounceDelay()
        self._announced: tuple[object, ...] = ()

    def __call__(self, watch: ProgressWatch) -> Finding | None:
        """Return the finding of the rules on the evidence so far; None if no rule applies."""
        from pytest_nsa.diagnosis.engine import suspect  # not before a stall: the rules take long to import

        try:
            evidence = with_sources(load(self.folder))
            found = suspect(evidence)
            if found is not None and found.ends_the_test:
                if may_act(evidence):
                    found = replace(found, certain=False, is_permanent=False)
                else:
                    evidence = with_counters(evidence)
                    found = suspect(evidence)
            if found is not None:
                self._consider(found, evidence, watch)
        except Exception as error:  # the test runs: what cannot be read now must not end it
            _note(self.folder, error)
            return None
        return found

    def _consider(self, found: Finding, evidence: Evidence, watch: ProgressWatch) -> None:
        seconds = stalled_for(found, watch)
        is_due = self._delay.is_due(found, evidence, watch.past, seconds)
        if not is_due or self._delay.state == self._announced:
            return
        self._announced, at_work = self._delay.state, self._delay.at_work
        append_line(
            self.folder / "suspicions.jsonl",
            {
                "time": wall_clock(), "cause": found.cause, "ranks": found.ranks, "where": found.where,
                "reason": found.reason, "certain": found.certain, "at_work": at_work, "stalled_s": round(seconds, 2),
            },
        )  # fmt: skip
        left = max(0.0, self.limits.run - (monotonic() - watch.running_since))
        self.announce(self._text(found, seconds, left, at_work=at_work))

    def _text(self, found: Finding, seconds: float, left: float, *, at_work: bool) -> str:
        who = describe_ranks(found.ranks, self.job.world_size)
        test = self.job.scenario or self.job.nodeid
        if found.ends_the_test:
            what = "this cannot resolve itself: the test is ended"
        elif self.limits.hang_after:
            what = f"a suspicion; the test is ended if it lasts for {self.limits.hang_after:g} s"
        else:
            what = f"a suspicion; the test has {left:.0f} s left"
        if at_work and not found.ends_the_test:
            what = f"the test has {left:.0f} s left"
        return announcement(found, test, who, seconds, what, at_work=at_work)


def with_counters(evidence: Evidence) -> Evidence:
    """Return the evidence with the counters of the loops that the ranks are in: what ends a test shall rest on them."""
    await_counters(rank.folder for rank in evidence.ranks if not rank.finished)
    return with_sources(load(evidence.folder))


def may_act_in(folder: Path) -> bool:
    """Return `may_act` of the evidence in a test's folder so far; False where that cannot be read."""
    try:
        return may_act(with_sources(load(folder), keep=False))
    except Exception as error:  # as above
        _note(folder, error)
        return False


def _note(folder: Path, error: Exception) -> None:
    append_line(folder / "suspicions.jsonl", {"time": wall_clock(), "error": f"{type(error).__name__}: {error}"})


def announcement(found: Finding, test: str, who: str, seconds: float, what: str, *, at_work: bool) -> str:
    """Return the line that announces a suspicion. ``who``: its ranks; ``seconds``: how long it has lasted; ``what``: the end."""
    at = f" at {found.where}" if found.where else ""
    reason = " ".join(found.reason.split())  # a child's command may have several lines
    if at_work and not found.ends_the_test:
        return f"nsa: {test}: {who} at work for {seconds:.0f} s{at}: {reason} ({what})"
    return f"nsa: {test}: {found.cause} on {who}{at}, for {seconds:.1f} s: {reason} ({what})"


def stalled_for(found: Finding, watch: ProgressWatch) -> float:
    """Return for how many seconds the ranks of a suspicion have not moved; if they move, how long others have waited."""
    if found.cause in MOVING:
        return watch.longest_wait
    return min((watch.stalled_for(rank) for rank in found.ranks if rank in watch.boards), default=watch.longest_wait)
