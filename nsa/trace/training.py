"""Evidence of a training that no test started, in the layout of a test's folder: for ``pytest-nsa watch`` and ``diagnose``.

A program calls ``nsa.trace.training.trace_training("DIR")`` on each rank; or it calls nothing, and the variable
NSA_TRACE_DIR names the folder: then importing torch is enough (`autostart`, an entry point that torch loads).
"""

import atexit
import errno
import faulthandler
import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist

from nsa.trace.calls.arguments import in_runs
from nsa.trace.events import SCHEMA, machine, record
from nsa.trace.files import find_writer, open_to_append, wall_clock, write_atomically
from nsa.trace.frames import UNUSUAL_LIBRARIES, call_site
from nsa.trace.gradients import report_gradients
from nsa.trace.memory import limit_mib
from nsa.trace.secrets import masked_arguments
from nsa.trace.session import installed, is_flow_wanted
from nsa.trace.stall.exceptions import record_exception

FATAL = "fatal.txt"
TERMINATED = "terminated.txt"  # the stacks at SIGTERM, such as torchrun's after the death of another rank
MAX_ANOMALIES = 2000  # unusual steps that are recorded
MAX_WRAPS = 64  # models that DDP wraps
MAX_ORDERS = 100  # the first steps, of which the gradients' order is recorded


class TracedTraining:
    """The evidence of a rank's training, from now until `end`, or until the process ends, with or without an exception."""

    def __init__(self, run: Path, rank: int, world_size: int, label: str) -> None:
        run.mkdir(mode=0o755, parents=True, exist_ok=True)  # under a umask of 000, too
        run = run.resolve()
        self.folder = run / f"rank{rank}"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.folder.is_symlink():
            raise NotADirectoryError(f"{self.folder}: is a link; remove it, or give another folder for the evidence")
        _refuse_folder_in_use(self.folder)
        # Files of an earlier run.
        for old in ("events.jsonl", "stall.json", "standing.json", "counters.json", "stacks.txt", FATAL, TERMINATED):
            (self.folder / old).unlink(missing_ok=True)
        _describe(run, world_size)
        facts = {"machine": machine(on_gpu=torch.cuda.is_available()), "memory_mib": limit_mib()}
        record(self.folder, event="start", pid=os.getpid(), notes=[], libraries=UNUSUAL_LIBRARIES, **facts)
        self._fatal = _dump_fatal_errors(self.folder / FATAL)
        self._terminated = _dump_at_sigterm(self.folder / TERMINATED)
        self.session = installed()
        self.session.begin(self.folder, rank, world_size, label, beats=run)
        record_models(self.session.observer, self.folder, self.session.heartbeat)
        self.flow = self.session.begin_flow(self.folder) if is_flow_wanted() else None
        if self.flow is not None:
            self.flow.start()
        self.board = self.session.board
        self.board.phase("body")
        self._pid, self._hook, self._ended = os.getpid(), sys.excepthook, False
        sys.excepthook = self._raised
        self._before = sys.exit, os._exit
        self._exiting_by = self._exiting, self._leaving
        sys.exit, os._exit = self._exiting_by
        self._exits: tuple[SystemExit, TracebackType | None, tuple[int, ...]] | None = None
        atexit.register(self._at_exit)
        global current
        current = self

    def _raised(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        hook = self._hook
        self.end(error.with_traceback(traceback))
        hook(kind, error, traceback)

    def _exiting(self, *status: Any) -> NoReturn:
        """Remember where sys.exit was called with a status: at the process's end this is no longer known."""
        try:
            self._before[0](*status)
        except SystemExit as error:
            is_mine = threading.current_thread() is threading.main_thread() and os.getpid() == self._pid
            if is_mine and error.code not in (0, None):
                self._exits = SystemExit(error.code), _traceback_of(sys._getframe(1)), self.board.moves
            raise

    def _leaving(self, status: int) -> NoReturn:
        """Call `end` before os._exit of the main thread, which calls no handler."""
        try:
            if threading.current_thread() is threading.main_thread():
                self.end_with(SystemExit(status).with_traceback(_traceback_of(sys._getframe(1))))
        finally:
            self._before[1](status)

    def _at_exit(self) -> None:
        error, traceback, moves = self._exits or (None, None, ())
        # If the rank has made progress since, the program has caught the SystemExit.
        self.end_with(error.with_traceback(traceback) if error is not None and moves == self.board.moves else None)

    def end_with(self, error: BaseException | None) -> None:
        """Call `end` with the exception that ended the process; for a SystemExit, with None if its status is 0, else its cause."""
        if isinstance(error, SystemExit):
            error = None if error.code in (0, None) else error.__context__ or error
        self.end(error)

    def end(self, error: BaseException | None = None, *, passed: bool = True) -> None:
        """End the trace: record ``error`` (None: no exception) and a last heartbeat. Later calls, and calls in a child, are no-ops.

        ``passed``: False if the training failed without an exception of this rank.
        """
        if self._ended or os.getpid() != self._pid:
            return
        if error is not None:  # first: a signal handler may raise during this call, and then `end` records that, too
            record_exception(self.folder, error, "call")
        self._ended = True
        if self.flow is not None:
            self.flow.stop()
        sys.excepthook = self._hook
        if (sys.exit, os._exit) == self._exiting_by:
            sys.exit, os._exit = self._before
        self.board.phase("done")
        self.session.end()
        record(self.folder, event="done", passed=passed and error is None)
        if self._fatal is not None:
            faulthandler.disable()
            self._fatal.close()
            (self.folder / FATAL).unlink(missing_ok=True)  # it is empty: no fatal signal has ended the process
        if self._terminated is not None:
            _forget_sigterm()
            self._terminated.close()

    def parameters_missing(self) -> list[str]:
        """Return the parameters without a gradient in the backward that runs; [] in another phase, and where none is counted."""
        if self.board.phase_name != "backward" or not self.board.count("gradients_expected"):
            return []
        names = self.session.observer.parameter_names
        return [name for index, name in enumerate(names) if not self.board.has_arrived(index)]


current: TracedTraining | None = None  # of this process, or inherited by a fork


def _refuse_folder_in_use(folder: Path) -> None:
    """Raise FileExistsError if a live process uses a rank's folder: a rank of another job, or one that started this process."""
    pid = find_writer(folder)
    if pid:
        in_use = (
            f"process {pid} leaves its evidence there; give this job another folder, or remove NSA_TRACE_DIR from it"
        )
        raise FileExistsError(errno.EEXIST, in_use, str(folder))


def _traceback_of(frame: FrameType | None) -> TracebackType | None:
    """Return a traceback that ends at the present line of ``frame``."""
    found = None
    while frame is not None:
        found = TracebackType(found, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return found


def _dump_at_sigterm(path: Path) -> TextIO | None:
    """Write all stacks to ``path`` at SIGTERM, before its default action. Return the file; None if the program handles SIGTERM."""
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return None
    file = os.fdopen(open_to_append(path), "a", encoding="utf-8")
    faulthandler.register(signal.SIGTERM, file, all_threads=True, chain=True)
    os.register_at_fork(after_in_child=lambda: None if file.closed else _forget_sigterm())
    return file


def _forget_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # else the program has set a handler since
        faulthandler.unregister(signal.SIGTERM)


def _dump_fatal_errors(path: Path) -> TextIO | None:
    """Write the stacks of all threads to ``path`` when a signal such as SIGABRT ends the process.

    Return the file; None if the program has enabled faulthandler itself.
    """
    if faulthandler.is_enabled():
        return None
    file = os.fdopen(open_to_append(path), "a", encoding="utf-8")
    faulthandler.enable(file, all_threads=True)
    # A child's death is not the rank's.
    os.register_at_fork(after_in_child=lambda: None if file.closed else faulthandler.disable())
    return file


def trace_training(
    folder: str | os.PathLike[str], rank: int | None = None, world_size: int | None = None, label: str = ""
) -> TracedTraining:
    """Write ``rank{r}/`` with board and events, and the heartbeats, into ``folder``.

    ``rank`` and ``world_size`` default to torchrun's variables RANK and WORLD_SIZE, else to one rank.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    return TracedTraining(Path(folder).absolute(), rank, world_size, label)


def record_models(observer: Any, folder: Path, heartbeat: Any) -> None:
    """Record in ``events.jsonl``: names and parallelism of the models that are called; what DDP wraps; unusual steps; and, if
    gradients are traced, the missing ones when they differ from those of the step before, and the order in which gradients became
    ready.
    """
    anomalies, reports, backwards, wraps = (itertools.count() for _ in range(4))
    last_missing: list[str] = []

    def saw_anomaly(kind: str, step: int, **facts: Any) -> None:
        if next(anomalies) < MAX_ANOMALIES:
            record(folder, event="anomaly", kind=kind, step=step, **facts)

    def saw_model(kind: str, needs_every_gradient: bool) -> None:
        if kind != "none":
            heartbeat.label = kind.upper()
            record(folder, event="parallel", kind=kind, needs_every_gradient=needs_every_gradient)

    def saw_gradients(step: int, missing: list[str], order: int) -> None:
        nonlocal last_missing
        if missing != last_missing and next(reports) < MAX_ANOMALIES:
            record(folder, event="gradients_missing", step=step, names=missing, where=call_site())
        last_missing = missing
        if next(backwards) < MAX_ORDERS:
            record(folder, event="gradients_ready", step=step, order=order)

    def saw_wrap(line: str, ranks: list[int], parameters: list[str]) -> None:
        # Ranks of another world have other numbers than in the job.
        if next(wraps) < MAX_WRAPS and dist.get_world_size() == observer.board.count("world_size"):
            record(folder, event="wrapped", where=line, ranks=in_runs(ranks), parameters=parameters)

    observer.on_anomaly = saw_anomaly
    observer.on_wrap = saw_wrap
    observer.on_model = saw_model
    report_gradients(saw_gradients)
    observer.on_names = lambda names, modules: record(folder, event="parameters", names=names, modules=modules)


def _describe(run: Path, world_size: int) -> None:
    """Write job.json for the run, in the form that the readers of test folders expect."""
    job = {
        "schema": SCHEMA,
        "nodeid": " ".join(masked_arguments(sys.argv)) or "training", "folder": str(run), "root": os.getcwd(),
        "world_size": world_size,
        "backend": os.environ.get("TORCH_BACKEND", ""), "created": wall_clock(), "timeout": 0.0, "traces": [],
    }  # fmt: skip
    write_atomically(run / "job.json", json.dumps(job, indent=1) + "\n")
