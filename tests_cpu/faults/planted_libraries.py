"""Programs of Lightning, Fabric, accelerate, transformers and torchmetrics. Each needs its library where it is run live."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests_cpu.faults.planting import planted


def loader(rows: int = 32) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(rows, 4)), batch_size=4)


def fit(*callbacks: Any, rows: int = 32, step: Any = None, **options: Any) -> None:
    """Fit a linear layer by Lightning's Trainer in the group that is there; ``step`` is called in each training step."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).square().mean()
            if step is not None:
                step(self, loss, index)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", max_epochs=1, logger=False,
        enable_progress_bar=False, default_root_dir=tempfile.mkdtemp(), enable_model_summary=False,
        enable_checkpointing=False, use_distributed_sampler=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(Module(), loader(rows))


@planted("extra_collective", [0], marked=True, needs="lightning", family="extra", origin="libraries")
def test_a_lightning_callback_that_only_rank_0_has(group):
    import lightning

    class Report(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.is_global_zero and batch_idx == 3:
                trainer.strategy.barrier("report")  # HERE

    fit(Report())


@planted("extra_collective", [1], n=3, marked=True, needs="lightning", family="extra", origin="libraries")
def test_lightning_logs_over_ranks_where_one_loss_is_large(group):
    def step(module, loss, index):
        if index == 4 and module.global_rank == 1:
            module.log("large", loss, sync_dist=True, on_step=True)  # HERE

    fit(step=step)


@planted("extra_collective", [0], n=2, marked=True, needs="lightning", family="extra", origin="libraries")
def test_lightning_saves_on_rank_0_alone(group):
    import lightning

    class Save(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2 and trainer.is_global_zero:
                trainer.save_checkpoint(os.path.join(trainer.default_root_dir, "best.ckpt"))  # HERE

    fit(Save())


@planted("extra_collective", [0], n=2, marked=True, needs="lightning", family="extra", origin="libraries")
def test_fabric_averages_on_rank_0_alone(group):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    module = nn.Linear(4, 1)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    for step in range(6):
        loss = model(torch.randn(8, 4)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and fabric.is_global_zero:
            print("loss", fabric.all_reduce(loss.detach()))  # HERE


def accelerated(rows: int = 32) -> Any:
    from accelerate import Accelerator

    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader(rows))


@planted("extra_collective", [0], n=2, marked=True, needs="accelerate", family="extra", origin="libraries")
def test_accelerate_gathers_on_the_main_process(group):
    accelerator, model, optimizer, data = accelerated(64)
    for number, (batch,) in enumerate(data):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if number == 3 and accelerator.is_main_process:
            print(accelerator.gather(loss.detach()).mean())  # HERE


@planted("extra_collective", [1], n=2, marked=True, needs="torchmetrics", family="extra", origin="libraries")
def test_a_metric_is_computed_on_one_rank(group):
    from torchmetrics.classification import MulticlassAccuracy

    metric = MulticlassAccuracy(num_classes=4, average="micro")
    for step in range(5):
        metric.update(torch.arange(4), torch.arange(4))
        loss = torch.ones(1)
        dist.all_reduce(loss)
        if step == 3 and group.rank == 1:
            print(metric.compute())  # HERE
    dist.barrier()


@planted("extra_collective", [0], n=2, needs="transformers", family="extra", origin="libraries")
def test_a_transformers_callback_evaluates_on_rank_0(group):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Evaluate(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and state.is_world_process_zero:
                dist.barrier()  # to have the others wait until it has written its report
            return control

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
    rows = [{"input_ids": (row := torch.randint(0, 32, (8,))), "labels": row} for _ in range(32)]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=6, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Evaluate()]).train()


@planted("skipped_collective", [2], n=3, needs="lightning", family="skip", origin="libraries")
def test_lightning_has_less_data_on_one_rank(group):
    fit(rows=20 if group.rank == 2 else 32)


@planted("skipped_collective", [1], n=2, needs="accelerate", family="skip", origin="libraries")
def test_accelerate_leaves_the_loop_on_one_rank(group):
    accelerator, model, optimizer, data = accelerated(64)
    for number, (batch,) in enumerate(data):
        loss = model(batch).square().mean()
        if number == 3 and accelerator.process_index == 1:
            break  # its loss was no number
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()


@planted("skipped_collective", [2], n=3, needs="accelerate", family="skip", origin="libraries")
def test_accelerate_waits_for_everyone_but_one(group):
    accelerator, model, optimizer, data = accelerated(96)
    for (batch,) in data:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.process_index != 2:
        accelerator.wait_for_everyone()
    accelerator.gather(torch.ones(1))
