"""The loop of a training run: data, step, figures, checkpoint, until it is done or stopped."""

import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from nsa.config import SAFE_ENVIRONMENT, Config, ConfigError
from nsa.data.loader import Loader
from nsa.data.packing import Batch, Position, Source, batches
from nsa.kernels.dispatch import explain
from nsa.trace.environment import write_environment
from nsa.trace.stall.watchdog import Watchdog
from nsa.trace.training import trace_training
from nsa.training.checkpoint import Checkpointer, load
from nsa.training.metrics import Metrics
from nsa.training.parallel import RankInfo, choose_backend, choose_device, file_mark, join_group
from nsa.training.saved import describe, saved_in
from nsa.training.trainer import StepResult, Trainer

DONE, PREEMPTED = 0, 75  # 75: EX_TEMPFAIL of sysexits.h; the run continues if it is started again


class NotFiniteError(Exception):
    """A loss or gradient is NaN or infinite: all ranks stop the run after the same step. The message is one line."""


class Run:
    """A training on this rank, from the loader's position, or from the checkpoint ``resumed``.

    ``launcher`` is the parent process without which it stops at its next step, as for SIGTERM; 0 without one.
    """

    def __init__(
        self, config: Config, ranks: RankInfo, loader: Loader, folder: Path, resumed: Path | None, launcher: int = 0,
        validation: Source | None = None,
    ) -> None:  # fmt: skip
        self._launcher = launcher
        self.config, self.ranks, self.loader, self.folder = config, ranks, loader, folder
        served = _attention_of(config, ranks.device)  # on each rank: one that cannot be served is refused on all
        if ranks.rank == 0:
            write_environment(folder / "env.json", attention=served)
            m = config.model
            self.log(
                f"model: {m.n_layers} layers, dim {m.dim}, {m.attention} attention by the backend {served['backend']} "
                f"({served['reason']})"
            )
        try:
            self.traces = trace_training(folder, ranks.rank, ranks.world_size, config.parallel.mode.upper())
        except FileExistsError as error:
            used = str(error.strerror).partition(";")[0]  # without what else a job of NSA_TRACE_DIR can do
            raise ConfigError(
                f"--out {str(folder)!r}: {used}; give another folder, or wait until it has ended"
            ) from None
        self.trainer = Trainer(config, ranks, folder)
        if resumed is not None:
            try:
                load(resumed, config, self.trainer.model, self.trainer.optimizer, ranks.rank)
            except BaseException as error:
                self.traces.end(error)
                raise
            self.trainer.steps_done = describe(resumed).step
            self.log(f"resumed from {resumed} after step {self.trainer.steps_done}")
        self._held_out = [] if validation is None else held_out(validation, config, ranks)
        self.metrics = Metrics(folder, config) if ranks.rank == 0 else None
        self.checkpoints = Checkpointer(folder / "checkpoints", config, ranks.rank, ranks.world_size)
        self.watchdog = Watchdog(
            folder, ranks.rank, config.train.watchdog_s, self.traces.board, self.traces.parameters_missing,
            file_mark(config.parallel.mode),
        )  # fmt: skip
        self.bad_rows = 0
        self._must_stop = False

    def log(self, line: str) -> None:
        """Print a line on the terminal, on rank 0 only."""
        if self.ranks.rank == 0:
            print(f"[train] {line}", flush=True)

    def steps(self) -> int:
        """Run all steps. Return DONE, or, after SIGTERM, write a checkpoint and return PREEMPTED.

        Raises NotFiniteError.
        """
        before = signal.signal(signal.SIGTERM, self._terminated)
        try:
            return self._steps()
        finally:
            signal.signal(signal.SIGTERM, before)
            self.watchdog.close()
            self.traces.end(sys.exception())
            if self.metrics is not None:
                self.metrics.close()

    def _steps(self) -> int:
        train, every = self.config.train, self.config.checkpoint.every
        began = time.monotonic()
        first = True
        if train.compile != "none" or self.ranks.device.type == "cuda":
            self.log("the first steps compile their kernels: they take longer than those that follow")
        while self.trainer.steps_done < train.steps:
            self.watchdog.feed()
            self.traces.board.phase("data")
            batches = [self.loader.take() for _ in range(train.accumulation)]
            if first:
                self.log(f"first batch after {time.monotonic() - began:.2f} s")
                first = False
            self._note_bad_rows(batches[-1].position.bad_rows)
            self.trainer.step(batches, self._must_stop or self._has_lost_launcher)
            step = self.trainer.steps_done
            due = bool(every) and (step % every == 0 or step == train.steps)
            is_last = step == train.steps
            validates = bool(self._held_out) and (step % self.config.data.validate_every == 0 or is_last)
            reads = due or validates or step % train.log_every == 0 or is_last
            stop = reads and self._report(validates=validates)
            if due or stop:
                state = self.trainer.model, self.trainer.optimizer, batches[-1].position
                saved = self.checkpoints.save(step, *state)
                self.log(f"saved {saved}")
            if due:
                self.trainer.start_clock()
            if stop:
                why = "as its launcher has ended" if self._has_lost_launcher else "as SIGTERM asked"
                self.log(f"stopped after step {step}, {why}: go on with --resume auto --out {self.folder}")
                return PREEMPTED
        self.log(f"done after step {self.trainer.steps_done}; everything is in {self.folder}{os.sep}")
        return DONE

    def _report(self, *, validates: bool) -> bool:
        """Read and report the figures of the last steps; return whether a rank wants to stop.

        With the held-out loss if it ``validates``. Raises NotFiniteError if the figures end the run.
        """
        results = self.trainer.read()
        if validates:
            results[-1] = replace(results[-1], validation_loss=self.trainer.evaluate(self._held_out))
            self.trainer.start_clock()
        if self.metrics is not None:
            lines = [self.metrics.add(result) for result in results]
            self.log(lines[-1])
        for result in results:
            if not result.is_finite:
                self._refuse_odd(result)
        return any(result.stops for result in results)

    def _refuse_odd(self, result: StepResult) -> NoReturn:
        """Raise NotFiniteError for a step, with the newest checkpoint before it."""
        what = f"the loss is {result.loss}"
        if math.isfinite(result.loss):
            what = f"the loss is {result.loss:.4f}, but the norm of its gradients is {result.grad_norm}"
        before = [path for path in saved_in(self.checkpoints.folder) if describe(path).step < result.step]
        again = f"go on from {before[-1]} (--resume)" if before else "no checkpoint is before it: start again"
        raise NotFiniteError(f"step {result.step}: {what}; {again} with a lower train.lr or other data")

    def _note_bad_rows(self, count: int) -> None:
        if count > self.bad_rows:
            self.log(f"{count} rows of the data could not be read so far, of {self.config.data.max_bad_rows} allowed")
        self.bad_rows = count

    @property
    def _has_lost_launcher(self) -> bool:
        return self._launcher != 0 and os.getppid() != self._launcher

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self._must_stop = True


def train(
    config: Config, ranks: tuple[int, int, int], out: str | None, source: Source, validation: Source | None,
    resumed: Path | None, launcher: int,
) -> int:  # fmt: skip
    """Join the group, with ``ranks`` (rank, world size, local rank), and run the steps; returns and raises as `Run.steps`."""
    rank, world_size, local_rank = ranks
    position = Position() if resumed is None else describe(resumed).position
    device = choose_device(config.train.device, local_rank)
    backend = choose_backend(config.parallel.backend, device, world_size)
    loader = Loader(config, source, position, rank, world_size)
    if config.parallel.safe:
        os.environ.update(SAFE_ENVIRONMENT)
    if config.train.threads and device.type == "cpu":
        torch.set_num_threads(config.train.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    info = RankInfo(rank=rank, world_size=world_size, device=device)
    if config.parallel.mode != "none" and world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif config.parallel.mode != "none":
        join_group(backend)
    try:
        folder = _folder(out, info)
        with traces_logged(folder, rank):
            return Run(config, info, loader, folder, resumed, launcher, validation).steps()
    finally:
        loader.close()
        if config.parallel.mode != "none":
            dist.destroy_process_group()


def _folder(out: str | None, info: RankInfo) -> Path:
    """Return the run's folder, the same on all ranks: rank 0's clock names it."""
    if out:
        folder = Path(out)
    else:
        stamp = torch.tensor([int(time.time())], device=info.device)
        if info.world_size > 1:
            dist.broadcast(stamp, src=0)
        folder = Path("artifacts") / time.strftime("train_%Y%m%d_%H%M%S", time.localtime(stamp.item()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {str(folder)!r}: cannot be made ({error.strerror}); give a folder that can be written"
        ) from None
    return folder


def held_out(source: Source, config: Config, ranks: RankInfo) -> list[Batch]:
    """Return this rank's batches of the validation set, the same in each evaluation."""
    size = config.train.batch_size
    count = -(-config.data.validation_samples // (size * ranks.world_size))
    return list(islice(batches(source, Position(), size, ranks.rank, ranks.world_size), count))


def _attention_of(config: Config, device: torch.device) -> dict[str, str]:
    """Return what serves the model's attention, and the reason. ConfigError for a backend that cannot."""
    m = config.model
    dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
    try:
        name, reason = explain(m.backend, dtype, device, m.head_dim, m.v_head_dim)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None
    return {"attention": m.attention, "backend": name, "reason": reason}


@contextlib.contextmanager
def traces_logged(folder: Path, rank: int) -> Iterator[None]:
    """Send what `nsa.trace` logs while the body runs to stdout and traces.log, not to the handlers of the process.

    From ranks above 0 these get only the buckets and the warnings, with the rank, such as a gradient that is missing on one rank.
    traces_rankN.log has all that such a rank logs.
    """
    trace_log = logging.getLogger("nsa.trace")
    before = trace_log.level, trace_log.propagate
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    try:
        handlers.append(_TraceFile(folder / "traces.log", encoding="utf-8"))
        for handler in handlers:
            handler.setFormatter(logging.Formatter("%(message)s") if rank == 0 else _OfRank(rank))
            if rank != 0:
                handler.addFilter(lambda record: record.levelno >= logging.WARNING or _names_its_rank(record))
        if rank != 0:
            handlers.append(_TraceFile(folder / f"traces_rank{rank}.log", encoding="utf-8"))
        trace_log.setLevel(logging.INFO)
        trace_log.propagate = False
        for handler in handlers:
            trace_log.addHandler(handler)
        yield
    finally:
        trace_log.setLevel(before[0])
        trace_log.propagate = before[1]
        for handler in handlers:
            trace_log.removeHandler(handler)
            handler.close()


def _names_its_rank(record: logging.LogRecord) -> bool:
    return record.getMessage().startswith("[DDP] rank=")


class _TraceFile(logging.FileHandler):
    """A log file that ignores a full disk, for which logging would print a stack per line. Closing it raises then."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a line that cannot be written to the disk."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _OfRank(logging.Formatter):
    """Puts the rank before lines that do not name it."""

    def __init__(self, rank: int) -> None:
        super().__init__("%(message)s")
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if _names_its_rank(record) else f"[rank {self.rank}] {line}"
