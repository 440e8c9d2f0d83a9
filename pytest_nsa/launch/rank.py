"""One rank: leaves evidence from its first moment, joins the group, runs the collected item by pytest's own protocol."""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.artifacts import append_line
from pytest_nsa.launch.context import RankContext, become
from pytest_nsa.launch.messages import DUMP_SIGNAL, Job

EXIT_FAILED = 1
MAX_CHAIN = 10
# They speak to the terminal, dump on their own, or run a test again: the host's business, done there.
HOST_PLUGINS = ("terminalreporter", "faulthandler", "rerunfailures")
_kept_open: list[object] = []  # faulthandler writes to descriptors: their files must live as long as the process
MAX_TEXT = 200_000


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every rank of a job does: ``body`` returns whether it passed; ``place`` is 'file:line in name'."""

    body: Callable[[RankContext], bool]
    place: str


def prepare(job: Job, items: dict[str, pytest.Item]) -> Run:
    """What the ranks will run. Raises LookupError with a sentence when the zygote does not have it."""
    if job.function:
        module_name, _, name = job.function.partition(":")
        module = sys.modules.get(module_name)
        if module is None:
            try:
                module = importlib.import_module(module_name)
            except ImportError:
                raise LookupError(
                    f"launch({name}): module {module_name!r} is not among those that were collected"
                ) from None
        function = getattr(module, name, None)
        if not callable(function):
            raise LookupError(f"launch({name}): no function of this name at the top level of {module_name}")
        code = getattr(function, "__code__", None)
        place = f"{code.co_filename}:{code.co_firstlineno} in {name}" if code else name
        return Run(body=lambda ctx: _run_function(ctx, function), place=place)
    item = items.get(job.nodeid)
    if item is None:
        raise LookupError(f"{job.nodeid}: was not collected by the process that starts the ranks")
    path, line, _ = item.reportinfo()
    return Run(body=lambda ctx: _run_item(ctx, item), place=f"{path}:{(line or 0) + 1} in {item.name}")


def main(number: int, job: Job, run: Run) -> int:
    """Run as rank ``number``; returns the exit code. Everything is left in the rank's folder."""
    folder = job.rank_folder(number)
    folder.mkdir(exist_ok=True)
    _take_over_output(folder)
    _arm_stack_dumps(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's to handle
    os.environ.update(_launcher_variables(number, job))
    notes = _tame_environment(job)

    import torch

    from nsa.trace import session as trace_session

    torch.set_num_threads(1)
    _record(folder, event="start", pid=os.getpid(), notes=notes)
    device = "cpu"
    if job.device == "cuda":
        if not torch.cuda.device_count():
            print(f"torch {torch.__version__} sees no GPU, though the machine shows one; install a CUDA build of torch")
            return EXIT_FAILED
        device = f"cuda:{number % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    session = trace_session.start(folder, number, job.world_size, job.parallel.upper(), beats=Path(job.folder))

    def saw_model(kind: str) -> None:
        if kind != "none":
            session.heartbeat.label = kind.upper()
            _record(folder, event="parallel", kind=kind)

    session.observer.on_model = saw_model
    session.observer.on_names = lambda names: _record(folder, event="parameters", names=names)
    _listen_to_traces(folder)
    ctx = RankContext(rank=number, job=job, device=device, session=session, notes=notes)
    become(ctx)
    try:
        session.board.text("line", run.place)
        _join_group(ctx)
        session.board.phase("body")
        passed = run.body(ctx)
    except Exception as error:
        record_exception(folder, error, "setup")
        traceback.print_exc()
        passed = False
    session.board.phase("done")
    session.heartbeat.stop()
    _record(folder, event="done", passed=passed)
    return 0 if passed else EXIT_FAILED


def _take_over_output(folder: Path) -> None:
    """File descriptors 1 and 2 go to this rank's output.log; standard input is empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)


def _arm_stack_dumps(folder: Path) -> None:
    """faulthandler in C, so that it answers while C++ holds the GIL; one file a rank that stays open."""
    stacks = (folder / "stacks.txt").open("w", encoding="utf-8")
    faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True, chain=False)
    fatal = (folder / "fatal.txt").open("w", encoding="utf-8")
    faulthandler.enable(file=fatal, all_threads=True)
    _kept_open.extend((stacks, fatal))


def _listen_to_traces(folder: Path) -> None:
    """What the tracers say, through the logger ``nsa.trace``, goes to the output and to ``traces.log`` as it is said."""
    log = logging.getLogger("nsa.trace")
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in (
        logging.StreamHandler(sys.__stdout__),
        logging.FileHandler(folder / "traces.log", encoding="utf-8"),
    ):
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)


def _launcher_variables(number: int, job: Job) -> dict[str, str]:
    return {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def _tame_environment(job: Job) -> list[str]:
    """Settings that would take the rank down; each is changed for the rank alone, and said."""
    notes = []
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL" and job.backend == "gloo":
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
        notes.append(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DDP on gloo (SIGSEGV, seen with torch 2.13); the ranks use INFO instead"
        )
    elif not os.environ.get("TORCH_DISTRIBUTED_DEBUG"):
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"  # DDP's errors then name parameters, not indices
    return notes


def _join_group(ctx: RankContext) -> None:
    import torch.distributed as dist

    job = ctx.job
    dist.set_debug_level_from_env()
    store = dist.FileStore(str(Path(job.folder) / "store"), job.world_size)
    dist.init_process_group(
        job.backend,
        store=store,
        rank=ctx.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.group_timeout),
    )


def _run_function(ctx: RankContext, function: Callable[..., Any]) -> bool:
    from pytest_nsa.fixtures import by_name

    available = {**by_name(ctx), **ctx.job.arguments}
    wanted = inspect.signature(function).parameters
    try:
        function(**{name: available[name] for name in wanted if name in available})
    except pytest.skip.Exception as skip:
        _record(ctx.folder, event="skipped", reason=str(skip))
    except (Exception, pytest.fail.Exception) as error:
        record_exception(ctx.folder, error, "call")
        traceback.print_exc()
        return False
    return True


def _run_item(ctx: RankContext, item: pytest.Item) -> bool:
    config = item.config
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        # Output belongs in this rank's file as it is written, not in a buffer that dies with the rank.
        # The old capture is kept alive: closing it would write to files that the zygote shares.
        ctx.retired = capture._global_capturing
        capture._global_capturing = None
        capture._method = "no"
        capture.start_global_capturing()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if ctx.job.tmp:
        _share_temporary_folder(config, Path(ctx.job.tmp))
    config.option.runxfail = True  # the host applies xfail to the test as a whole
    for name in HOST_PLUGINS:
        config.pluginmanager.unregister(name=name)
    recorder = RankRecorder(ctx, config)
    config.pluginmanager.register(recorder, "nsa-rank-recorder")
    # The whole protocol, not its three phases alone: assertion messages and warning filters hang on it.
    item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
    return recorder.passed


def _share_temporary_folder(config: pytest.Config, base: Path) -> None:
    """tmp_path is the same folder on all ranks; numbering it, as pytest does, would race between them."""
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = base
    factory._retention_policy = "all"  # no rank may delete what another still uses

    def mktemp(basename: str, numbered: bool = True) -> Path:
        folder = base / basename
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    factory.mktemp = mktemp


class RankRecorder:
    """Writes down each exception and report of the test the moment it is known, before teardown can hang."""

    def __init__(self, ctx: RankContext, config: pytest.Config) -> None:
        self.ctx, self.config = ctx, config
        self.passed = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        if call.excinfo is not None:
            error = call.excinfo.value
            if isinstance(error, pytest.skip.Exception):
                _record(self.ctx.folder, event="skipped", reason=str(error.msg))
            elif isinstance(error, pytest.xfail.Exception):
                _record(self.ctx.folder, event="xfailed", reason=str(error.msg))
            else:
                record_exception(self.ctx.folder, error, call.when)
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        append_line(self.ctx.folder / "reports.jsonl", {"text": str(report.longreprtext)[:MAX_TEXT], "report": data})
        self.passed = self.passed and not report.failed

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        w = warning_message
        print(f"{w.filename}:{w.lineno}: {w.category.__name__}: {w.message}", file=sys.stderr)


def record_exception(folder: Path, error: BaseException, when: str) -> None:
    """Append an exception with the innermost line of the user's code."""
    from nsa.trace.frames import is_user_file

    frames = traceback.extract_tb(error.__traceback__)
    chain: list[tuple[str, str]] = []
    cause = error.__cause__ or error.__context__
    while cause is not None and len(chain) < MAX_CHAIN:
        inner = traceback.extract_tb(cause.__traceback__)
        chain.append((str(cause)[:MAX_TEXT], inner[-1].filename if inner else ""))
        cause = cause.__cause__ or cause.__context__
    place = next((f for f in reversed(frames) if is_user_file(f.filename)), frames[-1] if frames else None)
    _record(
        folder,
        event="exception",
        when=when,
        type=type(error).__name__,
        module=type(error).__module__,
        message=str(error)[:MAX_TEXT],
        file=place.filename if place else "",
        line=place.lineno if place else 0,
        function=place.name if place else "",
        raised_in=frames[-1].filename if frames else "",
        chain=chain,
    )


def _record(folder: Path, **event: Any) -> None:
    append_line(folder / "events.jsonl", {"time": time.time(), **event})
