"""What the plan counts as a leak, and as a gradient that is off, on made-up figures."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsa import load_config
from tests_cpu.plan import health, running, scenarios


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
        (lambda step: 900 + random.choice((0, 0, 16)), False),  # what a step holds when it is measured
    ],
)  # fmt: skip
def test_a_leak_is_what_raises_the_lowest(tmp_path: Path, size: Callable[[int], float], leaks: bool) -> None:
    dumps(tmp_path, size)
    assert (health.growth_mib(tmp_path, 0) > health.MAX_GROWTH_MIB) is leaks


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
