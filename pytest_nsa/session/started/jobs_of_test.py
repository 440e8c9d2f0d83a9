"""From the evidence of jobs that a test has started by itself to the run's folders, verdicts, and the lines that are printed."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprTraceback

from pytest_nsa.diagnosis.rules.exits import first_exceptions
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.load import load
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.marks import find_place
from pytest_nsa.observe.conclude import conclude
from pytest_nsa.observe.finders import list_jobs
from pytest_nsa.observe.observer import Observer
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import failures_of_ranks, headline, lines, short_path
from pytest_nsa.session.folders import Recorder, RunFolder, safe_name
from pytest_nsa.session.masking import mask_files
from pytest_nsa.session.reports import ReprEntryNative, report_warning
from pytest_nsa.system.descendants import Process
from pytest_nsa.wire import masking
from pytest_nsa.wire.files import read_object, read_text, write_json

if TYPE_CHECKING:
    from pytest_nsa.diagnosis.engine import Rule

NO_JOB = "no process of the test has joined a process group"
FORM_S = 10.0  # after ranks have waited so long for a rank that never joined, the group counts as not formed
SECOND_LOOK_S = 0.3


@dataclass(frozen=True, slots=True)
class Occasion:
    """Why jobs are diagnosed.

    ``reason``: 'deadline', 'interrupted', or '' where the test has failed by itself. ``began``: seconds since the epoch.
    ``timeout``: its time limit, in seconds. ``others``: jobs that are not the test's.
    """

    reason: str
    nodeid: str
    root: str
    timeout: float
    began: float
    others: Collection[Path]


@dataclass(frozen=True, slots=True)
class Concluded:
    """A job's verdict and evidence. ``is_other``: the test has not started it. ``is_idle``: it has made no call since the test
    began. ``pids``: of its ranks.
    """

    verdict: Verdict
    evidence: Evidence
    is_other: bool
    is_idle: bool
    pids: frozenset[int]
    has_ended: bool

    @property
    def order(self) -> tuple[bool, bool, bool, bool, bool, float]:
        """Sort key: the job that explains the test's failure comes first."""
        v = self.verdict
        return self.is_idle, self.is_other, self.has_ended, not v.failed, not v.certain, -v.confidence


def conclude_jobs(
    base: Path, run: RunFolder, processes: Sequence[Process], occasion: Occasion, rules: Sequence[Rule]
) -> list[Concluded]:
    """Diagnose the jobs with evidence in ``base`` that have not ended well; the job that explains the test's failure comes first.

    The first job's evidence goes into the test's folder in ``run``, and its verdict into the run's list; the other jobs' evidence
    goes into folders below. ``rules`` are a repository's own.
    """
    seen = [_seen(job) for job in list_jobs(base) if (job / "job.json").exists()]
    if occasion.reason and any(job.boards for job in seen):
        time.sleep(SECOND_LOOK_S)
        for job in seen:
            job.read_boards()
    jobs = [job for job in seen if job.boards and not _ended_well(job)]
    if not jobs:
        return []
    for job in jobs:
        _record(job, processes, occasion)
    folder = run.test_folder(safe_name(masking.text(occasion.nodeid) or "after the last test"))
    alive = {p.pid for p in processes if not p.has_ended}
    found = [_diagnose(job, folder / job.folder.name, occasion, alive, rules) for job in jobs]
    found.sort(key=lambda concluded: concluded.order)
    _to_front(found, folder)
    if found[0].verdict.failed and not found[0].is_idle:
        Recorder(run).add(folder, found[0].verdict)
    return found


def list_pids(folder: Path) -> frozenset[int]:
    """Return the pids of a job's ranks."""
    return frozenset(board.pid for board in _seen(folder).boards.values())


def unnoticed(base: Path, began: float) -> str:
    """Return what a rank raised that a test has started since ``began``, in one line; '' if none did."""
    for folder in list_jobs(base):
        if not (folder / "job.json").exists() or _ended_well(_seen(folder)):
            continue
        evidence = load(folder)
        if evidence.job.created < began:
            continue
        # Where all lost a connection, the rank that broke it has raised nothing.
        found = first_exceptions(evidence) or [(rank, error) for rank in evidence.ranks for error in rank.exceptions]
        if found:
            rank, error = found[0]
            raised = f"{error.type}: {error.headline} at {error.where}"
            return f"rank {rank.rank} of {evidence.job.world_size} raised {raised}"
    return ""


def _seen(folder: Path) -> Observer:
    job = Observer(folder)
    job.read_boards()
    return job


def _ended_well(job: Observer) -> bool:
    is_whole = len(job.boards) >= read_object(job.folder / "job.json").get("world_size", 0)
    if not is_whole or any(board.phase != "done" for board in job.boards.values()):
        return False
    return not any('"event": "exception"' in read_text(events) for events in job.folder.glob("rank*/events.jsonl"))


def _record(job: Observer, processes: Sequence[Process], occasion: Occasion) -> None:
    """Complete a job's evidence: the test that it belongs to, why it is diagnosed, how its ranks have ended."""
    described = read_object(job.folder / "job.json")
    described |= {"nodeid": occasion.nodeid, "root": occasion.root, "timeout": occasion.timeout}
    write_json(job.folder / "job.json", described, indent=1)
    reason = occasion.reason
    if reason == "deadline":
        is_late = len(job.boards) < described["world_size"] and job.watch.stalled_s >= FORM_S
        reason = "start" if is_late else reason
    began = float(described.get("created", occasion.began))
    job.record_end(reason, began, {p.pid: p.status for p in processes if p.has_ended})


def _diagnose(job: Observer, target: Path, occasion: Occasion, alive: set[int], rules: Sequence[Rule]) -> Concluded:
    shutil.copytree(job.folder, target, ignore=shutil.ignore_patterns("*.asked"))
    if masking.is_on():
        mask_files(target)
    verdict, evidence = conclude(target, rules)
    pids = frozenset(board.pid for board in job.boards.values())
    calls = [max(c.entered, c.left) for rank in evidence.ranks for c in rank.collectives]
    is_idle = max(calls, default=evidence.job.created) < occasion.began
    return Concluded(verdict, evidence, job.folder in occasion.others, is_idle, pids, alive.isdisjoint(pids))


def _to_front(found: list[Concluded], folder: Path) -> None:
    """Move the first job's evidence into the test's folder: readers of a run expect a job there."""
    first = found[0].evidence.folder
    for path in sorted(first.iterdir()):
        path.rename(folder / path.name)
    first.rmdir()
    found[0] = replace(found[0], evidence=replace(found[0].evidence, folder=folder))


def describe(jobs: Sequence[Concluded], others: Sequence[str], waits_at: str) -> list[str]:
    """Return the lines of the test's report: the job that explains it, other jobs and processes, and where the test waits."""
    waits = [f"  waits    the test, at {waits_at}"] if waits_at else []
    shown = [*_of_jobs(jobs), *(f"  process  {other}" for other in others), *waits]
    if jobs and not jobs[0].is_idle:
        shown += [
            line for text in failures_of_ranks(jobs[0].verdict, jobs[0].evidence) for line in ("", *text.splitlines())
        ]
    return shown


def _of_jobs(jobs: Sequence[Concluded]) -> Iterator[str]:
    if jobs and not jobs[0].is_idle:
        first, *jobs = jobs
        text = lines(first.verdict, first.evidence)
        yield text[0]
        yield f"  job      {_describe_ranks(first)}"
        yield from text[1:]
    else:
        yield NO_JOB
    for job in jobs:
        what = "no call since the test began" if job.is_idle else headline(job.verdict)
        yield f"  other    {_describe_ranks(job)}: {what}"


def _describe_ranks(job: Concluded) -> str:
    by = "an earlier test or a fixture" if job.is_other else "the test"
    return f"{job.verdict.world_size} ranks that {by} has started"


def add_to_report(
    item: pytest.Item, report: Any, recorder: Recorder, text: list[str], jobs: Sequence[Concluded]
) -> None:
    """Add a text to a report, and the verdict of the first job if that explains the failure."""
    explains = jobs[0] if jobs and not jobs[0].is_idle else None
    if report.failed:
        _put_first(report, text, is_explained=explains is not None)
    if explains is not None:
        report.nsa_explained = explains.verdict.failed
        named = ("nsa.verdict", headline(explains.verdict))
        report.user_properties.append(named)
        item.user_properties.append(named)  # of its later reports
        if hasattr(report, "wasxfail"):
            recorder.expect_failure(explains.evidence.folder, explains.verdict)


def _put_first(report: Any, text: list[str], *, is_explained: bool) -> None:
    """Put the verdict before the failure's text, and into the short summary, in a form that xdist's workers can send."""
    shown = "\n".join(map(visible, text)) + "\n"
    if isinstance(report.longrepr, ExceptionChainRepr):
        entry = ReprTraceback([ReprEntryNative([shown])], None, style="native")
        report.longrepr.chain = [(entry, None, "The test itself:"), *report.longrepr.chain]
        if is_explained and report.longrepr.reprcrash is not None:
            report.longrepr.reprcrash.message = visible(text[0])
    else:
        report.longrepr = f"{shown}{report.longrepr}"


def warn(item: pytest.Item, text: str) -> None:
    """Show a warning that no filter turns into a failure."""
    message = warnings.WarningMessage(pytest.PytestWarning(f"nsa: {text}"), pytest.PytestWarning, *find_place(item))
    report_warning(item, message)


def find_line(frame: FrameType | None, root: Path) -> str:
    """Return the innermost line of the repository on a stack."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(root) and "site-packages" not in path.parts:
            return f"{short_path(path)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
