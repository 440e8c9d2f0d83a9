"""What the plan counts as a leak, and as a gradient that is off, on made-up figures."""

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa import load_config
from nsa.data import Position, batches, open_source
from nsa.model.transformer import build_model
from nsa.training.parallel import RankInfo
from nsa.training.trainer import StepResult, Trainer
from pytest_nsa.fixtures import Group
from tests_cpu.plan import faults, health, running, scenarios


def dumps(folder: Path, size: Callable[[int], float]) -> None:
    for step in range(5, 101, 5):
        (folder / f"mem_step{step}_rank0.json").write_text(
            json.dumps({"step": step, "cuda_allocated_mib": size(step), "rss_mib": 0})
        )


@pytest.mark.parametrize(
    ("size", "leaks"),
    [
        (lambda step: 900 + 0.05 * step, True),
        (lambda step: 900 + 0.05 * step + random.uniform(0, 0.3), True),
        (lambda step: 900.0, False),
        (lambda step: 900 + min(step, 30), False),  # a warm-up
        (lambda step: 900 + 16 * (step % 15 == 0), False),  # what a step holds when it is measured
    ],
)  # fmt: skip
def test_a_leak_is_what_raises_the_lowest(tmp_path: Path, size: Callable[[int], float], leaks: bool) -> None:
    dumps(tmp_path, size)
    assert (health.growth_mib(tmp_path, 0) > health.MAX_GROWTH_MIB) is leaks


def test_a_file_that_a_diagnosed_training_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "k_stats_fsdp.csv").touch()
    health.assert_written(tmp_path, ["metrics.jsonl"])
    with pytest.raises(AssertionError, match=r"^not written, or empty: k_stats_fsdp\.csv, heartbeat_rank1.jsonl\b"):
        health.assert_written(tmp_path, ["metrics.jsonl", "k_stats_fsdp.csv", "heartbeat_rank1.jsonl"])


def test_production_s_steps_are_planned_by_those_measured(capsys: pytest.CaptureFixture[str]) -> None:
    health.plan_ahead([9.0] * 50 + [0.72] * 45 + [0.36] * 5)  # the first half warms up, and counts for nothing
    assert capsys.readouterr().out == "50,000 steps would take 10.00 h (5.00 to 10.00, by the tenths of 50 steps)\n"


def test_gradients_of_bfloat16_are_off_by_roundings_of_each_use() -> None:
    eps = torch.finfo(torch.bfloat16).eps
    assert health.tolerance("fp32", 2) == health.tolerance("bf16", 1) == health.TOLERANCE
    assert health.tolerance("bf16", 2) == eps
    module = torch.nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[1.0, 0.0]])
    health.assert_gradients(module, [torch.tensor([[1.0, 0.9 * eps]])], eps)
    with pytest.raises(AssertionError, match="weight: off by"):
        health.assert_gradients(module, [torch.tensor([[1.0, 1.1 * eps]])], eps)


def test_the_shipped_sample_is_read_where_no_data_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(scenarios.ROOT / "configs" / scenarios.GPU.config)
    found = running.with_shipped_sample(config, tmp_path)
    assert found.data.path == str(running.SAMPLE)
    said = (tmp_path / "data.txt").read_text()
    assert "the shipped sample, as" in said
    assert said.strip() in capsys.readouterr().out
    here = load_config(scenarios.ROOT / "configs" / "tiny_cpu.yaml", **{"data.dataset": "fineweb_edu"})
    assert running.with_shipped_sample(here, tmp_path) == here


def trainer_on(device: str) -> Any:
    return SimpleNamespace(ranks=SimpleNamespace(device=torch.device(device)))


def result(tokens: int, seconds: float, peak_mib: float) -> StepResult:
    return StepResult(step=1, loss=1.0, lr=1e-3, tokens=tokens, seconds=seconds, peak_mib=peak_mib)


@pytest.mark.parametrize(
    ("device", "tokens", "peak_mib", "is_met"),
    [
        ("cuda", 2048, 20_000, True),
        ("cuda", 2048, 29_000, False),  # 30.4 GB
        ("cuda", 40, 20_000, False),  # a second each
        ("cpu", 40, 60_000, True),  # only said
    ],
)
def test_production_s_criteria(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, tokens: int, peak_mib: float, is_met: bool
) -> None:
    check = health.Criteria(trainer_on(device), 0, 1)
    for _ in range(3):
        check.after_step(result(tokens, 1.0, peak_mib))
    with contextlib.nullcontext() if is_met else pytest.raises(AssertionError):
        check.at_the_end(tmp_path)
    said = capsys.readouterr().out
    assert f"{tokens:,} tokens/s" in said
    assert "below 30 GB, above 50 tokens/s" in said


@pytest.mark.parametrize(("waited", "is_met"), [(0.01, True), (0.5, False)])
def test_a_model_that_waits_for_its_data(tmp_path: Path, waited: float, is_met: bool) -> None:
    check = health.Data(trainer_on("cpu"), 0, 1)
    for step in range(5):
        check.waits.append(9.0 if step == 0 else waited)  # the first batch is not counted
        check.after_step(result(1, 1.0, 1))
    with contextlib.nullcontext() if is_met else pytest.raises(AssertionError, match="50% of a step is spent waiting"):
        check.at_the_end(tmp_path)


def test_a_variable_that_nccl_does_not_heed(tmp_path: Path) -> None:
    check, output = health.HeededByNccl(trainer_on("cpu"), 0, 1), tmp_path / "rank0" / "output.log"
    output.parent.mkdir()
    output.write_text("host:7 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1\n")
    check.at_the_end(tmp_path)
    output.write_text("host:7 [0] NCCL INFO Bootstrap: using eth0\n")
    with pytest.raises(AssertionError, match="does not tell"):
        check.at_the_end(tmp_path)


def small_trainer(folder: Path) -> Trainer:
    config = load_config(
        scenarios.ROOT / "configs" / "tiny_cpu.yaml",
        **{"model.n_layers": 2, "train.seq_len": 64, "train.batch_size": 1, "parallel.mode": "none"},
    )
    return Trainer(config, RankInfo(), folder)


@pytest.mark.parametrize("check", [health.Boundaries, health.InPlace])
def test_a_block_that_changes_its_input_is_named(tmp_path: Path, check: type[health.Check]) -> None:
    trainer = small_trainer(tmp_path)
    batch = next(batches(open_source(trainer.config), Position(), 1, 0, 1))
    check(trainer, 0, 1).before_step([batch])  # as it is, it passes
    faults.plant("inplace_write", trainer, culprit=0)
    named = "layer 1 checkpointed alone" if check is health.Boundaries else r"mul_ writes into input 0 of blocks\.1 at "
    with pytest.raises(AssertionError, match=named):
        check(trainer, 0, 1).before_step([batch])
    assert trainer.module.blocks[1].forward.__name__ == "scaled"  # as it was


@pytest.mark.parametrize(("set_to", "expected"), [("1", "math"), ("yes", "math"), ("0", "auto"), ("", "auto")])
def test_a_variable_adds_a_mitigation_to_a_scenario(
    monkeypatch: pytest.MonkeyPatch, set_to: str, expected: str
) -> None:
    monkeypatch.setenv("NSA_WITH_CONSERVATIVE_KERNELS", set_to)
    row = scenarios.SEEDS[0]
    assert running.mitigations(row).get("model.backend", "auto") == expected
    assert running.mitigations(replace(row, parallel="none")) == {}  # in one process there is nothing to mitigate


def test_rows_that_nothing_here_heeds_are_skipped() -> None:
    rows = {row.name: row for row in scenarios.TABLE}
    cpu = Group(rank=0, world_size=2, device="cpu", backend="gloo")
    model = torch.nn.Linear(2, 2)
    for name in ("nccl_p2p_disabled", "synchronous"):
        with pytest.raises(pytest.skip.Exception, match="this run is on gloo and cpu"):
            running.skip_where_it_tells_nothing(rows[name], cpu, model)
    running.skip_where_it_tells_nothing(rows["synchronous"], replace(cpu, device="cuda:0"), model)
    running.skip_where_it_tells_nothing(rows["ddp_onestep_trace"], cpu, model)
    with pytest.raises(pytest.skip.Exception, match="this model has none"):
        running.skip_where_it_tells_nothing(rows["no_buffer_broadcast"], cpu, model)
    with_buffers = torch.nn.Sequential(model, torch.nn.BatchNorm1d(2))
    running.skip_where_it_tells_nothing(rows["no_buffer_broadcast"], cpu, with_buffers)


def test_the_model_has_no_buffers_at_any_size() -> None:
    for size in (scenarios.CPU, scenarios.GPU):
        model = build_model(load_config(scenarios.ROOT / "configs" / size.config), torch.device("meta"))
        assert list(model.buffers()) == []


def test_a_name_says_what_is_run() -> None:
    names = {
        "cpu": [scenarios.CPU.find_name(row) for row in scenarios.TABLE],
        "real": [scenarios.REAL_ON_CPU.find_name(row) for row in scenarios.TABLE],
        "gpu": [scenarios.GPU.find_name(row) for row in scenarios.TABLE],
    }
    assert names["real"] == names["gpu"]
    assert len(set(names["cpu"])) == len(names["cpu"])
    assert {"one_process_12x2048_gc", "safe_mode_2x512", "sequence_4096", "buckets_2mb"} <= set(names["gpu"])
    assert {"one_process_12x128_gc", "safe_mode_2x32", "sequence_256", "buckets_50kb"} <= set(names["cpu"])
    for row in scenarios.TABLE:
        length = row.on_cpu.get("train.seq_len")
        if length is not None and row.steps <= 100 and row.phase != 9:
            assert str(length) in scenarios.CPU.find_name(row)
