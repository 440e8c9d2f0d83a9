"""What the clock of a pytest process under an outer launcher reports for it: the verdict, the JUnit file, the failures so far."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
from _pytest.junitxml import LogXML

from pytest_nsa.diagnosis.decision import decide
from pytest_nsa.observe.conclude import conclude
from pytest_nsa.report import junit, runs
from pytest_nsa.report import run as session_report
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import lines, short_path
from pytest_nsa.session.folders import RunFolder, safe_name
from pytest_nsa.session.masking import mask_all, mask_files
from pytest_nsa.session.recorder import Recorder
from pytest_nsa.system.clock import wall_clock
from pytest_nsa.wire.files import read_lines, write_atomically, write_json
from pytest_nsa.wire.messages import Job

KEPT = "evidence"  # a copy of the launch's evidence, in the form of a test's folder
_FILES = ("board.bin", "stall.json", "counters.json")
_TEST_EVENTS = ("exception", "skipped", "xfailed")


class Session(Protocol):
    """What a report needs of a session's log, which the clock reads (`clock.Session`)."""

    nodeid: str  # of the test that runs
    began: float
    limit: float  # seconds since `began`; 0: none
    run: str  # the folder of the run's evidence; '': none
    reports: list[dict[str, Any]]


def keep_evidence(launch: Path, setup: Mapping[str, Any], nodeid: str, limit: float) -> None:
    """Copy the ranks' evidence so far into a folder for the test ``nodeid``, in which a rank is past its time limit.

    Exceptions of tests that no rank runs any more are not copied. A rank that failed in ``nodeid`` may be in the next test already,
    so the tests of all ranks count.
    """
    tests = {nodeid, *(_running(rank / "session.jsonl") for rank in launch.glob("rank*"))}
    kept = launch / KEPT
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    job = Job(
        nodeid=nodeid, folder=str(kept), root=setup["root"], world_size=setup["world_size"], backend="", timeout=limit,
        created=setup["created"],
    )  # fmt: skip
    write_json(kept / "job.json", job.to_json(), indent=1)
    for path in (*launch.glob("heartbeat_rank*.jsonl"), launch / "host.jsonl"):
        if path.is_file():
            shutil.copy(path, kept)
    for rank in launch.glob("rank*"):
        own = kept / rank.name
        own.mkdir()
        for name in _FILES:
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(rank / name, own)
        events = [
            e
            for e in read_lines(rank / "events.jsonl")
            if e.get("event") not in _TEST_EVENTS or e.get("nodeid") in tests
        ]
        _write_lines(own / "events.jsonl", events)
        reports = [e for e in read_lines(rank / "session.jsonl") if e.get("event") == "report"]
        _write_lines(own / "reports.jsonl", [e for e in reports if e["report"].get("nodeid") in tests])


def _running(log: Path) -> str:
    """Return the test that a rank's session runs; '' between two tests."""
    nodeid = ""
    for line in read_lines(log):
        if line.get("event") in ("begin", "end"):
            nodeid = str(line.get("nodeid")) if line["event"] == "begin" else ""
    return nodeid


def _write_lines(path: Path, entries: list[dict[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def conclude_launch(launch: Path, setup: Mapping[str, Any], session: Session) -> dict[str, Any]:
    """Write the verdict on the test that runs, SUMMARY.md and report.html into the run's folder.

    Return what all ranks of the launch print of it, in the form that `report_session` takes.
    """
    if not (launch / KEPT).is_dir():
        keep_evidence(launch, setup, session.nodeid, session.limit)
    made = Path(session.run) if session.run else None
    run = RunFolder(made.parent if made else Path(setup["artifacts"]), made.name if made else None, setup["mode"])
    folder = run.test_folder(safe_name(session.nodeid))
    shutil.copytree(launch / KEPT, folder, dirs_exist_ok=True)
    if setup["masks"]:
        mask_all()
        mask_files(folder)
    verdict, evidence = conclude(folder)
    Recorder(run).add(folder, verdict)
    session_report.write_reports(run.path, setup["gpus"], decide, interrupted=True)
    runs.finish(run.path, 1, interrupted=True)
    return {
        "nodeid": session.nodeid, "lines": lines(verdict, evidence), "rank": setup["rank"],
        "summary": short_path(run.path / "SUMMARY.md"),
    }  # fmt: skip


def report_session(setup: Mapping[str, Any], session: Session, why: str, verdict: Mapping[str, Any]) -> None:
    """Print and write the failures of a session that cannot report by itself, and the test that ran.

    ``verdict`` is what `conclude_launch` returned in a process of the launch; empty if no process has concluded.
    """
    if setup["masks"]:
        mask_all()
    text = "\n".join([why, *verdict.get("lines", ())])
    reports = [*_reports(session)]
    if session.nodeid:
        reports.append(_ended_report(session, text))
    target = (setup["junit"] or {}).get("path")
    if target is not None:
        _write_junit(Path(target), reports, setup)
    _print(setup["rank"], session, reports, why, verdict)


def _reports(session: Session) -> Iterator[pytest.TestReport]:
    for line in session.reports:
        yield pytest.TestReport._from_json(dict(line["report"]))


def _ended_report(session: Session, text: str) -> pytest.TestReport:
    location = next((r["report"]["location"] for r in session.reports if r["report"]["nodeid"] == session.nodeid), None)
    path, _, name = session.nodeid.partition("::")
    return pytest.TestReport(
        nodeid=session.nodeid, location=tuple(location or (path, 0, name)), keywords={}, outcome="failed", longrepr=text,
        when="call", duration=wall_clock() - session.began, start=session.began, stop=wall_clock(),
    )  # fmt: skip


def _write_junit(target: Path, reports: list[pytest.TestReport], setup: Mapping[str, Any]) -> None:
    """Write the testsuite of this process, by pytest's own writer, into the file that all processes of the launch share."""
    given = setup["junit"]
    own = target.with_name(f".{target.name}.rank{setup['rank']}.partial")
    xml = LogXML(
        str(own),
        given["prefix"],
        given["suite"],
        given["logging"],
        given["durations"],
        given["family"],
        given["passing"],
    )
    xml.pytest_sessionstart()
    for report in reports:
        if report.nodeid not in given["not_ours"]:
            xml.pytest_runtest_logreport(report)
    xml.pytest_sessionfinish()
    junit.merge(target, own, setup["launch"], setup["rank"])


def _print(rank: int, session: Session, reports: list[pytest.TestReport], why: str, verdict: Mapping[str, Any]) -> None:
    """Print the failures, each line with the rank's number in front: pytest will print no summary."""
    out = [""]
    for line in session.reports:
        if line["report"]["outcome"] == "failed":
            out += [f"FAILED {line['report']['nodeid']}", *line["text"].splitlines(), ""]
    if session.nodeid:
        out.append(f"{'HANG' if verdict else 'CRASH'} {session.nodeid}: {why}")
    if verdict.get("rank") == rank:
        out += [*verdict["lines"], f"SUMMARY.md: {verdict['summary']}"]
    passed = {r.nodeid for r in reports if r.when == "call" and r.passed}
    failed = {r.nodeid for r in reports if r.failed}
    out.append(f"{len(failed)} failed, {len(passed - failed)} passed; the session was ended")
    sys.stdout.write("\n".join(f"[rank {rank}] {visible(line)}" if line else "" for line in out) + "\n")
    sys.stdout.flush()
