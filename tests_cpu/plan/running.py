"""How a scenario of the plan is run: in each of its ranks, as its row defines."""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nsa.config import switch
from tests_cpu.plan.scenarios import BY_VARIABLE, ROOT, ROW_DECIDES, Scenario, Size, ignored_variables, read_settings

if TYPE_CHECKING:
    from nsa.config import Config
    from pytest_nsa.fixtures import Group
    from pytest_nsa.marks import LayerRange

SAMPLE = ROOT / "examples" / "data" / "kjv.parquet"


def skip_where_it_tells_nothing(row: Scenario, group: Group, model: Any) -> None:
    """Skip a row that changes what nothing here heeds: its passing would say nothing."""
    has_buffers = next(model.buffers(), None) is not None
    is_there = {"": True, "nccl": group.backend == "nccl", "cuda": group.device != "cpu", "buffers": has_buffers}
    if not is_there[row.needs]:
        if row.needs == "buffers":
            pytest.skip("DDP broadcasts buffers before each forward, and this model has none")
        shows_more = ("_DEBUG", "_STACKTRACES")  # on any device
        names = " and ".join(name for name in row.environment if not name.endswith(shows_more))
        heeds = "NCCL" if row.needs == "nccl" else "CUDA"
        pytest.skip(f"{heeds} alone heeds {names}; this run is on {group.backend} and {group.device}")


def mitigations(row: Scenario) -> dict[str, Any]:
    """Return the fields that ``NSA_WITH_NAME=1`` adds to a scenario: those of the mitigation NAME."""
    found: dict[str, Any] = {}
    for variable, other in BY_VARIABLE.items():
        text = os.environ.get(variable, "")
        if text and switch(text, f"{variable}={text!r}") and row.num_ranks > 1:
            print(f"{variable}={text}: {', '.join(other.overrides)}", flush=True)
            found |= other.overrides | ({} if other.parallel == "ddp" else {"parallel.mode": other.parallel})
    return found


def bisected(branch: str | None, layers: LayerRange | None) -> dict[str, Any]:
    """Return the fields of the branch and of the layers that checkpoint: those that the row sets, or that a bisection tries."""
    found: dict[str, Any] = {} if branch is None else {"model.force_branch": branch}
    if layers is None:
        return found
    is_any = layers.start < layers.end
    return found | {"train.gradient_checkpointing": is_any, "train.gc_range": str(layers) if is_any else None}


def forget_exported() -> None:
    """Remove the variables of what a row decides from this rank's environment, and report that."""
    for text in ignored_variables():
        print(text, flush=True)
    for name in ROW_DECIDES:
        os.environ.pop(name, "")


def run(
    row: Scenario, size: Size, group: Group, folder: Path, fault: str | None, culprit: int, tried: dict[str, Any]
) -> None:
    """Train ``row.steps`` steps as the row defines; assert that every gradient arrived, the row's check, and that ranks agree.

    ``tried`` are fields that a bisection sets. The check "resume" is all of its row: processes of its own train.
    """
    import torch

    from nsa.config import load_config
    from nsa.data import Position, batches, open_source
    from nsa.model.transformer import build_model
    from nsa.training.metrics import Metrics
    from nsa.training.parallel import RankInfo, has_fsdp2
    from nsa.training.trainer import Trainer
    from tests_cpu.plan import faults, health
    from tests_cpu.plan.resume import kill_and_resume

    forget_exported()
    overrides = read_settings(row, size) | mitigations(row) | tried
    changed = faults.settings(
        fault, overrides["parallel.mode"], static_graph=bool(overrides.get("parallel.static_graph"))
    )
    config = load_config(ROOT / "configs" / size.config, **{**overrides, **changed})
    config = with_shipped_sample(config, folder)
    if row.check == "resume":
        kill_and_resume(ROOT / "configs" / size.config, {**overrides, **changed, "train.log_every": 1}, group, folder)
        return
    ranks = RankInfo(rank=group.rank, world_size=group.world_size, device=torch.device(group.device))
    if config.parallel.mode == "fsdp" and not has_fsdp2(ranks.device):
        pytest.skip(f"FSDP2 of torch {torch.__version__} does not run on CPU")
    torch.manual_seed(config.train.seed)
    model = build_model(config, ranks.device)
    skip_where_it_tells_nothing(row, group, model)
    if row.uses > 1:
        use_again(model, row.uses)
    trainer = Trainer(config, ranks, folder, model)
    faults.plant(fault, trainer, culprit)
    asked = time.monotonic()
    data = batches(open_source(config), Position(), config.train.batch_size, group.rank, group.world_size)
    check = health.CHECKS[row.check](trainer, group.rank, row.uses)
    trained = sum(p.requires_grad for p in trainer.module.parameters())
    told = Metrics(folder, config) if group.rank == 0 else None
    with contextlib.closing(told) if told is not None else contextlib.nullcontext() as metrics:
        for step in range(row.steps):
            asked = asked if step == 0 else time.monotonic()
            taken = [next(data) for _ in range(config.train.accumulation)]
            check.waits.append(time.monotonic() - asked)
            if step == 0:
                print(f"[data] first batch after {check.waits[0]:.2f} s", flush=True)
            check.before_step(taken)
            trainer.step(taken)
            (result,) = trainer.read()
            check.after_step(result)
            if metrics is not None:
                metrics.add(result)
            if row.steps <= 2 or result.step % 50 == 0:
                print(f"step {result.step} loss {result.loss:.4f} {result.seconds:.2f} s", flush=True)
            assert math.isfinite(result.loss)
            if trainer.gradients is not None:
                assert trainer.gradients.missing() == []
                assert len(trainer.gradients.arrived) == trained
                assert trained == 195 or row.uses > 1 or config.model.attention == "dense" or config.model.n_layers < 12
    check.at_the_end(folder)
    if config.parallel.mode != "fsdp" and row.fails_as != "silent_divergence":  # there, ranks differ
        assert_ranks_agree(trainer.module, group)


def with_shipped_sample(config: Config, folder: Path) -> Config:
    """Return ``config``, with this repository's text where the data that it names is not here; log the choice in data.txt."""
    path = config.data.path
    if config.data.dataset != "fineweb_edu" or path is None:
        return config
    is_here = Path(path).exists()
    said = path if is_here else f"{SAMPLE}: the shipped sample, as {path} is not here"
    print(f"[plan] data: {said}", flush=True)
    (folder / "data.txt").write_text(said + "\n", encoding="utf-8")
    return config if is_here else replace(config, data=replace(config.data, path=str(SAMPLE)))


def use_again(model: Any, uses: int) -> None:
    """Put the first block in the place of all, ``uses`` times, and freeze the embedding.

    A backward through one use then makes every parameter ready, and what the other uses add comes after DDP has reduced.
    """
    import torch

    model.blocks = torch.nn.ModuleList([model.blocks[0]] * uses)
    model.embed.requires_grad_(False)
    model.embed.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def assert_ranks_agree(module: Any, group: Group) -> None:
    """Assert that every rank holds the same parameters after the last step: by their sums, in float64."""
    import torch
    import torch.distributed as dist

    sums = torch.stack([p.detach().double().sum().cpu() for p in module.parameters()])
    everybody = [torch.empty_like(sums) for _ in range(group.world_size)]
    dist.all_gather(everybody, sums.to(group.device) if group.backend == "nccl" else sums)
    for rank, other in enumerate(everybody):
        assert torch.equal(other, sums), f"parameters of rank {group.rank} and rank {rank} differ"
