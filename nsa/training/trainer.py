"""One training step and all it needs: model, parallelism, optimizer, schedule and the traces that a run requests."""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nsa.config import Config, ConfigError
from nsa.data.packing import Batch
from nsa.model.transformer import build_model
from nsa.trace import logger, memory
from nsa.trace.ddp_buckets import BucketTrace
from nsa.trace.gradients import GradientTrace
from nsa.trace.module_backward import ModuleBackwardTrace
from nsa.training.parallel import RankInfo, accumulating, average_gradients, describe_dtypes, file_mark, share
from nsa.training.statistics import GateStatistics, SelectionStatistics, write_dtypes, write_fallbacks


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of a step. ``loss`` is the mean over ranks, in nats per token; ``tokens`` counts all ranks.

    ``grad_norm``: L2 norm of the averaged gradients before they are clipped.
    ``validation_loss``: the held-out loss after the step, where it was evaluated. ``stops``: a rank wants to stop after the step.
    ``seconds`` include the wait for data, and are the mean if several steps were read at once.
    """

    step: int
    loss: float
    lr: float
    tokens: int
    seconds: float
    peak_mib: float
    grad_norm: float = 0.0
    validation_loss: float | None = None
    gates: dict[str, float] = field(default_factory=dict)
    stops: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether loss and norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True)
class _Unread:
    """A step with figures that are still on the device."""

    step: int
    figures: torch.Tensor  # float32, summed over ranks: loss, square of the gradients' norm, ranks that want to stop
    lr: float
    tokens: int


class Trainer:
    """Builds the model of ``config`` on ``ranks.device`` and trains it, one step per call of `step`.

    Traces and statistics are written to ``folder``. With more than one rank a process group must exist. ``model`` replaces the
    model that would be built; it must return the loss when it is called with ``targets``, as `NSATransformer` does.
    """

    def __init__(self, config: Config, ranks: RankInfo, folder: Path, model: nn.Module | None = None) -> None:
        self.config, self.ranks, self.folder = config, ranks, folder
        self.steps_done = 0
        torch.manual_seed(config.train.seed)  # the same start on every rank
        self.module = (model or build_model(config, ranks.device)).to(ranks.device)
        self.gates = GateStatistics(self.module)
        self.selection = SelectionStatistics(self.module)
        if config.train.compile == "blocks":
            for block in getattr(self.module, "blocks", ()):
                block.compile()
        bf16 = config.train.dtype == "bf16"
        self.model = share(self.module, config.parallel, ranks.device, bf16=bf16)
        # FSDP has replaced the parameters, so hooks are registered after it.
        self.gradients = GradientTrace(self.module) if config.trace.grads else None
        if self.gradients:
            logger.info("[trace] grad-arrival hooks registered")
        self.modules = ModuleBackwardTrace(self.module) if config.trace.module_bwd else None
        if self.modules:
            logger.info("[trace] module backward hooks registered")
        self.buckets = BucketTrace(ranks.rank) if config.trace.ddp_buckets else None
        if self.buckets and isinstance(self.model, DistributedDataParallel):
            self.buckets.attach(self.model)
        parameters = [*self.module.parameters()]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.train.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        # On a GPU one kernel updates many parameters; a CPU keeps the order of sums that its checkpoints were made with.
        on_gpu = ranks.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=config.train.lr, betas=(0.9, 0.95), fused=on_gpu or None)
        self._update = self.optimizer.step
        self._update_is_compiled = config.train.compile == "step" and not on_gpu
        if config.train.compile == "step":
            self._compile()
        self._lr = torch.tensor(config.train.lr)
        self._unread: list[_Unread] = []
        self._began = time.monotonic()
        self._mark = file_mark(config.parallel.mode)
        folder.mkdir(parents=True, exist_ok=True)
        memory.dump(folder, 0, ranks.rank, "boot", self._mark)
        if ranks.rank == 0:
            described = describe_dtypes(config.parallel.mode, bf16=bf16)
            write_dtypes(folder / f"dtypes_report{self._mark}.txt", self.module, described)

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step: a linear warm-up, then a cosine from lr to min_lr over the planned steps. From step 1 on."""
        train = self.config.train
        if step <= train.warmup_steps:
            return train.lr * step / train.warmup_steps
        done = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
        return train.min_lr + (train.lr - train.min_lr) * 0.5 * (1 + math.cos(math.pi * done))

    def step(self, batches: list[Batch], stops: bool = False) -> None:
        """Train on ``batches``, one per micro-step; gradients are averaged over all. `read` returns the results later.

        Does not wait for the device, except in steps with statistics. ``stops``: this rank wants to stop, which all ranks read
        with the result.
        """
        number = self.steps_done + 1
        every = self.config.trace.stats_every
        wants_statistics = every > 0 and (number == 1 or number % every == 0)
        is_compiled = self.config.train.compile == "step"
        self.selection.listen(wants_statistics)
        self.gates.listen(wants_statistics or not is_compiled)
        if self.modules:
            self.modules.reset(number)
        if self.gradients:
            self.gradients.reset()
        lr = self.learning_rate(number)
        self.optimizer.zero_grad(set_to_none=True)
        figures = torch.tensor([0.0, 0.0, float(stops)], device="cpu")
        if self.ranks.device.type == "cuda":  # from pinned memory, so that nothing waits
            figures = figures.pin_memory().to(self.ranks.device, non_blocking=True)
        # A step with statistics runs eagerly, as it would need a second compilation.
        stance = torch.compiler.set_stance("force_eager") if is_compiled and wants_statistics else nullcontext()
        with stance:
            for index, batch in enumerate(batches):
                with accumulating(self.model, self.config.parallel, last=index == len(batches) - 1):
                    if self.config.train.cuda_graph:
                        torch.compiler.cudagraph_mark_step_begin()
                    loss = self.loss(batch)
                    (loss / len(batches)).backward()
                figures[0] += loss.detach() / len(batches)
        self._after_backward(number)
        figures[1] = self._clip()
        self.sum_over_ranks(figures)
        self._optimize(lr)
        self.steps_done = number
        self._write_statistics(number, wants_statistics)
        tokens = sum(b.tokens.shape[0] * (b.tokens.shape[1] - 1) for b in batches) * self.ranks.world_size
        self._unread.append(_Unread(number, figures, lr, tokens))

    def read(self) -> list[StepResult]:
        """Return the results of the steps since the last call; waits for the device."""
        found = [unread.figures.tolist() for unread in self._unread]
        seconds = (time.monotonic() - self._began) / max(1, len(found))
        gates, peak, n = self.gates.means(), memory.peak_mib(), self.ranks.world_size
        results = [
            StepResult(
                step=unread.step, loss=loss / n, lr=unread.lr, tokens=unread.tokens, seconds=seconds, peak_mib=peak,
                grad_norm=math.sqrt(square), gates=gates,
                stops=stopping > 0,
            )
            for unread, (loss, square, stopping) in zip(self._unread, found, strict=True)
        ]  # fmt: skip
        self._unread = []
        self.start_clock()
        return results

    def start_clock(self) -> None:
        """Restart the clock, so that the time until now counts for no step."""
        self._began = time.monotonic()

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy, in nats, of the targets tokens[:, 1:], given the inputs tokens[:, :-1]."""
        tokens = batch.tokens.to(self.ranks.device, non_blocking=True)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self.steps_done == 0 and self.ranks.rank == 0:
            logger.info("[debug] step 1: input shape %s, seq_len %d", inputs.shape, targets.shape[1])
        bf16 = self.config.train.dtype == "bf16" and self.config.parallel.mode != "fsdp"
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=bf16):
            loss: torch.Tensor = self.model(inputs, targets=targets)
        return loss

    def evaluate(self, batches: list[Batch]) -> float:
        """Return the mean loss of ``batches`` over all ranks, without a gradient; a collective if there are several ranks."""
        self.gates.listen(False)
        self.selection.listen(False)
        is_compiled = self.config.train.compile == "step"
        self.model.eval()
        total = torch.zeros((), device=self.ranks.device)
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            for batch in batches:
                total += self.loss(batch).float()
        self.model.train()
        self.sum_over_ranks(total)
        return float(total) / (len(batches) * self.ranks.world_size)

    def sum_over_ranks(self, figures: torch.Tensor) -> None:
        """Sum ``figures`` over all ranks, in place; a collective if there are several ranks."""
        if self.ranks.world_size > 1:
            dist.all_reduce(figures)

    def _compile(self) -> None:
        from torch._dynamo import config

        if self.config.train.cuda_graph and self.ranks.device.type != "cuda":
            raise ConfigError(f"train.cuda_graph: needs a GPU, and the device is {self.ranks.device}; set it to false")
        # There the gradient of a dense model's embedding is wrong, and NSA does not compile.
        if self.ranks.device.type == "cpu" and torch.__version__ < "2.7":
            raise ConfigError(
                f"train.compile='step': inductor of torch {torch.__version__} computes wrong gradients on a CPU; set it to "
                "none, or use a later torch"
            )
        if self.config.train.gradient_checkpointing:
            if not hasattr(config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
                raise ConfigError(
                    f"train.compile='step': torch {torch.__version__} cannot recompute inside one graph; "
                    "set train.gradient_checkpointing: false, or compile: blocks"
                )
            # The side effect of a recomputed layer, its statistics, is the same the second time, so it may be skipped.
            config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        is_ddp = isinstance(self.model, DistributedDataParallel)
        # Blocks share no region (torch.compiler.nested_compile_region): inductor of torch 2.13 makes its gradients wrong.
        mode: dict[str, Any] = {"mode": "reduce-overhead"} if self.config.train.cuda_graph else {}
        self.model.compile(fullgraph=not is_ddp, **mode)
        if self._update_is_compiled:
            self._update = torch.compile(self.optimizer.step)

    def _optimize(self, lr: float) -> None:
        # A compiled update takes the rate as a tensor: for a number it would be compiled again at each change.
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr.fill_(lr) if self._update_is_compiled else lr
        self._update()
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _clip(self) -> torch.Tensor:
        """Clip the gradients; return this rank's part of the squared norm before. The parts of all ranks sum up to it."""
        limit = self.config.train.grad_clip or math.inf  # with inf, gradients are multiplied by 1
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), limit)
        is_of_share = False
        if isinstance(norm, DTensor):  # under FSDP; whether reduced over the ranks or not, by the version of torch
            is_of_share = norm.placements[0].is_partial()
            norm = norm.to_local()
        return norm.square() if is_of_share else norm.square() / self.ranks.world_size

    def _after_backward(self, step: int) -> None:
        if self.gradients:
            self.gradients.report(step, self.folder / "all_missing_params.txt", self.ranks.rank)
        if self.modules:
            self.modules.report(step)
        if self.config.parallel.mode == "average":
            average_gradients(self.module.parameters(), self.config.parallel.bucket_cap_mb)
        if self.config.parallel.barrier_after_backward and dist.is_initialized():
            dist.barrier()

    def _write_statistics(self, step: int, wanted: bool) -> None:
        every = self.config.trace.mem_dump_every
        if every and step % every == 0:
            memory.dump(self.folder, step, self.ranks.rank, f"step{step}", self._mark)
        if wanted and self.ranks.rank == 0:
            self.gates.write(self.folder / "gate_health.jsonl", step)
            self.selection.write(self.folder / f"k_stats{self._mark}.csv", step)
            write_fallbacks(self.folder / f"fallback_counters{self._mark}.csv")
