"""Training at production size on a GPU: nothing waits for the device between the steps whose figures are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsa.config import load_config
from nsa.data import Position, batches, open_source
from nsa.parallel import RankInfo
from nsa.trainer import Trainer
from pytest_nsa import gpu

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "m7c_125m_2xa100_production.yaml"


@gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_does_not_wait_for_the_device(tmp_path: Path, checkpointing: bool) -> None:
    overrides = {"parallel.mode": "none", "data.dataset": "synthetic", "train.gradient_checkpointing": checkpointing}
    config = load_config(CONFIG, **overrides, **{"trace.stats_every": 1000})
    trainer = Trainer(config, RankInfo(device=torch.device("cuda", 0)), tmp_path)
    data = batches(open_source(config), Position(), config.train.batch_size, 0, 1)
    trainer.step([next(data)])  # compiles kernels, and writes statistics
    taken = [next(data) for _ in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in taken:
            trainer.step([batch])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [result.step for result in trainer.read()] == [1, 2, 3, 4]
