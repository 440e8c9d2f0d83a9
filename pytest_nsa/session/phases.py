"""What the ranks' reports of one test amount to: for each of its phases, the ranks that failed, and whether xfail expects that.

A phase is as bad as on its worst rank. The marks are applied to this whole, by the rules of pytest's own `_pytest/skipping.py`:
a test is expected to fail if each rank that failed by itself was expected to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import pytest
from _pytest.skipping import xfailed_key

from pytest_nsa.diagnosis.rules.exits import is_victim, is_victim_text
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.values import Evidence, RankEvidence

Phase = Literal["setup", "call", "teardown"]
PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A mark xfail as a process evaluated it: ``any`` exception is expected; ``expects``: this phase's failure is."""

    reason: str
    strict: bool
    any: bool
    expects: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank failed in a phase. ``follows``: it only waited for another rank, or lost its connection to it."""

    rank: RankEvidence
    phase: Phase
    mark: Mark | None
    follows: bool

    @property
    def is_expected(self) -> bool:
        """Whether the mark xfail expects it."""
        return self.mark is not None and self.mark.expects

    def describe(self) -> str:
        """Return 'rank 1: AssertionError at /app/test_it.py:8 in test_it', or that the rank ended without a report."""
        found = [e for e in self.rank.exceptions if e.when == self.phase] or list(self.rank.exceptions)
        how = f"{found[0].type} at {found[0].where}" if found else f"ended in {self.phase} without a report"
        return f"rank {self.rank.rank}: {how}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """The failures of a test's set-up and call (``body``), and of its teardown; ``mark``: xfail, of ranks that all passed."""

    body: tuple[Failure, ...]
    teardown: tuple[Failure, ...]
    mark: Mark | None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"mark": self.mark and asdict(self.mark), **{
            part: [
                {"rank": f.rank.rank, "phase": f.phase, "follows": f.follows, "mark": f.mark and asdict(f.mark)}
                for f in getattr(self, part)
            ]
            for part in ("body", "teardown")
        }}  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any], evidence: Evidence) -> Phases:
        """Build it from what `to_json` returned in the leading process, with this process's evidence."""

        def failure(of: dict[str, Any]) -> Failure:
            mark = Mark(**of["mark"]) if of["mark"] else None
            return Failure(rank=evidence.ranks[of["rank"]], phase=of["phase"], follows=of["follows"], mark=mark)

        body, teardown = (tuple(map(failure, data[part])) for part in ("body", "teardown"))
        return cls(body=body, teardown=teardown, mark=Mark(**data["mark"]) if data["mark"] else None)


def static_mark(item: pytest.Item) -> Mark | None:
    """Return the mark xfail as this process evaluated it: of a rank that has ended without a report."""
    mark = item.stash.get(xfailed_key, None)
    if mark is None:
        return None
    expects = mark.raises is None
    return Mark(reason=mark.reason, strict=mark.strict, any=expects, expects=expects)


def fold(evidence: Evidence, verdict: Verdict, mark: Mark | None) -> Phases:
    """Return what failed in each phase. ``mark`` is the test's static mark xfail: of a rank that has reported none."""
    if not verdict.failed:
        return Phases(body=(), teardown=(), mark=_of_the_passed(evidence))
    found = [failure for rank in evidence.ranks for failure in _failures(rank, verdict, mark)]
    if not found:  # as where some ranks skipped, or no rank was started
        found = [Failure(rank=rank, phase="call", mark=mark, follows=False) for rank in evidence.ranks[:1]]
    body = _with_a_cause([f for f in found if f.phase != "teardown"])
    teardown = _with_a_cause([f for f in found if f.phase == "teardown"])
    if body and not all_expected(body):  # ranks that the host ended in their teardown because of it
        teardown = tuple(f for f in teardown if not f.rank.by_us)
    return Phases(body=body, teardown=teardown, mark=None if body else _of_the_passed(evidence))


def is_in_setup(phases: Phases, verdict: Verdict) -> bool:
    """Return whether a fixture raised on each culprit: pytest calls that an error, not a failure."""
    of_culprits = [f for f in phases.body if f.rank.rank in verdict.ranks]
    return verdict.outcome == "FAIL" and bool(of_culprits) and all(f.phase == "setup" for f in of_culprits)


def not_expected(phases: Phases) -> tuple[Failure, ...]:
    """Return the failures that no mark xfail expects and that do not follow from another."""
    return tuple(f for f in (*phases.body, *phases.teardown) if not f.follows and not f.is_expected)


def all_expected(failures: Iterable[Failure]) -> bool:
    """Return whether the mark xfail expects every failure that does not follow from another."""
    return all(f.is_expected for f in failures if not f.follows)


def unexplained(phases: Phases, verdict: Verdict) -> tuple[Failure, ...]:
    """Return the failures that a verdict does not explain, for the mark fails_as, which names the verdict's cause.

    On ranks that the verdict does not name: deaths, and other exceptions than those of its ranks. On all: a failed teardown
    after a failed body.
    """
    types = {e.type for f in phases.body for e in f.rank.exceptions if f.rank.rank in verdict.ranks}
    others = [f for f in phases.body if not f.follows and f.rank.rank not in verdict.ranks]
    odd = [f for f in others if f.rank.fatal_signal or (f.rank.exceptions and f.rank.exceptions[0].type not in types)]
    return (*odd, *(f for f in phases.teardown if phases.body and not f.follows))


def _failures(rank: RankEvidence, verdict: Verdict, mark: Mark | None) -> Iterable[Failure]:
    """Yield a rank's failed phases; last, the one of which it has left no report."""
    reports = _read_reports(rank)
    for name, entry in reports.items():
        if entry["report"].get("outcome") == "failed":
            yield Failure(rank=rank, phase=name, mark=_mark(entry), follows=_only_waited(rank, verdict))
    last = next((m for m in map(_mark, reversed(reports.values())) if m is not None), mark)
    phase = _unreported(rank, reports)
    if phase is not None:
        known = None if last is None else replace(last, expects=last.any)
        yield Failure(rank=rank, phase=phase, mark=known, follows=_only_waited(rank, verdict))


def _with_a_cause(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return failures; where nothing is known from which the others could follow, none does.

    A rank that calls `pytest.xfail` has not failed: ranks that wait for it then hang.
    """
    follow = all(f.follows or f.rank.xfailed is not None for f in failures)
    return tuple(replace(f, follows=False) if follow else f for f in failures)


def _read_reports(rank: RankEvidence) -> dict[Phase, dict[str, Any]]:
    """Return the last report of each phase, in their order; a failed subtest counts for its test's call."""
    found: dict[Phase, dict[str, Any]] = {}
    for entry in rank.reports:
        name = entry["report"].get("when")
        if name in PHASES and (entry["report"].get("outcome") == "failed" or not entry.get("subtest")):
            found[name] = entry
    return found


def _unreported(rank: RankEvidence, reports: dict[Phase, dict[str, Any]]) -> Phase | None:
    """Return the phase in which a rank ended without a report of it; None if it reported all that it ran."""
    if rank.passed or "teardown" in reports:
        return None
    if "call" in reports or reports.get("setup", {}).get("report", {}).get("outcome") not in (None, "passed"):
        return "teardown"
    return "setup" if rank.exceptions and rank.exceptions[0].when == "setup" else "call"


def _only_waited(rank: RankEvidence, verdict: Verdict) -> bool:
    """Return whether a rank that is blamed for nothing was ended while it waited for another, or lost its connection to it."""
    if rank.rank in verdict.ranks:
        return False
    if rank.exceptions:
        return all(map(is_victim, rank.exceptions))
    return (rank.by_us and rank.is_waiting) or (bool(rank.fatal_signal) and is_victim_text(rank.abort_message))


def _of_the_passed(evidence: Evidence) -> Mark | None:
    """Return a mark xfail that a rank reported with its passed call, a strict one first."""
    found = [_mark(_read_reports(rank).get("call", {})) for rank in evidence.ranks]
    return max((m for m in found if m is not None), key=lambda m: m.strict, default=None)


def _mark(entry: dict[str, Any]) -> Mark | None:
    given = entry.get("xfail")
    return Mark(**{name: given[name] for name in Mark.__dataclass_fields__}) if given else None
