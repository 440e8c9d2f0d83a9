"""The plan's scenarios, phases 1 to 5, as one table that the CPU and the GPU suite share, and how one is run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nsa import check_divergence, gpu, scenario, world_size

if TYPE_CHECKING:
    from pytest_nsa.fixtures import Group

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A row of the plan. ``overrides`` are fields of the configuration; ``reads_as`` is what a failure means."""

    phase: int
    name: str
    id: str
    reads_as: str
    parallel: str = "ddp"
    steps: int = 2
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Two ranks, but for the scenarios in one process."""
        return 1 if self.parallel == "none" else 2


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a suite runs the table: its configuration and the seconds that a scenario has."""

    config: str
    timeout: float
    on_gpu: bool = False


CPU = Size(config="tiny_cpu.yaml", timeout=30)
GPU = Size(config="m7c_125m_2xa100_production.yaml", timeout=300, on_gpu=True)

ALL_TRACES = {
    "trace.grads": True,
    "trace.module_bwd": True,
    "trace.ddp_buckets": True,
    "trace.mem_dump_every": 1,
}
TWO_TRACES = {"trace.grads": True, "trace.module_bwd": True}

TABLE: tuple[Scenario, ...] = (
    Scenario(
        phase=1, name="ddp_onestep_trace", id="onestep", steps=1, overrides=ALL_TRACES,
        reads_as="which parameters are missing, which buckets were reduced",
    ),
    Scenario(
        phase=2, name="ddp_gloo_sanity", id="gloo", steps=1, overrides={**ALL_TRACES, "parallel.backend": "gloo"},
        reads_as="fails too: autograd or graph; passes: NCCL transport",
    ),
    *(
        Scenario(
            phase=3, name=f"branch_{name}_only", id=name, overrides={**TWO_TRACES, "model.force_branch": name},
            reads_as=f"fails alone: the backward of {name}",
        )
        for name in ("cmp", "sel", "win")
    ),
    Scenario(
        phase=4, name="ddp_static_graph", id="static_graph", overrides={**TWO_TRACES, "parallel.static_graph": True},
        reads_as="passes where the others fail: a mitigation for production",
    ),
    Scenario(
        phase=5, name="gc_baseline_full", id="all", parallel="none", overrides=TWO_TRACES,
        reads_as="checkpointing all layers",
    ),
    Scenario(
        phase=5, name="gc_bisect_layers_0_5", id="0:6", parallel="none",
        overrides={**TWO_TRACES, "train.gc_range": "0:6"}, reads_as="checkpointing layers 0 to 5",
    ),
    Scenario(
        phase=5, name="gc_bisect_layers_6_11", id="6:12", parallel="none",
        overrides={**TWO_TRACES, "train.gc_range": "6:12"}, reads_as="checkpointing layers 6 to 11",
    ),
)  # fmt: skip


def rows(phase: int, size: Size) -> list[Any]:
    """The scenarios of a phase as parameters of a test, with their marks."""
    found = []
    for row in TABLE:
        if row.phase == phase:
            marks = [scenario(row.name), world_size(row.num_ranks), pytest.mark.timeout(size.timeout)]
            if row.parallel == "ddp":
                marks.append(check_divergence)
            if row.phase == 2:
                marks.append(pytest.mark.backend("gloo"))
            found.append(pytest.param(row, id=row.id, marks=[*marks, gpu] if size.on_gpu else marks))
    return found


def run(row: Scenario, size: Size, group: Group, folder: Path, fault: str | None) -> None:
    """Train ``row.steps`` steps as the row says; assert that every gradient arrived and that the ranks agree."""
    import torch

    from nsa.config import load_config
    from nsa.data import Position, batches, open_source
    from nsa.parallel import RankInfo
    from nsa.trainer import Trainer
    from tests_cpu.plan import faults

    overrides = {
        "parallel.mode": row.parallel, "parallel.bucket_cap_mb": 0.25, "train.steps": row.steps,
        "train.batch_size": 1, "data.dataset": "synthetic", **row.overrides,
    }  # fmt: skip
    changed = faults.settings(fault, row.parallel, static_graph=bool(row.overrides.get("parallel.static_graph")))
    config = load_config(ROOT / "configs" / size.config, **{**overrides, **changed})
    ranks = RankInfo(
        rank=group.rank, world_size=group.world_size, local_rank=group.rank, device=torch.device(group.device)
    )
    trainer = Trainer(config, ranks, folder)
    faults.plant(fault, trainer)
    data = batches(open_source(config), Position(), config.train.batch_size, group.rank, group.world_size)
    for _ in range(row.steps):
        trainer.step([next(data)])
        (result,) = trainer.read()
        print(f"step {result.step} loss {result.loss:.4f} {result.seconds:.2f} s", flush=True)
        assert math.isfinite(result.loss)
        assert trainer.gradients is not None
        assert trainer.gradients.missing() == []
        assert len(trainer.gradients.arrived) == 195
    assert_ranks_agree(trainer.module, group)


def assert_ranks_agree(module: Any, group: Group) -> None:
    """Every rank holds the same parameters after the last step: compared by their sums, in float64."""
    import torch
    import torch.distributed as dist

    sums = torch.stack([p.detach().double().sum().cpu() for p in module.parameters()])
    everybody = [torch.empty_like(sums) for _ in range(group.world_size)]
    dist.all_gather(everybody, sums.to(group.device) if group.backend == "nccl" else sums)
    for rank, other in enumerate(everybody):
        assert torch.equal(other, sums), f"parameters of rank {group.rank} and rank {rank} differ"
