"""One session's way from a test to its verdict: folder, launcher, run, evidence, diagnosis, files."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa import marks
from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.diagnosis.verdict import NO_RANK, Verdict
from pytest_nsa.evidence.load import Evidence, load, with_sources
from pytest_nsa.monitor.announcements import Suspicions
from pytest_nsa.monitor.output import LiveOutput, OutputLimit
from pytest_nsa.monitor.supervise import RanksRun
from pytest_nsa.monitor.terminal import DebuggerServer, Terminal
from pytest_nsa.session import choose_launcher
from pytest_nsa.session.bisect import bisect
from pytest_nsa.session.folders import RunFolder, discard, safe_name
from pytest_nsa.session.needs import Needs, needs_of, tracing_of
from pytest_nsa.session.outer_launcher import Attachment
from pytest_nsa.session.resources import Resources
from pytest_nsa.settings import Settings
from pytest_nsa.wire.files import append_line, write_atomically
from pytest_nsa.wire.messages import CrewSpec, Job, plain_nodeid
from pytest_nsa.wire.protocols import Attendant, Launcher, LaunchError, Limits, UnfitError

# Taken from a test's time for dumping and killing, so that the report comes within the time that was given.
RESERVE_S = 2.0
VERDICTS = "verdicts.jsonl"


class RankRunner:
    """Runs jobs for the tests of this process (the pytest process, or an xdist worker)."""

    def __init__(self, config: pytest.Config, settings: Settings, folder: RunFolder) -> None:
        self.config, self.settings, self.folder = config, settings, folder
        self._launcher: Launcher | None = None
        self._plan: choose_launcher.LaunchPlan | None = None
        self.next_item: pytest.Item | None = None
        self.resources = Resources(config, settings)
        self.attachment: Attachment | None = None
        self._terminal = Terminal(config)
        self._debugger: DebuggerServer | None = None

    @property
    def plan(self) -> choose_launcher.LaunchPlan:
        """Where ranks come from; decided once, when collection has ended."""
        if self._plan is None:
            self._plan = choose_launcher.plan(self.config, self.settings)
        return self._plan

    def launcher(self, session: pytest.Session, *, between_tests: bool = False) -> Launcher:
        """The launcher, started when there is none.

        Only before the first test may this process be forked: inside one, its state is not what a rank starts from.
        """
        if self._launcher is None:
            if self.plan.kind == "fork" and (not between_tests or choose_launcher.why_not_fork(self.config)):
                self._plan = choose_launcher.LaunchPlan(kind="clean", description="forked from a clean child pytest")
            kind = self.plan.kind
            self._launcher = choose_launcher.start(kind, self.config, session, self.folder.path / "zygote.log")
        return self._launcher

    def attach(self, nodeids: list[str]) -> None:
        """Under an outer launcher: meet the other processes, and agree on the tests."""
        if self.settings.outer is not None:
            self.attachment = Attachment(self.settings.outer)
            self.attachment.agree_on(nodeids)

    def open_debugger(self) -> None:
        """Where this process has a terminal to lend."""
        if not hasattr(self.config, "workerinput"):
            self._debugger = DebuggerServer(self._terminal)

    def _ready_launcher(self, session: pytest.Session) -> Launcher:
        """The launcher, ready. Where the tests' collection leaves no process that may be forked, cold ranks."""
        launcher = self.launcher(session)
        try:
            launcher.wait_until_ready()
        except UnfitError as error:
            launcher.close()  # what has been leased for this test stays leased
            self._launcher = None
            self._plan = choose_launcher.LaunchPlan(
                kind="cold", description=f"cold: a new interpreter a rank ({error})"
            )
            self.folder.tell(f"slow: every rank is a new interpreter, because {error}")
            launcher = self.launcher(session)
        return launcher

    def close(self) -> None:
        """End the launcher and everything it started."""
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None
        if self.folder.is_made:
            with contextlib.suppress(OSError):  # another worker's ranks are still there
                (self.folder.path / ".crews").rmdir()
        self.resources.close()

    def run_item(
        self, item: pytest.Function, timeout: float | None, values: dict[str, Any], tried: dict[str, str] | None = None
    ) -> tuple[Verdict, Evidence]:
        """Run a collected test on its ranks and write everything that is known of it.

        ``values`` are those of host fixtures, ``tried`` those of fixtures that a bisection tries.
        """
        nodeid = plain_nodeid(item.nodeid)
        name = "" if tried else marks.value(item, "scenario", "")
        suffix = "".join(f"-{value.replace(':', '_')}" for value in (tried or {}).values())
        folder = self.folder.test_folder(name or safe_name(nodeid) + suffix)
        limit = timeout or self.settings.timeout
        needs = needs_of(item, self.settings)
        if self.resources.holds_for_others(needs) and self._launcher is not None:
            self._launcher.kill()  # ranks that stayed for a test that did not come hold what we are about to wait for
        leases = self.resources.take(needs, nodeid)
        job = Job(
            nodeid=nodeid,
            scenario=name,
            reads_as=marks.option(item, "scenario", "reads_as", "") if name else "",
            folder=str(folder),
            root=str(self.config.rootpath),
            timeout=limit,
            created=time.time(),
            seed=random.SystemRandom().getrandbits(64),
            values=values,
            overrides=tried or {},
            tmp=_temporary_folder(item, folder.name),
            world_size=needs.world_size,
            backend=needs.backend,
            device=needs.device,
            reuse=needs.reuse,
            stay=bool(needs.reuse) and needs == self._next_needs(),
            gpus=",".join(leases["gpu"].names) if "gpu" in leases else "",
            cores=",".join(leases["core"].names) if "core" in leases else "",
            in_use=tuple(path for lease in leases.values() for path in lease.in_use),
            debugger=self._debugger.name if self._debugger is not None else "",
            debug_rank=self.settings.debug_rank,
            **tracing_of(item, self.settings),
        )
        if self.attachment is not None:
            job = replace(self.attachment.local(job), reuse="", stay=False)
        keep = bool(name) or "artifacts" in item.fixturenames or self.settings.keep_passed
        try:
            verdict, evidence = self._run(item.session, job, keep=keep)
        finally:
            if not job.stay:
                self.resources.release()
        if self.attachment is not None:
            verdict, evidence = self._agree(self.attachment, verdict, evidence)
        if tried is not None:
            return verdict, evidence
        if verdict.failed and self.attachment is None:
            found = bisect(item, lambda other: self.run_item(item, timeout, values, other)[0])
            if found:
                verdict = replace(verdict, reason=f"{verdict.reason}; {found}")
                write_verdict(folder, verdict)
        self.record(folder, verdict)
        if not keep and verdict.outcome in ("PASS", "SKIP"):
            discard(folder)
        return verdict, evidence

    def _agree(self, attachment: Attachment, verdict: Verdict, evidence: Evidence) -> tuple[Verdict, Evidence]:
        """What the leader makes of a test holds in all processes, so that they go on, or stop, alike."""
        conclusion = None
        if attachment.leads:
            facts = [{"passed": rank.passed, "xfailed": rank.xfailed} for rank in evidence.ranks]
            conclusion = {"verdict": verdict.to_json(), "ranks": facts}
        told = attachment.share(conclusion)
        ranks = [replace(rank, **known) for rank, known in zip(evidence.ranks, told["ranks"], strict=True)]
        return Verdict.from_json(told["verdict"]), replace(evidence, ranks=tuple(ranks))

    def _next_needs(self) -> Needs | None:
        """What the next test of this process needs; None when it needs no ranks, or nobody can tell."""
        item = self.next_item
        return needs_of(item, self.settings) if isinstance(item, pytest.Function) and marks.is_ranked(item) else None

    def _attendants(self, job: Job) -> list[Attendant]:
        """What is to be done while ``job`` runs."""
        found: list[Attendant] = [OutputLimit(job, self.settings.output_limit)]
        if self.config.option.capture == "no":
            found.append(LiveOutput(job, self._terminal))
        if self._debugger is not None:
            self._debugger.begin(once=self.config.option.usepdb)
            found.append(self._debugger)
        return found

    def _suspicions(self, job: Job, limits: Limits) -> Suspicions:
        """Makes of a stand-still what can be made of it, and announces it."""
        return Suspicions(Path(job.folder), job, limits, self._announce)

    def _announce(self, text: str) -> None:
        """Now, where the user looks: an xdist worker's controller passes it on."""
        self.folder.announce(text)
        if not hasattr(self.config, "workerinput"):
            self._terminal(f"\n{text}\n")

    def _crew_ahead(self, job: Job) -> CrewSpec | None:
        """The ranks to make ready while ``job`` runs."""
        needs = self._next_needs()
        if (
            not self.settings.ahead
            or job.stay
            or self.attachment is not None
            or needs is None
            or not needs.may_be_forked_ahead
        ):
            return None
        return CrewSpec(world_size=needs.world_size, backend=needs.backend, device=needs.device)

    def record(self, folder: Path, verdict: Verdict) -> None:
        """A line in the run's list of verdicts, and one in its log."""
        append_line(self.folder.path / VERDICTS, {"folder": folder.name, **verdict.to_json()})
        where = f" {verdict.cause} on {verdict.culprits()} at {verdict.where or '?'}" if verdict.failed else ""
        for fact in verdict.evidence:
            if fact.rank == NO_RANK:
                self.folder.tell(f"{fact.says} ({folder.name}); the verdict is by the other rules")
        self.folder.note(f"{verdict.outcome} {verdict.scenario or verdict.nodeid} {verdict.duration_s:.2f} s{where}")

    def expect_failure(self, folder: Path, verdict: Verdict) -> None:
        """The failure was foreseen by xfail: say so in the test's folder and in the run's list, where the last line counts."""
        self.rewrite(folder, replace(verdict, expected=True))

    def rewrite(self, folder: Path, verdict: Verdict) -> None:
        """Another verdict on a test that has one."""
        folder.mkdir(exist_ok=True)  # that of a test which passed may be gone
        write_verdict(folder, verdict)
        append_line(self.folder.path / VERDICTS, {"folder": folder.name, **verdict.to_json()})

    def run_function(self, session: pytest.Session, job: Job) -> Verdict:
        """Run a function for the fixture `launch`; its folder has been made."""
        return self._run(session, job, keep=True)[0]

    def _run(self, session: pytest.Session, job: Job, *, keep: bool) -> tuple[Verdict, Evidence]:
        reserve = min(RESERVE_S, 0.2 * job.timeout)
        limits = Limits(
            start=min(self.settings.start_timeout, job.timeout),
            run=job.timeout - reserve,
            hang_after=self.settings.hang_after,
        )
        folder = Path(job.folder)
        write_atomically(folder / "job.json", json.dumps(job.to_json(), indent=1) + "\n")
        try:
            launcher = self._ready_launcher(session)
            launcher.expect(self._crew_ahead(job))
            if self.attachment is not None:
                self.attachment.run(job, launcher, limits, self._attendants(job))
            else:
                RanksRun(job, launcher, limits, self._attendants(job), self._suspicions(job, limits)).run()
        except LaunchError as error:
            self.close()  # the next test gets a new one
            append_line(folder / "host.jsonl", {"event": "refused", "time": time.time(), "reason": str(error)})
            if self.attachment is not None:
                self.attachment.refuse(str(error))
        except KeyboardInterrupt:
            if not (folder / "host.jsonl").is_file():  # no rank had been started
                append_line(
                    folder / "host.jsonl",
                    {"event": "stop", "time": time.time(), "reason": "interrupted", "moved": True},
                )
            self.record(folder, _conclude(folder, keep=True)[0])
            raise
        return _conclude(folder, keep=keep)


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """While tests run, SIGTERM (a cancelled CI job) ends the session as Ctrl-C does: with its evidence and reports."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _temporary_folder(item: pytest.Function, name: str) -> str:
    """A folder of this session's, made by pytest's own factory, for the ranks' tmp_path; '' when the test takes none."""
    if not any(fixture.startswith("tmp") for fixture in item.fixturenames):
        return ""
    return str(item.config._tmp_path_factory.mktemp(name))  # type: ignore[attr-defined]


def _conclude(folder: Path, *, keep: bool) -> tuple[Verdict, Evidence]:
    """Diagnose a folder and write what follows from it beside the evidence, unless it passed and is not kept."""
    began = time.time()
    evidence = load(folder)
    if not all(rank.passed for rank in evidence.ranks):
        evidence = with_sources(evidence)
    verdict = diagnose(evidence)
    known = evidence.stop_time or max((r.exit_time for r in evidence.ranks), default=began)
    if verdict.failed:  # from the stop, or the end of the first rank that ended, to here
        verdict = replace(verdict, time_to_verdict_s=round(max(0.0, time.time() - known), 3))
    if keep or verdict.failed:
        write_verdict(folder, verdict)
        _merge_logs(folder, evidence)
    return verdict, evidence


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """verdict.json, and result.txt with the outcome's one word."""
    write_atomically(folder / "verdict.json", json.dumps(verdict.to_json(), indent=1) + "\n")
    write_atomically(folder / "result.txt", verdict.outcome + "\n")


def _merge_logs(folder: Path, evidence: Evidence) -> None:
    """output.log and traces.log of the whole test, from the ranks' own; a stack dump a rank where there is one."""
    several = len(evidence.ranks) > 1
    with (
        (folder / "output.log").open("w", encoding="utf-8") as output,
        (folder / "traces.log").open("w", encoding="utf-8") as traces,
    ):
        for rank in evidence.ranks:
            prefix = f"[rank {rank.rank}] " if several else ""
            output.writelines(f"{prefix}{line}\n" for line in _lines(rank.folder / "output.log"))
            lines = _lines(rank.folder / "traces.log")
            traces.writelines(f"{line}\n" for line in lines if rank.rank == 0 or line.startswith("[DDP]"))
            dump = rank.folder / "stacks.txt"
            if dump.is_file() and dump.stat().st_size:
                text = dump.read_text(encoding="utf-8", errors="replace")
                (folder / f"watchdog_stackdump_rank{rank.rank}.txt").write_text(text, encoding="utf-8")


def _lines(path: Path) -> Iterator[str]:
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                yield line.rstrip("\n")
