"""The same training with every parallelism: losses and gradients are those of one process, and a repetition has the same bits."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nsa.config import Config, ConfigError, load_config
from nsa.data import Position, batches, open_source
from nsa.model.transformer import build_model
from nsa.training.checkpoint import Checkpointer, load
from nsa.training.parallel import RankInfo
from nsa.training.saved import find
from nsa.training.trainer import Trainer
from pytest_nsa import world_size
from pytest_nsa.fixtures import Group
from tests_cpu.fsdp2 import needs_fsdp2, that_run

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "tiny_cpu.yaml"
STEPS, SAMPLES = 20, 8  # samples per step, however they are divided
TOLERANCE = 1e-5  # relative, in float32: sums in another order
SIZES = {"n_layers": 2, "seq_len": 48, "steps": STEPS, "lr": 1e-3}


def configured(**overrides: Any) -> Config:
    return load_config(TINY, **{**SIZES, "data.dataset": "fineweb_edu", **overrides})


def train(
    config: Config, ranks: RankInfo, folder: Path, steps: int = STEPS, trainer: Trainer | None = None, first: int = 0
) -> tuple[list[float], Trainer]:
    trainer = trainer or Trainer(config, ranks, folder)
    data = batches(open_source(config), Position(samples=first), config.train.batch_size, ranks.rank, ranks.world_size)
    for _ in range(steps):
        trainer.step([next(data) for _ in range(config.train.accumulation)])
    return [result.loss for result in trainer.read()], trainer


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in trainer.module.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], way: object = "") -> None:
    for name, gradient in found.items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < 100 * TOLERANCE, f"{name} is off by {error:.1e}, {way}"


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each selection of blocks."""
    from nsa.kernels import blocks

    select, calls = blocks.select, []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return select(*args, **kwargs)

    monkeypatch.setattr(blocks, "select", counted)
    return calls


def divided(world_size: int, accumulation: int) -> dict[str, Any]:
    return {"train.batch_size": SAMPLES // world_size // accumulation, "train.accumulation": accumulation}


WAYS: dict[str, list[tuple[str, int, bool, dict[str, Any]]]] = {
    "sample": [("ddp", 4, True, {}), ("fsdp", 2, True, {}), ("average", 2, True, {})],
    "rest": [
        ("ddp", 1, True, {}), ("ddp", 1, False, {}), ("fsdp", 1, False, {}),
        ("ddp", 2, True, {"parallel.static_graph": True}), ("ddp", 2, True, {"parallel.no_sync": False}),
        ("ddp", 1, True, {"parallel.gradient_as_bucket_view": False}), ("ddp", 1, True, {"train.gc_keep_selection": True}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("which", ["sample", pytest.param("rest", marks=pytest.mark.slow)])
@pytest.mark.timeout(170)
def test_every_way_to_share_trains_as_one_process_does(group: Group, artifacts: Path, which: str) -> None:
    ranks = RankInfo(rank=group.rank, world_size=2)
    truth, alone = train(configured(**divided(1, 1)), RankInfo(), artifacts)
    expected = gradients(alone)
    assert truth[-1] < truth[0] - 0.2
    ways: list[dict[str, Any]] = [
        {"parallel.mode": mode, **divided(2, accumulation), "train.gradient_checkpointing": checkpointing, **more}
        for mode, accumulation, checkpointing, more in WAYS[which]
    ]
    for way in that_run(ways):
        losses, trainer = train(configured(**way), ranks, artifacts)
        assert losses == pytest.approx(truth, rel=TOLERANCE), way
        assert_near(gradients(trainer), expected, way)


SLOW_MODES = [
    pytest.param(mode, marks=[pytest.mark.slow, *([needs_fsdp2] if mode == "fsdp" else [])])
    for mode in ("ddp", "fsdp", "average")
]


@pytest.mark.parametrize("mode", SLOW_MODES)
@pytest.mark.timeout(60)
def test_twice_and_resumed_are_the_same_to_the_bit(group: Group, artifacts: Path, mode: str) -> None:
    ranks = RankInfo(rank=group.rank, world_size=2)
    config = configured(**{"parallel.mode": mode, **divided(2, 1)})
    once, _ = train(config, ranks, artifacts)
    twice, _ = train(config, ranks, artifacts)
    assert twice == once
    begun, trainer = train(config, ranks, artifacts, steps=7)
    writer = Checkpointer(artifacts / "checkpoints", config, group.rank, 2)
    writer.save(7, trainer.model, trainer.optimizer, Position(samples=7 * SAMPLES))
    dist.barrier()
    again = Trainer(config, ranks, artifacts)
    found = find(artifacts / "checkpoints", "auto")
    load(found, config, again.model, again.optimizer, group.rank)
    again.steps_done = 7
    rest, _ = train(config, ranks, artifacts, STEPS - 7, again, 7 * SAMPLES)
    assert begun + rest == once


@needs_fsdp2
@pytest.mark.timeout(60)
def test_the_files_of_fsdp_have_its_name_and_the_dtypes_that_it_computes_in(group: Group, artifacts: Path) -> None:
    ranks = RankInfo(rank=group.rank, world_size=2)
    settings = {"parallel.mode": "fsdp", "train.dtype": "bf16", "trace.mem_dump_every": 1}
    trainer = Trainer(configured(**settings, **divided(2, 1)), ranks, artifacts)
    seen = []
    out = trainer.module.blocks[0].attn.out
    out.register_forward_pre_hook(lambda module, inputs: seen.append((module.weight.dtype, inputs[0].dtype)))
    train(trainer.config, ranks, artifacts, 1, trainer)
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert out.weight.dtype == torch.float32
    dist.barrier()
    names = {
        f"mem_fsdp_{moment}_rank{rank}.{kind}"
        for moment in ("boot", "step1")
        for rank in (0, 1)
        for kind in ("json", "txt")
    }
    names |= {"k_stats_fsdp.csv", "fallback_counters_fsdp.csv", "dtypes_report_fsdp.txt", "gate_health.jsonl"}
    written = {path.name for path in artifacts.iterdir() if path.is_file()}
    assert names <= written
    assert not {"k_stats.csv", "fallback_counters.csv", "dtypes_report.txt"} & written
    report = (artifacts / "dtypes_report_fsdp.txt").read_text().splitlines()
    assert report[0] == "# compute: torch.bfloat16 (FSDP casts the parameters)"
    assert report[1] == "# reduction: torch.float32 (FSDP's reduce_dtype)"
    assert report[2].startswith("embed.weight  torch.float32  (256, ")


def test_nothing_is_selected_twice_where_the_selection_is_kept(artifacts: Path, selections: list[int]) -> None:
    found = {}
    for keep in (False, True):
        selections.clear()
        losses, _ = train(
            configured(**divided(1, 1), **{"train.gc_keep_selection": keep}), RankInfo(), artifacts, steps=2
        )
        found[keep] = (len(selections), losses)
    layers, steps = SIZES["n_layers"], 2
    assert found[False][0] == 2 * layers * steps
    assert found[True] == (layers * steps, found[False][1])


def test_no_statistics_are_written_every_0_steps(artifacts: Path) -> None:
    train(configured(**{"trace.stats_every": 0}), RankInfo(), artifacts, steps=2)
    assert not {"gate_health.jsonl", "k_stats.csv"} & {path.name for path in artifacts.iterdir()}


def test_safe_mode_is_every_mitigation(tmp_path: Path) -> None:
    config = load_config(TINY, **{"parallel.safe": True, "parallel.static_graph": True})
    parallel = config.parallel
    assert (parallel.static_graph, parallel.find_unused_parameters, parallel.bucket_cap_mb) == (False, True, 2.0)
    assert (config.model.backend, config.model.stop_gate_gradient) == ("math", True)
    with pytest.raises(ConfigError, match="gc_keep_selection: needs non-reentrant checkpointing"):
        load_config(TINY, gc_keep_selection=True, gc_reentrant=True)
    config = load_config(
        TINY, gc_keep_selection=True, **{"train.gradient_checkpointing": True, "model.backend": "sdpa"}
    )
    with pytest.raises(ConfigError, match=r"model\.backend='sdpa' selects without an operator; use auto, cpu, triton"):
        build_model(config)


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 must not compile a step on a CPU")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, when its compiler is imported and used
@world_size(1)
@pytest.mark.timeout(170)
def test_a_step_that_is_compiled_whole(
    group: Group, artifacts: Path, monkeypatch: pytest.MonkeyPatch, selections: list[int]
) -> None:
    # The same graphs, without the minute that a C++ compiler takes for them.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    ranks, steps = RankInfo(), 4
    found = {}
    for compiled in ("none", "step"):
        selections.clear()
        config = configured(
            **divided(1, 2),
            **{"n_layers": 1, "parallel.mode": "ddp", "train.compile": compiled, "train.gc_keep_selection": True},
        )
        losses, trainer = train(config, ranks, artifacts, steps=steps)
        found[compiled] = losses, gradients(trainer), len(selections)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(steps / 20 * 1e-3)
    (truth, expected, _), (whole, compiled_gradients, selected) = found["none"], found["step"]
    assert whole == pytest.approx(truth, rel=TOLERANCE)
    assert_near(compiled_gradients, expected)
    assert selected == 2 * steps  # once per layer and micro-step: recomputation keeps the selection in a graph, too


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 must not compile a step on a CPU")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    "settings",
    [
        {"model.attention": "dense"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"train.gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
    ids=["dense", "nsa", "recomputed"],
)
def test_a_step_compiled_by_inductor_has_the_gradients_of_a_plain_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Several layers, by the compiler that serves: what it made of a region shared by layers had other gradients (torch 2.13)."""
    found = {}
    for way in ("none", "step"):
        config = configured(**{"train.gradient_checkpointing": False, **settings, "train.compile": way})
        losses, trainer = train(config, RankInfo(), tmp_path, steps=3)  # the first runs as it is written
        found[way] = losses, gradients(trainer)
    (truth, expected), (losses, compiled) = found["none"], found["step"]
    assert losses == pytest.approx(truth, rel=TOLERANCE)
    assert_near(compiled, expected)


def test_a_cuda_graph_needs_a_gpu(tmp_path: Path) -> None:
    config = configured(**{"train.compile": "step", "train.cuda_graph": True})
    with pytest.raises(ConfigError, match=r"train\.cuda_graph: needs a GPU, and the device is cpu"):
        Trainer(config, RankInfo(), tmp_path)


@pytest.mark.skipif(torch.__version__ >= "2.7", reason="torch 2.6 alone compiles a step on a CPU wrongly")
def test_a_torch_that_compiles_a_step_wrongly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.compile='step': inductor of torch 2\.6"):
        Trainer(configured(**{"train.compile": "step"}), RankInfo(), tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("graph", {"parallel.mode": "fsdp"}, "parallel.mode: fsdp"), ("graph", {"train.gc_reentrant": True}, "train.gc_reentrant"),
        ("graph", {"trace.module_bwd": True}, "NSA_TRACE_MODULE_BWD"),
        ("cuda_graph", {"train.compile": "none"}, "train.compile: none; set it to step"),
        ("cuda_graph", {"parallel.mode": "ddp"}, "parallel.mode: ddp.*use average"),
        ("cuda_graph", {"train.accumulation": 2}, "train.accumulation=2"),
    ],
)  # fmt: skip
def test_what_a_graph_cannot_hold_is_refused(kind: str, settings: dict[str, Any], said: str) -> None:
    of_cuda = kind == "cuda_graph"
    setting, hint = ("train.cuda_graph", "") if of_cuda else ("train.compile='step'", ".*use blocks")
    with pytest.raises(ConfigError, match=f"{setting}: is not possible with {said}{hint}"):
        load_config(TINY, **{"train.compile": "step", "train.cuda_graph": of_cuda, **settings})
