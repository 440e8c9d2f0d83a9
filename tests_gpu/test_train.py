"""Training at production size on a GPU: nothing waits for the device between the steps whose figures are read."""

import warnings
from pathlib import Path

import pytest
import torch

from nsa.config import load_config
from nsa.data import Position, batches, open_source
from nsa.model.transformer import build_model
from nsa.training.parallel import RankInfo
from nsa.training.trainer import Trainer
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
    with warnings.catch_warnings():  # torch's own warning: the mode is a prototype
        warnings.simplefilter("ignore")
        try:
            torch.cuda.set_sync_debug_mode("error")
            for batch in taken:
                trainer.step([batch])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [result.step for result in trainer.read()] == [1, 2, 3, 4]


@gpu
@pytest.mark.timeout(170)
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch begins its pool of graphs with an empty one
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_as_cuda_graphs_is_the_step(tmp_path: Path, checkpointing: bool) -> None:
    found = {}
    for way in ({}, {"train.compile": "step"}, {"train.compile": "step", "train.cuda_graph": True}):
        overrides = {
            "parallel.mode": "none",
            "data.dataset": "synthetic",
            "train.gradient_checkpointing": checkpointing,
        }
        config = load_config(CONFIG, **overrides, **way, **{"trace.stats_every": 1000, "model.n_layers": 2})
        trainer = Trainer(config, RankInfo(device=torch.device("cuda", 0)), tmp_path)
        data = batches(open_source(config), Position(), config.train.batch_size, 0, 1)
        for _ in range(6):
            trainer.step([next(data)])
        results = trainer.read()
        found[tuple(way)] = [r.loss for r in results], [r.grad_norm for r in results]
    (losses, norms), *others = found.values()
    for other_losses, other_norms in others:
        assert other_losses == pytest.approx(losses, rel=2e-2)  # in bfloat16
        assert other_norms == pytest.approx(norms, rel=0.1)


@gpu
@pytest.mark.timeout(60)
def test_a_model_is_drawn_on_the_device() -> None:
    config = load_config(CONFIG)
    torch.manual_seed(0)
    one = build_model(config, torch.device("cuda", 0))
    torch.manual_seed(0)
    other = build_model(config, torch.device("cuda", 0))
    assert len(list(one.parameters())) == 195
    assert all(p.is_cuda and torch.equal(p, e) for p, e in zip(one.parameters(), other.parameters(), strict=True))
