"""One rank's process: join the group, record evidence from the test's first moment, run the test, report that it is done."""

import faulthandler
import logging
import os
import random
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from os import getpid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nsa.trace import board
from nsa.trace.autostart import mark_as_traced
from nsa.trace.board import PHASES
from nsa.trace.calls.debug_level import VARIABLE, lower_detail
from nsa.trace.events import ignore_full_disk, local_rank, machine, record
from nsa.trace.frames import UNUSUAL_LIBRARIES, add_user_file
from nsa.trace.memory import limit_mib
from nsa.trace.session import installed, is_flow_wanted
from nsa.trace.stall import thread_errors
from nsa.trace.stall.exceptions import record_exception
from nsa.trace.stall.threads import lasting_threads
from nsa.trace.training import record_models
from pytest_nsa.evidence.board import learn
from pytest_nsa.rank import (
    coverage,
    handles,  # noqa: F401 (once, before ranks are forked)
    replay,
)
from pytest_nsa.rank.connections import (
    change_after_each,
    leave_group,
    meeting_store,
    set_first,
    wait_for_others,
    wait_for_threads,
)
from pytest_nsa.rank.context import LATE, RankContext, become, end_if_forked
from pytest_nsa.rank.store import ChannelStore
from pytest_nsa.system.descendants import end_leftovers
from pytest_nsa.system.leases import hold_while_alive
from pytest_nsa.system.prctl import become_subreaper, set_handler, write_lines_at_once
from pytest_nsa.system.procfs import AddedMemory
from pytest_nsa.wire.files import append, open_to_append
from pytest_nsa.wire.masking import mask_with
from pytest_nsa.wire.messages import DUMP_MAIN_SIGNAL, DUMP_SIGNAL, FIXED_VARIABLES, Channel, GroupSpec, Job

EXIT_FAILED = 1
SETTLE_S = 0.2  # for the collectives of ranks that stay to complete
# torch's own time limit must not come before ours: its message names no rank. The host bounds every wait.
GROUP_TIMEOUT = timedelta(days=1)


def _peaks(memory: AddedMemory, device: str) -> dict[str, float]:
    """Return this process's peak memory in its test, in MiB: its own pages, and its GPU's."""
    found = memory.peaks()
    if device != "cpu":
        found["peak_gpu_mib"] = round(torch.cuda.max_memory_allocated(device) / (1 << 20), 1)
    return found


def _folders_of_others(job: Job, rank: int) -> list[Path]:
    return [job.rank_folder(other) for other in range(job.world_size) if other != rank]


def seed_alike(seed: int) -> None:
    """Seed the random generators equally on all ranks that are new interpreters; forked ranks inherit one state."""
    random.seed(seed)
    torch.manual_seed(seed)


def rehearse() -> None:
    """Do once before ranks are forked what each of them would have to do: fill caches, install hooks."""
    thread_errors.install()
    learn(board.header())
    write_lines_at_once()
    limit_mib()
    machine()


_control: Channel | None = None  # this rank's, once it runs


def _lose_channel() -> None:
    """Close the channel in a process that a rank has forked, which must not report in the rank's name."""
    if _control is not None:
        _control.closed = True
        _control.socket.close()


os.register_at_fork(after_in_child=_lose_channel)


def _late_modules() -> set[str]:
    # Not an intersection with the names of all modules: it counts a reference to each, and so copies most pages of the zygote.
    return {name for name in LATE if name in sys.modules}


class RankProcess:
    """A rank of a worker group. It runs the job that it was forked for, or the jobs that it receives through ``control``."""

    def __init__(
        self,
        number: int,
        spec: GroupSpec,
        store: Path,
        items: Mapping[str, pytest.Item],
        control: Channel | None = None,
        ports: Sequence[int] = (),
    ) -> None:
        self.ports = ports  # for groups that a test makes itself
        self.number, self.spec, self.store, self.items, self.control = number, spec, store, items, control
        self._config = next((item.config for item in items.values()), None)
        self.device = "cpu"
        self._files: list[int] = []  # descriptors that faulthandler writes to
        self._has_joined = self._is_used = False
        self._group: dist.ProcessGroup | None = None
        self._base_store: dist.Store | None = None
        self._fresh_store: dist.Store | None = None
        self._groups = 0  # how many were formed after the first
        self._hook_error: Exception | None = None  # of pytest_nsa_environment, raised once the job has a folder
        self._coverage_settings = coverage.settings_of_this_process()
        self._had = _late_modules()

    def run(self, job: Job | None) -> int:
        """Run ``job``, or the jobs that are received; return the exit code of the last one."""
        global _control
        _control = self.control
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # Ctrl-C does not reach a rank's process group
            set_handler(signal.SIGINT, signal.default_int_handler)  # the host's is not a test's
        mask_with(None)  # the host masks what a rank has left
        become_subreaper()
        self._set_environment()
        self._held = hold_while_alive(job.in_use if job is not None else ())
        code = 0
        if job is None:
            self._join(forked_ahead=True)
            self._send(op="joined")
            job = self._next_job()
        while job is not None:
            code = self._run(job)
            has_kept_its_group = not self.spec.backend or dist.group.WORLD is self._group  # '': a test makes its own
            stays = job.stay and (job.fresh_group or has_kept_its_group)
            late = [m for m in LATE if m in sys.modules and m not in self._had]
            self._send(op="finished", code=code, stays=stays, late=late)
            if not stays:
                wait_for_others(_folders_of_others(job, self.number), PHASES.index("done"), job.timeout)
                break
            job = self._next_job()
        return code

    def _send(self, **message: object) -> None:
        if self.control is not None:
            self.control.send(**message)

    def _next_job(self) -> Job | None:
        """Return the next job; None once the zygote has ended."""
        while self.control is not None and not self.control.closed:
            for message in self.control.receive(None):
                if "job" in message:  # else a late answer to a request that was given up
                    return Job.from_json(message["job"])
        return None

    def _run(self, job: Job) -> int:
        """Run one job; return its exit code. All evidence goes to the rank's folder."""
        folder = job.rank_folder(self.number)
        folder.mkdir(exist_ok=True)  # a host makes no folder for ranks of another machine
        _redirect_output(folder)
        self._arm_stack_dumps(folder)

        on_gpu = self.spec.device == "cuda"
        facts = {"machine": machine(on_gpu=on_gpu), "memory_mib": limit_mib()}
        record(folder, event="start", pid=getpid(), notes=self.notes, libraries=UNUSUAL_LIBRARIES, **facts)
        session = installed()
        add_user_file(job.body)
        session.begin(
            folder,
            self.number,
            job.world_size,
            job.parallel.upper(),
            beats=Path(job.folder),
            checksums=job.check_divergence,
        )

        record_models(session.observer, folder, session.heartbeat)
        listen_to_traces()
        trace_log.folder = folder
        memory, imported = AddedMemory(), _late_modules()
        flow = session.begin_flow(folder) if job.flow or is_flow_wanted() else None
        # A second run executes lines that the first has: its lines do not count.
        measuring = coverage.start(None if flow is not None else job.measures or self._coverage_settings)
        try:
            if self._hook_error is not None:
                raise self._hook_error
            run = replay.prepare(job, self.items)
            session.board.text("line", run.place)
            self._join(again=job.fresh_group and self._is_used)
            self._is_used = True
            ctx = RankContext(
                rank=self.number, job=job, device=self.device, session=session, notes=self.notes, config=self._config
            )
            become(ctx)
            session.board.phase("body")
            if flow is not None:
                flow.start()
            passed = run.body(ctx)
            end_if_forked(ctx, passed=passed)
        except (Exception, KeyboardInterrupt, pytest.exit.Exception) as error:
            record_exception(folder, error, "setup" if session.board.phase_name == "start" else "call")
            if isinstance(error, pytest.exit.Exception):
                code = {} if error.returncode is None else {"returncode": int(error.returncode)}
                record(folder, event="pytest_exit", reason=str(error.msg), **code)
            traceback.print_exc()
            passed = False
        if flow is not None:
            flow.stop()
        coverage.save(measuring)
        if passed:
            wait_for_threads(_folders_of_others(job, self.number), PHASES.index("done"))
        session.board.phase("done")
        session.end(SETTLE_S if job.stay else 0.0)
        for thread, place in lasting_threads().items():
            record(folder, event="left_thread", name=thread.name, where=place)
        for command in end_leftovers():
            record(folder, event="left_running", command=command)
        peaks = _peaks(memory, self.device)
        if _late_modules() != imported:  # modules that other ranks inherit count for no test
            peaks.pop("added_mib", None)
        record(folder, event="done", passed=passed, pid=getpid(), **peaks)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return 0 if passed else EXIT_FAILED

    def _set_environment(self) -> None:
        """Set a launcher's variables before anything reads them; change, and report, a debug level that would break a rank."""
        n, number = str(self.spec.world_size), str(self.number)
        variables = {"RANK": number, "WORLD_SIZE": n, "OMP_NUM_THREADS": "1"}
        if self.spec.only < 0:  # else the outer launcher has set them
            variables |= {"LOCAL_RANK": number, "LOCAL_WORLD_SIZE": n, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
            set_first(self.ports[:-1])
        for name, value in variables.items():  # not by `update`, which looks through the classes of all mappings
            os.environ[name] = value
        if self.spec.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.spec.gpus
        if self.spec.cores:
            os.sched_setaffinity(0, {int(core) for core in self.spec.cores.split(",")})
        mark_as_traced()  # this rank is traced already; a job that its test starts is another launch
        self.notes = []
        self._add_environment()
        for name, value in self.spec.environment.items():
            os.environ[name] = value
        lowered = lower_detail(self.spec.backend)
        if lowered:
            self.notes.append(f"{lowered}; the ranks use INFO instead")
        elif not os.environ.get(VARIABLE):
            os.environ[VARIABLE] = "INFO"  # DDP's errors then name parameters, not indices

    def _add_environment(self) -> None:
        """Set the variables of the hook pytest_nsa_environment; keep its error until the job has a folder."""
        config = self._config
        if config is None or not config.hook.pytest_nsa_environment.get_hookimpls():
            return
        try:
            given = config.hook.pytest_nsa_environment(config=config, rank=self.number, world_size=self.spec.world_size)
            variables = {name: value for found in given for name, value in dict(found or {}).items()}
            fixed = FIXED_VARIABLES.intersection(variables)
            if fixed:
                raise ValueError(f"{', '.join(sorted(fixed))}: the plugin numbers the ranks; remove it")
            odd = next((pair for pair in variables.items() if not all(isinstance(part, str) for part in pair)), None)
            if odd is not None:
                raise TypeError(f"{odd[0]!r}: {odd[1]!r}: the names and values of variables must be texts")
            os.environ.update(variables)
        except Exception as error:  # a conftest's own
            self._hook_error = RuntimeError(f"pytest_nsa_environment: {type(error).__name__}: {error}")

    def _join(self, *, forked_ahead: bool = False, again: bool = False) -> None:
        """Choose the device and form the group, once. ``again``: replace the group of the last test by a new one.

        Raises RuntimeError where there is no GPU to use.
        """
        if self._has_joined and not again:
            return
        if self._has_joined:
            leave_group()
            if self.spec.backend:
                self._groups += 1
                self._fresh_store = self._fresh_store or meeting_store(self.number, self.ports) or self._base_store
                self._init_group(dist.PrefixStore(f"group{self._groups}", self._fresh_store))
            return

        torch.set_num_threads(1)
        if self.spec.device == "cuda":
            if not torch.cuda.device_count():
                raise RuntimeError(
                    f"torch {torch.__version__} sees no GPU, though the machine shows one; install a CUDA build of torch"
                )
            local = local_rank(self.number)
            self.device = f"cuda:{local % torch.cuda.device_count()}"
            torch.cuda.set_device(self.device)
        dist.set_debug_level_from_env()
        change_after_each(self.ports[:-1])
        if not self.spec.backend:  # world_size(2, group=None): the test makes its own
            self._has_joined = True
            return
        store = self._base_store = self._store()
        self._init_group(store)
        # A rank with a short test could end before another has joined; for ranks forked ahead the zygote waits for all.
        if not forked_ahead:
            store.set(f"joined-{self.number}", "1")
            store.wait([f"joined-{rank}" for rank in range(self.spec.world_size)], GROUP_TIMEOUT)
        self._has_joined = True

    def _init_group(self, store: dist.Store) -> None:
        dist.init_process_group(
            self.spec.backend, store=store, rank=self.number, world_size=self.spec.world_size, timeout=GROUP_TIMEOUT
        )
        self._group = dist.group.WORLD

    def _store(self) -> dist.Store:
        if self.spec.rendezvous:
            place, _, prefix = self.spec.rendezvous.partition("/")
            host, _, port = place.rpartition(":")
            return dist.PrefixStore(prefix, dist.TCPStore(host, int(port), is_master=False, timeout=GROUP_TIMEOUT))
        if self.control is not None and self.spec.backend == "gloo":
            self._channel_store = ChannelStore(self.control)  # C++ calls back into it for as long as the process lives
            return self._channel_store
        self.store.parent.mkdir(parents=True, exist_ok=True)
        return dist.FileStore(str(self.store), self.spec.world_size)

    def _arm_stack_dumps(self, folder: Path) -> None:
        """Register faulthandler, a C handler that runs while C++ holds the GIL; its files stay open."""
        stacks, fatal = open_to_append(folder / "stacks.txt"), open_to_append(folder / "fatal.txt")
        faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True, chain=False)
        faulthandler.register(DUMP_MAIN_SIGNAL, file=stacks, all_threads=False, chain=False)
        faulthandler.enable(file=fatal, all_threads=True)
        for fd in self._files:
            os.close(fd)
        self._files = [stacks, fatal]


def _redirect_output(folder: Path) -> None:
    """Redirect file descriptors 1 and 2 to this rank's output.log; make standard input empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = open_to_append(folder / "output.log")
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)


class TraceLog(logging.Handler):
    """Writes what the tracers log, through the logger ``nsa.trace``, to the output and to ``traces.log`` at once."""

    folder: Path

    def emit(self, entry: logging.LogRecord) -> None:
        """Write one line to both."""
        line = self.format(entry) + "\n"
        if sys.__stdout__ is not None:
            sys.__stdout__.write(line)
            sys.__stdout__.flush()
        with ignore_full_disk():
            append(self.folder / "traces.log", line.encode(errors="backslashreplace"))


# Made before the fork: a logger that is set up in each rank costs it half a millisecond.
trace_log = TraceLog()
trace_log.setFormatter(logging.Formatter("%(message)s"))


def listen_to_traces() -> None:
    """Add the handler to the logger ``nsa.trace``, once per process or before the fork."""
    log = logging.getLogger("nsa.trace")
    if trace_log not in log.handlers:
        log.setLevel(logging.INFO)
        log.propagate = False
        log.addHandler(trace_log)
