"""What users of libraries do on two ranks: a function is run under torchrun, by this file's main, and as a ranked test's body."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SCRIPTS = "accelerate.test_utils.scripts"


def accelerate_script(name: str) -> None:
    """Run one of the scripts that accelerate ships as its own tests of a launch."""
    sys.argv = [name]
    importlib.import_module(f"{SCRIPTS}.{name}").main()


def accelerate_training() -> None:
    """Train with gradient accumulation and a loader that accelerate shards."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(4, 1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    for (batch,) in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
    assert torch.equal(weights[:1], weights[1:2])
    accelerator.wait_for_everyone()


def fabric_training() -> None:
    """Train by Lightning's Fabric in the group that is there."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist_size(), strategy="ddp")
    fabric.launch()
    module = nn.Linear(4, 1)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    for _ in range(3):
        fabric.backward(model(torch.randn(8, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert fabric.world_size == 2
    fabric.barrier()


def lightning_trainer() -> None:
    """Fit a LightningModule for an epoch, with validation and a checkpoint."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).square().mean()
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("loss", self.layer(batch[0]).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=dist_size(), strategy="ddp", max_epochs=1, logger=False, enable_progress_bar=False,
        default_root_dir=tempfile.mkdtemp(), enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), data, data)
    assert trainer.global_step == 4, trainer.global_step


def torchmetrics_accuracy() -> None:
    """Compute a metric over both ranks' halves."""
    from torchmetrics.classification import MulticlassAccuracy

    metric = MulticlassAccuracy(num_classes=4, average="micro")
    target = torch.arange(8) % 4
    mine = slice(dist.get_rank(), None, 2)
    metric.update(torch.where(torch.arange(8) < 6, target, (target + 1) % 4)[mine], target[mine])
    assert metric.compute().item() == 0.75


def torchmetrics_uneven() -> None:
    """Gather lists of states that have another length on each rank."""
    from torchmetrics.aggregation import CatMetric

    metric = CatMetric()
    metric.update(torch.arange(1.0 + dist.get_rank()))
    assert metric.compute().numel() == 3


def transformers_trainer() -> None:
    """Train a tiny model for four steps by transformers' Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
    rows = [{"input_ids": [i % 32] * 8, "labels": [i % 32] * 8} for i in range(32)]
    folder = str(Path(tempfile.mkdtemp()))
    arguments = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    assert Trainer(model, arguments, train_dataset=rows).train().global_step == 4  # type: ignore[arg-type]


def dist_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 2


BODIES = (
    accelerate_training,
    fabric_training,
    lightning_trainer,
    torchmetrics_accuracy,
    torchmetrics_uneven,
    transformers_trainer,
)
SHIPPED = ("test_ops", "test_sync", "test_script")

if __name__ == "__main__":
    wanted = sys.argv[1]
    dist.init_process_group("gloo")
    if wanted in SHIPPED:
        accelerate_script(wanted)
    else:
        next(body for body in BODIES if body.__name__ == wanted)()
    if dist.is_initialized():
        dist.destroy_process_group()
