"""What a scenario asserts beyond its losses: correct gradients, flat memory, gates that are alive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from nsa.data import Batch
    from nsa.training.trainer import StepResult, Trainer

TOLERANCE = 1e-5  # of the largest gradient of a tensor: sums in another order
MAX_GROWTH_MIB = 4.0  # per hundred steps
ALIVE = 0.02  # the mean of a gate that is alive is above it
PLANNED_STEPS = 50_000


def mean_gradients(trainer: Trainer, batches: list[Batch]) -> list[torch.Tensor]:
    """Return what this step's gradients must be: without activation checkpointing and DDP, averaged over all ranks, clipped."""
    module = trainer.module
    recompute, module.checkpoint = module.checkpoint, None
    wrapped, trainer.model = trainer.model, module
    loss = sum(trainer.loss(batch) for batch in batches) / len(batches)
    gradients = list(torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad]))
    module.checkpoint, trainer.model = recompute, wrapped
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return _clipped(trainer, gradients)


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
        assert parameter.grad is not None
        error = (parameter.grad - gradient).abs().max() / gradient.abs().max().clamp(min=1e-12)
        assert error < tolerated or gradient.abs().max() < 1e-9, f"{name}: off by {error:.1e} of its largest gradient"


def growth_mib(folder: Path, rank: int) -> float:
    """Return the MiB that a hundred steps add, by the memory dumps after the first third of the steps.

    Compared are the lowest dump of the middle third and the lowest of the last. A leak raises the lowest; a warm-up does not,
    and neither does what a step happens to hold when it is measured.
    """
    dumps = [json.loads(path.read_text()) for path in folder.glob(f"mem_step*_rank{rank}.json")]
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

    def before_step(self, batches: list[Batch]) -> None:
        """No-op."""

    def after_step(self, result: StepResult) -> None:
        """No-op."""

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


class Stability(Check):
    """The assertion that many steps leave memory flat and gates alive."""

    def __init__(self, trainer: Trainer, rank: int, uses: int) -> None:
        super().__init__(trainer, rank, uses)
        self.seconds: list[float] = []

    def after_step(self, result: StepResult) -> None:
        """Keep the figures for the end."""
        self.seconds.append(result.seconds)
        self.latest = result

    def at_the_end(self, folder: Path) -> None:
        """Assert stability, and print the hours that production's steps would take."""
        assert_stable(folder, self.rank, self.latest.gates)
        plan_ahead(self.seconds)


CHECKS: dict[str, type[Check]] = {"": Check, "gradients": Gradients, "stability": Stability}
