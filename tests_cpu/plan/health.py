"""What a scenario asserts beyond its losses: correct gradients, flat memory, gates that are alive, production's criteria."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from nsa.model.activation_checkpoint import CheckpointRange
from nsa.trace.inplace import watched
from nsa.training.parallel import file_mark
from tests_cpu.plan.readiness import MAX_GPU_BYTES, MIN_TOKENS_PER_S

if TYPE_CHECKING:
    from nsa.data import Batch
    from nsa.training.trainer import StepResult, Trainer

TOLERANCE = 1e-5  # of the largest gradient of a tensor: sums in another order
MAX_GROWTH_MIB = 4.0  # per hundred steps
ALIVE = 0.02  # the mean of a gate that is alive is above it
PLANNED_STEPS = 50_000
MAX_WAIT_FOR_DATA = 0.1  # of the time of a step


def mean_gradients(trainer: Trainer, batches: list[Batch]) -> list[torch.Tensor]:
    """Return what this step's gradients must be: without activation checkpointing and DDP, averaged over all ranks, clipped."""
    gradients = own_gradients(trainer, batches, None)
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return _clipped(trainer, gradients)


def own_gradients(trainer: Trainer, batches: list[Batch], checkpoint: CheckpointRange | None) -> list[torch.Tensor]:
    """Return this rank's gradients of ``batches``, without DDP, and checkpointed as named; the step does not see them."""
    module = trainer.module
    before, module.checkpoint = module.checkpoint, checkpoint
    wrapped, trainer.model = trainer.model, module
    loss = sum(trainer.loss(batch) for batch in batches) / len(batches)
    trained = [p for p in module.parameters() if p.requires_grad]
    if checkpoint is not None and checkpoint.reentrant:
        # torch.autograd.grad refuses it; there is no DDP in one process.
        kept = [p.grad for p in trained]
        for p in trained:
            p.grad = None
        loss.backward()
        gradients = [p.grad for p in trained]
        for p, gradient in zip(trained, kept, strict=True):
            p.grad = gradient
    else:
        gradients = list(torch.autograd.grad(loss, trained, allow_unused=True))
    module.checkpoint, trainer.model = before, wrapped
    # That one is missing is what the step's own trace reports.
    return [torch.zeros_like(p) if g is None else g for p, g in zip(trained, gradients, strict=True)]


def _clipped(trainer: Trainer, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    norm = torch.stack([g.norm() for g in gradients]).norm()
    return [g * min(1.0, trainer.config.train.grad_clip / (float(norm) + 1e-6)) for g in gradients]


def tolerance(dtype: str, uses: int) -> float:
    """Return the error that a gradient may have, relative to the largest of its tensor.

    Sums are in float32, in another order. Where products are in bfloat16 and a parameter is used several times, the gradient of
    each use is rounded to bfloat16, by half its epsilon at most; another path adds these gradients in another order.
    """
    return TOLERANCE if dtype == "fp32" or uses == 1 else uses * torch.finfo(torch.bfloat16).eps / 2


def assert_gradients(module: torch.nn.Module, expected: list[torch.Tensor], tolerated: float) -> None:
    """Assert that each gradient is the expected one, within ``tolerated`` times the largest of its tensor."""
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    for (name, parameter), gradient in zip(trained, expected, strict=True):
        assert parameter.grad is not None, f"{name}: no gradient"
        assert_close(name, parameter.grad, gradient, tolerated)


def assert_close(name: str, gradient: torch.Tensor, expected: torch.Tensor, tolerated: float) -> None:
    """Assert that one gradient is off by less than ``tolerated`` times the largest of ``expected``."""
    error = _off_by(gradient, expected)
    assert error < tolerated, f"{name}: off by {error:.1e} of its largest gradient"


def _off_by(gradient: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest of ``expected``; 0 where that is next to nothing."""
    largest = expected.abs().max()
    return float((gradient - expected).abs().max() / largest) if largest >= 1e-9 else 0.0


def growth_mib(folder: Path, rank: int) -> float:
    """Return the MiB that a hundred steps add, by the memory dumps after the first third of the steps.

    Compared are the lowest dump of the middle third and the lowest of the last. A leak raises the lowest; a warm-up does not,
    and neither does what a step happens to hold when it is measured.
    """
    dumps = [json.loads(path.read_text()) for path in folder.glob(f"mem*_step*_rank{rank}.json")]
    points = sorted((d["step"], d.get("cuda_allocated_mib", d["rss_mib"])) for d in dumps)
    third = len(points) // 3
    middle, last = points[third : 2 * third], points[-third:]
    steps = (sum(step for step, _ in last) - sum(step for step, _ in middle)) / third
    return float(min(size for _, size in last) - min(size for _, size in middle)) / steps * 100


def assert_stable(folder: Path, rank: int, gates: dict[str, float]) -> None:
    """Assert that memory is flat, and that no branch's gate has died."""
    growth = growth_mib(folder, rank)
    assert growth < MAX_GROWTH_MIB, f"memory grows by {growth:.1f} MiB in a hundred steps"
    assert all(mean > ALIVE for mean in gates.values()), f"a gate has died: {gates}"


def plan_ahead(seconds: list[float]) -> None:
    """Print the hours that `PLANNED_STEPS` would take, by the median of the second half, and the spread over its tenths."""
    later = torch.tensor(seconds[len(seconds) // 2 :])
    parts = [part.median().item() for part in later.chunk(10)]
    hours = PLANNED_STEPS / 3600
    print(
        f"{PLANNED_STEPS:,} steps would take {later.median().item() * hours:.2f} h "
        f"({min(parts) * hours:.2f} to {max(parts) * hours:.2f}, by the tenths of {len(later)} steps)",
        flush=True,
    )


class Check:
    """The assertions of a scenario beyond the arrival of every gradient. This class has none."""

    def __init__(self, trainer: Trainer, rank: int, uses: int) -> None:
        self.trainer, self.rank, self.uses = trainer, rank, uses
        self.results: list[StepResult] = []
        self.waits: list[float] = []  # seconds for each step's data, as `running.run` adds them

    def before_step(self, batches: list[Batch]) -> None:
        """No-op."""

    def after_step(self, result: StepResult) -> None:
        """Keep it for the end."""
        self.results.append(result)

    def at_the_end(self, folder: Path) -> None:
        """No-op."""


class Gradients(Check):
    """The assertion that the gradients of each step are those of one process."""

    def before_step(self, batches: list[Batch]) -> None:
        """Compute what the gradients must be."""
        self.expected = mean_gradients(self.trainer, batches)

    def after_step(self, result: StepResult) -> None:
        """Compare the gradients."""
        assert_gradients(self.trainer.module, self.expected, tolerance(self.trainer.config.train.dtype, self.uses))


class Boundaries(Check):
    """The assertion that checkpointing any one layer leaves every gradient as it is without."""

    def before_step(self, batches: list[Batch]) -> None:
        """Compute the gradients without checkpointing, and with each layer's."""
        module, reentrant = self.trainer.module, self.trainer.config.train.gc_reentrant
        expected = own_gradients(self.trainer, batches, None)
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        for layer in range(len(module.blocks)):
            alone = CheckpointRange(start=layer, end=layer + 1, reentrant=reentrant)
            for name, gradient, right in zip(names, own_gradients(self.trainer, batches, alone), expected, strict=True):
                assert_close(f"layer {layer} checkpointed alone: {name}", gradient, right, TOLERANCE)


class InPlace(Check):
    """The assertion that no block writes into what was there before it: its input, a parameter, a buffer."""

    def before_step(self, batches: list[Batch]) -> None:
        """Run forward, and backward with what is recomputed, and name each write."""
        module = self.trainer.module
        with watched(module, list(module.blocks)) as found:
            own_gradients(self.trainer, batches, module.checkpoint)
        assert not found, "; ".join(dict.fromkeys(map(str, found)))


class Buckets(Check):
    """The assertion that DDP's buckets are as small as the row asks; DDP builds them anew after the first step."""

    def at_the_end(self, folder: Path) -> None:
        """Compare their sizes with the limit: a bucket is closed by the tensor that reaches it."""
        logged = self.trainer.model._get_ddp_logging_data()
        sizes = [int(size) for size in logged["rebuilt_bucket_sizes"].split(",")]  # in bytes
        limit = self.trainer.config.parallel.bucket_cap_mb * (1 << 20)
        largest = max(p.nbytes for p in self.trainer.module.parameters())
        print(f"{len(sizes)} buckets, the largest of {max(sizes) / 1e6:.2f} MB", flush=True)
        assert len(sizes) > 1
        assert max(sizes) <= limit + largest, f"a bucket of {max(sizes)} bytes, where {limit:.0f} was asked for"


class HeededByNccl(Check):
    """The assertion that NCCL has read the variables that the row sets."""

    def at_the_end(self, folder: Path) -> None:
        """Look for its own line, which NCCL_DEBUG=INFO has made it print."""
        output = (folder / f"rank{self.rank}" / "output.log").read_text(encoding="utf-8", errors="replace")
        assert "NCCL_P2P_DISABLE set by environment to 1" in output, "NCCL does not tell that it heeds NCCL_P2P_DISABLE"


class Criteria(Check):
    """Production's criteria: memory below 30 GB a rank with checkpointing, more than 50 tokens a second; asserted on a GPU."""

    def at_the_end(self, folder: Path) -> None:
        """Print both, and compare them where they are of production's size."""
        rates = [result.tokens / max(result.seconds, 1e-9) for result in self.results]
        rate, peak = statistics.median(rates[1:] or rates), self.results[-1].peak_mib * (1 << 20)
        on_gpu = self.trainer.ranks.device.type == "cuda"
        print(
            f"peak {peak / 1e9:.2f} GB, {rate:,.0f} tokens/s; criteria{'' if on_gpu else ' on a GPU'}: below "
            f"{MAX_GPU_BYTES / 1e9:.0f} GB, above {MIN_TOKENS_PER_S} tokens/s",
            flush=True,
        )
        if on_gpu:
            assert peak < MAX_GPU_BYTES, (
                f"a rank takes {peak / 1e9:.1f} GB, where {MAX_GPU_BYTES / 1e9:.0f} are allowed"
            )
            assert rate > MIN_TOKENS_PER_S, f"{rate:,.0f} tokens/s, where more than {MIN_TOKENS_PER_S} are needed"


class Stability(Criteria):
    """The assertion that many steps leave memory flat and gates alive, within production's criteria."""

    def at_the_end(self, folder: Path) -> None:
        """Assert stability and the criteria, and print the hours that production's steps would take."""
        super().at_the_end(folder)
        assert_stable(folder, self.rank, self.results[-1].gates)
        plan_ahead([result.seconds for result in self.results])


class Diagnosed(Stability):
    """The assertion that a training with all traces leaves the files of each."""

    def at_the_end(self, folder: Path) -> None:
        """Look for them, and into them."""
        super().at_the_end(folder)
        mark, last, every = (
            file_mark(self.trainer.config.parallel.mode),
            self.results[-1].step,
            self.trainer.config.trace.mem_dump_every,
        )
        names = [f"rank{self.rank}/traces.log", f"rank{self.rank}/board.bin", f"heartbeat_rank{self.rank}.jsonl"]
        names += [
            f"mem{mark}_{moment}_rank{self.rank}.{kind}"
            for moment in ("boot", f"step{every}", f"step{last}")
            for kind in ("json", "txt")
        ]
        if self.rank == 0:
            names += ["metrics.jsonl", "gate_health.jsonl", f"k_stats{mark}.csv", f"fallback_counters{mark}.csv"]
            names += [f"dtypes_report{mark}.txt"]
        assert_written(folder, names)
        traces = (folder / f"rank{self.rank}" / "traces.log").read_text(encoding="utf-8")
        for step in (1, last):
            assert f"[GRAD-TRACE] after_backward_step{step} arrived=" in traces, (
                f"traces.log has no gradients of step {step}"
            )
            assert f"[MODULE-BWD] step={step} reached=" in traces, f"traces.log has no modules of step {step}"


def assert_written(folder: Path, names: list[str]) -> None:
    """Assert that each of these files is there and not empty."""
    lacking = [name for name in names if not (folder / name).is_file() or not (folder / name).stat().st_size]
    assert not lacking, f"not written, or empty: {', '.join(lacking)}"


class Data(Check):
    """The assertion that the model does not wait for its data once the first batch is there."""

    def at_the_end(self, folder: Path) -> None:
        """Compare what was waited with what the steps took: both of this run, so that a slow machine changes nothing."""
        waited, took = statistics.median(self.waits[1:]), statistics.median(r.seconds for r in self.results[1:])
        print(f"waits {1e3 * waited:.1f} ms of a step's {1e3 * took:.1f} ms for its data", flush=True)
        assert waited < MAX_WAIT_FOR_DATA * took, f"{waited / took:.0%} of a step is spent waiting for data"


CHECKS: dict[str, type[Check]] = {
    "": Check, "gradients": Gradients, "boundaries": Boundaries, "inplace": InPlace, "buckets": Buckets, "nccl": HeededByNccl,
    "criteria": Criteria, "stability": Stability, "diagnosed": Diagnosed, "data": Data,
}  # fmt: skip
