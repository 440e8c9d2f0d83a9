"""From a test to its verdict: make its job, lease what it needs, run its ranks, conclude, record."""

import contextlib
import inspect
import random
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa import marked
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.observe.conclude import conclude, with_label_sources
from pytest_nsa.observe.host_log import note
from pytest_nsa.observe.supervise import RanksRun
from pytest_nsa.observe.terminal import DebuggerServer, LiveOutput, OutputLimit, Terminal
from pytest_nsa.rank.coverage import read_settings
from pytest_nsa.report.plain import visible
from pytest_nsa.report.run import write_verdict
from pytest_nsa.session.bisect import FLOW, HANG_AFTER_S, Run, Variation, bisect, limit_second_run, may_run_again
from pytest_nsa.session.extensions import Extensions
from pytest_nsa.session.folders import Recorder, RunFolder, safe_name
from pytest_nsa.session.interrupts import signals_key
from pytest_nsa.session.launcher import RunLauncher
from pytest_nsa.session.masking import mask_files, shown_ids
from pytest_nsa.session.needs import Needs, Resources, read_needs, read_tracing
from pytest_nsa.session.phases import Phases, fold, static_mark
from pytest_nsa.settings import Mode, Settings
from pytest_nsa.system.clock import wall_clock
from pytest_nsa.system.leases import Lease
from pytest_nsa.wire import masking
from pytest_nsa.wire.files import read_lines, write_json
from pytest_nsa.wire.messages import GroupSpec, Job, plain_nodeid
from pytest_nsa.wire.protocols import Launcher, LaunchError, Limits, Monitor


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


def make_job(
    item: pytest.Function,
    folder: Path,
    needs: Needs,
    leases: Mapping[str, Lease],
    settings: Settings,
    *,
    timeout: float,
    values: dict[str, Any],
    tried: Variation | None,
    readings: Mapping[str, str],
    next_needs: Needs | None,
    debugger: str,
) -> Job:
    """Build the job of a collected test, whose evidence goes to ``folder``.

    ``values`` are those of host fixtures; ``tried`` is what a bisection changes; ``readings`` maps a plan's scenarios to what
    their failures mean. Ranks that are reused stay if the next test needs the same (``next_needs``). ``debugger`` is the name
    of the socket that lends the terminal, or ''.
    """
    name = get_scenario(item, tried)
    return Job(
        nodeid=plain_nodeid(item.nodeid),
        scenario=name,
        reads_as=marked.option(item, "scenario", "reads_as", readings.get(name, "")) if name else "",
        folder=str(folder),
        root=str(item.config.rootpath),
        timeout=timeout,
        created=wall_clock(),
        seed=random.SystemRandom().getrandbits(64) if tried is None or tried.seed is None else tried.seed,
        values=values,
        overrides=dict(tried.fixtures) if tried is not None else {},
        tmp=_temporary_folder(item),
        world_size=needs.world_size,
        backend=needs.backend,
        device=needs.device,
        flow=tried is not None and tried.flow,
        reuse=needs.reuse,
        environment=needs.environment,
        fresh_group=bool(needs.reuse) and marked.option(item, "reuse", "group") == "fresh",
        stay=bool(needs.reuse) and needs == next_needs,
        gpus=",".join(leases["gpu"].names) if "gpu" in leases else "",
        cores=",".join(leases["core"].names) if "core" in leases else "",
        in_use=tuple(path for lease in leases.values() for path in lease.in_use),
        debugger=debugger,
        debug_rank=settings.debug_rank,
        body=_get_file(item),
        hash_seeds=marked.get_hash_seeds(item, needs.world_size),
        **read_tracing(item, settings),
    )


def _get_file(item: pytest.Function) -> str:
    """Return the file that defines the test's function; for a method of a base class, it may be in an installed package."""
    code = getattr(inspect.unwrap(item.function), "__code__", None)
    return code.co_filename if code is not None else ""


def get_scenario(item: pytest.Function, tried: Variation | None) -> str:
    """Return the scenario that a test is; '' for any other test, and for a run of a bisection."""
    name: str = "" if tried is not None else marked.value(item, "scenario", "")
    return name


def _temporary_folder(item: pytest.Function) -> str:
    """Return a folder for the ranks' tmp_path, made by pytest's own factory; '' if the test takes none and cannot request one
    by `request`.

    Its name is short: tests put Unix sockets into tmp_path, and the path of one has 107 characters.
    """
    if not any(fixture == "request" or fixture.startswith("tmp") for fixture in item.fixturenames):
        return ""
    return str(item.config._tmp_path_factory.mktemp("ranks"))  # type: ignore[attr-defined]


# Reserved in a test's time for dumping and killing, so that the report comes within its time limit.
RESERVE_S = 2.0
FRESH_GROUPS = 50
AFTER_FAILURE_S = 5.0


class RankRunner:
    """Runs jobs for the tests of this process (the pytest process, or an xdist worker)."""

    def __init__(self, config: pytest.Config, settings: Settings, folder: RunFolder, group: Group) -> None:
        self.config, self.settings, self.folder, self.group = config, settings, folder, group
        self.launcher = RunLauncher(config, settings, folder)
        self.recorder = Recorder(folder)
        self.extensions = Extensions(config, folder.report)
        self.resources = Resources(config, settings)
        self.next_item: pytest.Item | None = None
        self._second_runs = 0
        self._groups = 0  # how many groups the ranks that stay have formed, one per test
        self._terminal = Terminal(config)
        self._debugger: DebuggerServer | None = None
        self._shown_ids: dict[str, str] = {}
        self._launches = threading.Lock()

    def shown_id(self, session: pytest.Session, nodeid: str) -> str:
        """Return a test's id as files and reports show it: masked on request."""
        if self.settings.mask_output and not self._shown_ids:
            self._shown_ids = shown_ids(item.nodeid for item in session.items)
        return self._shown_ids.get(nodeid, nodeid)

    def open_debugger(self) -> None:
        """Lend the terminal to ranks."""
        self._debugger = DebuggerServer(self._terminal)
        self.config.add_cleanup(self._debugger.close)

    def close(self) -> None:
        """End the launcher and everything it started; give back what is leased."""
        self.launcher.close()
        if self.folder.is_made:
            with contextlib.suppress(OSError):  # another worker's ranks are still there
                (self.folder.path / ".worker_groups").rmdir()
        self.resources.release()

    def run_item(
        self,
        item: pytest.Function,
        timeout: float | None,
        values: dict[str, Any],
        tried: Variation | None = None,
        within: str = "",
        *,
        func_only: bool = False,
    ) -> tuple[Verdict, Evidence, Phases]:
        """Run a collected test on its ranks, and write its verdict and evidence.

        ``values`` are those of host fixtures; ``tried`` is what a bisection changes, and ``within`` the folder
        of the failure that it narrows down. ``func_only``: ``timeout`` is for the call alone, without fixtures.
        """
        needs = read_needs(item, self.settings)
        if tried is not None:
            needs = replace(needs, environment={**needs.environment, **tried.environment})
        name = self._name(item, tried, within)
        job = self._prepare(item, needs, name, timeout, values, tried)
        try:
            job = self._with_its_file(item.session, job, name)
            verdict, evidence = self._run(
                item.session, job, keep=self._keeps(item, job.scenario), record=tried is None, is_tried=tried is not None,
                awaits_all=_is_marked_to_fail(item), func_only=func_only,
            )  # fmt: skip
        finally:
            if not job.stay:
                self.resources.release()
        found = fold(evidence, verdict, static_mark(item))
        verdict, evidence, found = self.group.agree(verdict, evidence, found)
        if tried is not None:
            return verdict, evidence, found
        folder = Path(job.folder)
        if verdict.failed and self.group.is_alone and not _is_expected(item, verdict):
            narrowed = self._bisect(
                item, needs, verdict,
                lambda other: self.run_item(item, timeout, values, other, folder.name, func_only=func_only)[0],
            )  # fmt: skip
            if narrowed:
                verdict = replace(verdict, reason=f"{verdict.reason}; {narrowed}")
                self.recorder.replace(folder, verdict)
            changed = self._run_again(
                item, verdict, evidence,
                lambda limit, other: self.run_item(item, limit, values, other, evidence.folder.name)[:2],
            )  # fmt: skip
            if changed is not verdict:
                self.recorder.replace(folder, changed)
            verdict = changed
            evidence = with_label_sources(evidence, verdict)
        if not self.group.is_alone:
            self.recorder.add(folder, verdict)
        return verdict, evidence, found

    def _name(self, item: pytest.Function, tried: Variation | None, within: str) -> str:
        """Return the name of the folder of a test, or of a run of a bisection."""
        if tried is not None:
            return f"{within}/bisect-{safe_name(tried.label)}"
        if scenario := get_scenario(item, None):
            return scenario
        return safe_name(self.shown_id(item.session, plain_nodeid(item.nodeid)))

    def _prepare(
        self,
        item: pytest.Function,
        needs: Needs,
        name: str,
        timeout: float | None,
        values: dict[str, Any],
        tried: Variation | None,
    ) -> Job:
        """Make the test's folder, lease what it needs, and return its job."""
        folder = self.folder.test_folder(name, self.group.ranks_here(needs.world_size))
        if self.resources.holds_for_others(needs):
            self.launcher.kill_ranks()  # ranks that stayed hold what this test is about to wait for
        job = make_job(
            item,
            folder,
            needs,
            self.resources.take(needs, plain_nodeid(item.nodeid)),
            self.settings,
            timeout=timeout or self.settings.timeout,
            values=values,
            tried=tried,
            readings=self.extensions.scenarios,
            next_needs=self._next_needs(),
            debugger=self._debugger.name if self._debugger is not None else "",
        )
        job = self.group.local(replace(job, measures=read_settings(item, folder)))
        if job.flow:  # fresh ranks: if it passes there, an earlier test left what makes it fail
            job = replace(job, reuse="", fresh_group=False, stay=False)
        return self._without_too_many_groups(job)

    def remove_passed(self, item: pytest.Function, verdict: Verdict, folder: Path) -> None:
        """Delete the folder of a test that passed, unless it is to be kept."""
        if verdict.outcome in ("PASS", "SKIP") and not self._keeps(item, get_scenario(item, None)):
            shutil.rmtree(folder, ignore_errors=True)

    def _keeps(self, item: pytest.Function, scenario: str) -> bool:
        return bool(scenario) or "artifacts" in item.fixturenames or self.settings.keep_passed

    def _bisect(self, item: pytest.Function, needs: Needs, verdict: Verdict, run: Run) -> str:
        try:
            return bisect(item, self.settings, needs, verdict, run)
        except (OSError, LaunchError) as error:  # the failure has its verdict already
            return f"bisect: ended early: {error}"

    def _run_again(
        self, item: pytest.Item, verdict: Verdict, evidence: Evidence,
        run: Callable[[float, Variation], tuple[Verdict, Evidence]],
    ) -> Verdict:  # fmt: skip
        """Return the verdict with what a second run adds: the statement at which the ranks parted. ``run`` takes its limit."""
        if not may_run_again(item, self.settings, verdict, evidence, self._second_runs):
            return verdict
        self._second_runs += 1
        limit = limit_second_run(evidence)
        self._announce(f"{verdict.nodeid}: runs once more, {limit:.0f} s at most, to find where its ranks part")
        from pytest_nsa.diagnosis.divergence import FILE, compare_runs  # not before the first failure

        try:
            again, second = run(limit, Variation(label=FLOW, flow=True, seed=evidence.job.seed))
            changed = compare_runs(verdict, evidence, second, again)
        except (OSError, LaunchError):  # the failure has its verdict already
            return verdict
        if self.settings.mask_output:  # the log has texts of the program, which are masked by their names alone
            for rank in second.ranks:
                (rank.folder / FILE).unlink(missing_ok=True)
        return changed

    def _without_too_many_groups(self, job: Job) -> Job:
        """End reused ranks after `FRESH_GROUPS` groups: they keep the connections of each earlier group open."""
        self._groups = self._groups + 1 if job.fresh_group else 0
        if self._groups < FRESH_GROUPS:
            return job
        self._groups = 0
        return replace(job, stay=False)

    def run_function(self, item: pytest.Item, job: Job, *, reruns: bool) -> tuple[Verdict, Path]:
        """Run a function for the fixture `launch`; return its verdict and its folder: that of the job, unless the disk became full.

        With ``reruns`` a failure runs once more, as a test's does. Threads that launch take turns.
        """
        with self._launches:
            job = self._with_its_file(item.session, job, Path(job.folder).name)
            verdict, evidence = self._run(item.session, job, keep=True, record=False)
            folder = Path(job.folder)
            if reruns:
                changed = self._run_again(
                    item, verdict, evidence, lambda limit, other: self._vary(item, job, limit, other)
                )
                if changed is not verdict:
                    write_verdict(folder, changed)
                verdict = changed
            return verdict, folder

    def _vary(self, item: pytest.Item, job: Job, limit: float, tried: Variation) -> tuple[Verdict, Evidence]:
        """Run a function as a second run does, in a folder in the first one's."""
        name = f"{Path(job.folder).name}/bisect-{tried.label}"
        folder = self.folder.test_folder(name, self.group.ranks_here(job.world_size))
        other = replace(job, folder=str(folder), timeout=limit, flow=tried.flow)
        return self._run(
            item.session, self._with_its_file(item.session, other, name), keep=True, record=False, is_tried=True
        )

    def _with_its_file(self, session: pytest.Session, job: Job, name: str) -> Job:
        """Return the job, written; in a new folder if another process has filled the disk since its folder was made."""
        try:
            self._write_job(session, job)
        except OSError as error:
            self.folder.spare(error)
            shutil.rmtree(job.folder, ignore_errors=True)
            job = replace(job, folder=str(self.folder.test_folder(name, self.group.ranks_here(job.world_size))))
            self._write_job(session, job)
        return job

    def _write_job(self, session: pytest.Session, job: Job) -> None:
        content = {**job.to_json(), "nodeid": self.shown_id(session, job.nodeid)}
        write_json(Path(job.folder) / "job.json", content)

    def _run(
        self,
        session: pytest.Session,
        job: Job,
        *,
        keep: bool,
        record: bool,
        is_tried: bool = False,
        awaits_all: bool = False,
        func_only: bool = False,
    ) -> tuple[Verdict, Evidence]:
        """Run a job to its verdict. With ``record``, add it to the run's list at once, unless other processes have to agree.

        ``is_tried``: a run of a bisection; an interrupt of it does not replace the verdict of the failure. ``awaits_all``: a rank
        that fails as expected does not end the others, each of which has to fail so or pass.
        """
        limits = Limits(
            start=min(self.settings.start_timeout, job.timeout),
            run=job.timeout - min(RESERVE_S, 0.2 * job.timeout),
            hang_after=HANG_AFTER_S if job.flow else self.settings.hang_after,
            after_failure=job.timeout if awaits_all else AFTER_FAILURE_S,
            fixtures=max(job.timeout, self.settings.timeout) if func_only else 0.0,
        )
        folder = Path(job.folder)
        try:
            launcher = self.launcher.cold(session) if job.hash_seeds else self.launcher.ready(session)
            launcher.expect(self._ranks_ahead(job))
            self._run_ranks(job, launcher, limits)
        except LaunchError as error:
            self.close()  # the next test gets a new one
            note(folder / "host.jsonl", "refused", reason=str(error))
            self.group.refuse(str(error))
        except KeyboardInterrupt:
            if not any(read_lines(folder / "host.jsonl")):  # no rank had been started
                note(folder / "host.jsonl", "stop", reason="interrupted", moved=True)
            if not is_tried:
                self.recorder.add(folder, self._conclude(folder, keep=True)[0])
            raise
        with self.config.stash[signals_key].held():
            verdict, evidence = self._conclude(folder, keep=keep)
            if record and self.group.is_alone:
                self.recorder.add(folder, verdict)
        return verdict, evidence

    def _conclude(self, folder: Path, *, keep: bool) -> tuple[Verdict, Evidence]:
        if self.settings.mask_output:
            mask_files(folder)
        return conclude(folder, self.extensions.rules, keep=keep)

    def _run_ranks(self, job: Job, launcher: Launcher, limits: Limits) -> None:
        announce = (lambda _: None) if job.flow else self._announce  # what the first run announced
        self.group.run(RanksRun(job, launcher, limits, self._monitors(job), announce, self.extensions.collect_evidence))

    def _monitors(self, job: Job) -> list[Monitor]:
        """Return what is polled while ``job`` runs."""
        found: list[Monitor] = [OutputLimit(job, self.settings.output_limit)]
        if self.config.getoption("capture", "no") == "no":  # -p no:capture leaves no option
            found.append(LiveOutput(job, lambda text: self._terminal(masking.text(text))))
        if self._debugger is not None:
            self._debugger.begin(once=self.config.getoption("usepdb", False))
            found.append(self._debugger)
        return found

    def _announce(self, text: str) -> None:
        """Print an announcement now; of an xdist worker, the controller prints it."""
        text = visible(text)
        self.folder.announce(text)
        if self.settings.mode is not Mode.WORKER:
            self._terminal(f"\n{text}\n")

    def _next_needs(self) -> Needs | None:
        """Return what the next test of this process needs; None when it needs no ranks, or is not known."""
        item = self.next_item
        return read_needs(item, self.settings) if isinstance(item, pytest.Function) and marked.is_ranked(item) else None

    def _ranks_ahead(self, job: Job) -> GroupSpec | None:
        """Return the ranks to make ready while ``job`` runs."""
        needs = self._next_needs()
        if not self.settings.ahead or job.stay or not self.group.is_alone or needs is None:
            return None
        if not needs.may_be_forked_ahead:
            return None
        return GroupSpec(
            world_size=needs.world_size, backend=needs.backend, device=needs.device, environment=needs.environment
        )


def _is_expected(item: pytest.Function, verdict: Verdict) -> bool:
    """Return whether a test is marked to fail, in this way: there is nothing to narrow down."""
    return item.get_closest_marker("xfail") is not None or marked.value(item, "fails_as") == verdict.cause


def _is_marked_to_fail(item: pytest.Item) -> bool:
    """Return whether a mark names the failures that are expected, so that each rank's counts."""
    named = any(mark.kwargs.get("raises") is not None for mark in item.iter_markers("xfail"))
    return named or item.get_closest_marker("fails_as") is not None
