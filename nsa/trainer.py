"""One training step and all it needs: model, parallelism, optimizer, schedule and the traces a run asked for."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nsa.config import Config
from nsa.model import build_model
from nsa.parallel import RankInfo, wrap_ddp, wrap_fsdp
from nsa.trace import logger, memory
from nsa.trace.ddp_buckets import BucketTrace
from nsa.trace.gradients import GradientTrace
from nsa.trace.module_backward import ModuleBackwardTrace
from nsa.trace.statistics import GateStatistics, SelectionStatistics, write_dtypes, write_fallbacks


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step did. ``loss`` is the mean over ranks, in nats a token; ``tokens`` counts all ranks."""

    step: int
    loss: float
    lr: float
    tokens: int
    seconds: float
    peak_mib: float
    gates: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Builds the model of ``config`` on ``ranks.device`` and trains it, a call of `step` at a time.

    Traces and statistics are written to ``folder``. With more than one rank a process group must exist.
    """

    def __init__(self, config: Config, ranks: RankInfo, folder: Path, model: nn.Module | None = None) -> None:
        self.config, self.ranks, self.folder = config, ranks, folder
        self.steps_done = 0
        torch.manual_seed(config.train.seed)  # the same start on every rank
        self.module = (model or build_model(config)).to(ranks.device)
        self.gates = GateStatistics(self.module)
        self.selection = SelectionStatistics(self.module)
        self.model = self._parallel(self.module)  # FSDP replaces the parameters: hooks come after it
        self.gradients = GradientTrace(self.module) if config.trace.grads else None
        if self.gradients:
            logger.info("[trace] grad-arrival hooks registered")
        self.modules = ModuleBackwardTrace(self.module) if config.trace.module_bwd else None
        if self.modules:
            logger.info("[trace] module backward hooks registered")
        self.buckets = BucketTrace(ranks.rank) if config.trace.ddp_buckets else None
        if self.buckets and isinstance(self.model, DistributedDataParallel):
            self.buckets.attach(self.model)
        decayed = [p for p in self.module.parameters() if p.ndim > 1]
        plain = [p for p in self.module.parameters() if p.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": config.train.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.train.lr, betas=(0.9, 0.95))
        folder.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:
            write_dtypes(folder / "dtypes_report.txt", self.module)

    def _parallel(self, module: nn.Module) -> nn.Module:
        options, train = self.config.parallel, self.config.train
        if options.mode == "ddp":
            return wrap_ddp(module, options, self.ranks.device)
        if options.mode == "fsdp":
            return wrap_fsdp(module, options, self.ranks.device, bf16=train.dtype == "bf16")
        return module

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine from lr to min_lr over the planned steps. ``step`` counts from 1."""
        train = self.config.train
        if step <= train.warmup_steps:
            return train.lr * step / train.warmup_steps
        done = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
        return train.min_lr + (train.lr - train.min_lr) * 0.5 * (1 + math.cos(math.pi * done))

    def step(self, batches: list[torch.Tensor]) -> StepResult:
        """Train on ``batches``, one a micro-step, each int64 [B, S + 1] on CPU; gradients are averaged over all."""
        started = time.monotonic()
        number = self.steps_done + 1
        wants_statistics = number == 1 or number % max(1, self.config.trace.stats_every) == 0
        self.selection.listen(wants_statistics)
        if self.modules:
            self.modules.reset(number)
        if self.gradients:
            self.gradients.reset()
        lr = self.learning_rate(number)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.ranks.device)
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with self._synchronise(last):
                loss = self.loss(batch.to(self.ranks.device, non_blocking=True))
                (loss / len(batches)).backward()
            total += loss.detach() / len(batches)
        self._report_traces(number)
        if self.config.train.grad_clip > 0:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.config.train.grad_clip)
        self.optimizer.step()
        mean = self.mean_over_ranks(total)
        self.steps_done = number
        self._write_statistics(number, wants_statistics)
        tokens = sum(b.shape[0] * (b.shape[1] - 1) for b in batches) * self.ranks.world_size
        return StepResult(
            step=number, loss=mean, lr=lr, tokens=tokens, seconds=time.monotonic() - started,
            peak_mib=memory.peak_mib(), gates=self.gates.means(),
        )  # fmt: skip

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of batch[:, 1:] given batch[:, :-1]; batch int64 [B, S + 1] on the device."""
        inputs, targets = batch[:, :-1], batch[:, 1:]
        if self.steps_done == 0 and self.ranks.rank == 0:
            logger.info("[debug] step 1: input shape %s, seq_len %d", inputs.shape, inputs.shape[1])
        bf16 = self.config.train.dtype == "bf16" and self.config.parallel.mode != "fsdp"
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=bf16):
            logits = self.model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def mean_over_ranks(self, value: torch.Tensor) -> float:
        """The mean of a scalar over all ranks; a collective when there are several."""
        if self.ranks.world_size > 1:
            dist.all_reduce(value)
            value = value / self.ranks.world_size
        return value.item()

    def _synchronise(self, last: bool) -> AbstractContextManager[None]:
        # DDP reduces in the last micro-step only; what came before is summed locally.
        if not last and isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    def _report_traces(self, step: int) -> None:
        if self.gradients:
            self.gradients.report(step, self.folder / "all_missing_params.txt")
        if self.modules:
            self.modules.report(step)

    def _write_statistics(self, step: int, wanted: bool) -> None:
        every = self.config.trace.mem_dump_every
        if every and step % every == 0:
            memory.dump(self.folder, step, self.ranks.rank)
        if wanted and self.ranks.rank == 0:
            suffix = "_fsdp" if self.config.parallel.mode == "fsdp" else ""
            self.gates.write(self.folder / "gate_health.jsonl", step)
            self.selection.write(self.folder / f"k_stats{suffix}.csv", step)
            write_fallbacks(self.folder / "fallback_counters.csv")
