"""A loss or a gradient that is NaN or infinite ends the run on all ranks."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa import train
from nsa.data import Position, batches, open_source
from nsa.data.packing import Batch
from nsa.training.metrics import Metrics
from nsa.training.parallel import RankInfo
from nsa.training.statistics import GateStatistics
from nsa.training.trainer import StepResult, Trainer
from pytest_nsa.fixtures import Group
from tests_cpu.fsdp2 import that_run
from tests_cpu.nsa.test_checkpoint import options, small


def odd_loss(loss: torch.Tensor, how: str) -> torch.Tensor:
    """Return a loss that is NaN or infinite, or that is as it was and has gradients that are NaN."""
    if how == "gradient":
        return loss + (loss - loss.detach()).abs().sqrt()
    return loss * float(how)


def plant(trainer: type[Trainer], monkeypatch: pytest.MonkeyPatch, steps: set[int], how: str = "nan") -> None:
    """Make the losses of these steps odd, in the last micro-batch or the only one."""
    plain = trainer.loss

    def loss(self: Trainer, batch: Batch) -> torch.Tensor:
        found = plain(self, batch)
        return odd_loss(found, how) if self.steps_done + 1 in steps else found

    monkeypatch.setattr(trainer, "loss", loss)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the lines of a file; fail where one is not JSON."""
    return [json.loads(line, parse_constant=pytest.fail) for line in (folder / name).read_text().splitlines()]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", ["nan", "gradient"])
def test_one_rank_s_odd_loss_is_read_on_all(group: Group, rank_tmp_path: Path, how: str) -> None:
    """Rank 1 has it in step 2, in the first micro-batch."""
    ranks = RankInfo(rank=group.rank, world_size=2)
    ways: list[dict[str, Any]] = [
        {"parallel.mode": "ddp", "train.accumulation": 2, "train.grad_clip": 0.0}, {"parallel.mode": "average"},
        {"parallel.mode": "fsdp", "train.dtype": "bf16"},
    ]  # fmt: skip
    for way in that_run(ways):
        config = small(rank_tmp_path, **way)
        trainer = Trainer(config, ranks, rank_tmp_path)
        plain = trainer.loss
        data = batches(open_source(config), Position(), config.train.batch_size, group.rank, 2)
        for number in (1, 2):
            taken = [next(data) for _ in range(config.train.accumulation)]
            is_odd = number == 2 and group.rank == 1
            trainer.loss = lambda b, odd=is_odd, first=taken[0], plain=plain: (  # type: ignore[method-assign]
                odd_loss(plain(b), how) if odd and b is first else plain(b)
            )
            trainer.step(taken)
        first, odd = trainer.read()
        assert (first.is_finite, odd.is_finite) == (True, False), way
        assert math.isfinite(odd.loss) == (how == "gradient"), way


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "every"), [("nan", 1), ("inf", 1), ("gradient", 1), ("nan", 5)])
def test_the_run_stops_at_the_first_odd_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str, every: int
) -> None:
    """Figures are read before each checkpoint, too: the one after the odd step is not written."""
    plant(Trainer, monkeypatch, {8}, how)
    out = tmp_path / "run"
    arguments = options(tmp_path, "--steps", "12", "--save-every", "3", "--set", "checkpoint.keep=1")
    assert train.main([*arguments, "--set", f"train.log_every={every}"]) == train.NOT_FINITE
    error = capsys.readouterr().err
    what = "the loss is [0-9.]+, but the norm of its gradients is nan" if how == "gradient" else f"the loss is {how}"
    checkpoint = out / "checkpoints" / "step_00000006"
    pattern = rf"error: step 8: {what}; go on from {checkpoint} \(--resume\) with a lower train\.lr or other data\n"
    assert re.fullmatch(pattern, error), error
    assert saved(out) == [6]
    found = lines(out)
    assert [line["step"] for line in found][:8] == list(range(1, 9))
    assert (found[7]["loss"] is None) == (how != "gradient")
    assert found[7]["grad_norm"] is None
    assert all(isinstance(line["grad_norm"], float) for line in found[:7])
    monkeypatch.undo()
    assert train.main([*arguments, "--resume", str(checkpoint)]) == 0
    assert [line["step"] for line in lines(out)[-6:]] == list(range(7, 13))


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_every_field_of_metrics_may_be_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, small(tmp_path))
    for step in range(1, 15):
        value = math.nan if step == 5 else float(step)
        metrics.add(
            StepResult(
                step=step, loss=value, lr=value, tokens=10, seconds=1.0, peak_mib=value, grad_norm=value, gates={"cmp": value}
            )
        )  # fmt: skip
    metrics.close()
    found = lines(tmp_path)
    assert [found[4][name] for name in ("loss", "lr", "peak_mib", "grad_norm", "gates")] == [None] * 4 + [{"cmp": None}]
    assert found[5]["gates"] == {"cmp": 6.0}


def test_gates_that_are_nan_are_null(tmp_path: Path) -> None:
    model = Trainer(small(tmp_path), RankInfo(), tmp_path).module
    statistics = GateStatistics(model)
    with torch.no_grad():
        model.blocks[0].attn.gate.fc2.bias.fill_(math.nan)
        model(torch.randint(0, 256, (1, 32)))
    statistics.write(tmp_path / "gate_health.jsonl", 1)
    (line,) = lines(tmp_path, "gate_health.jsonl")
    assert line["means"] == {"cmp": None, "sel": None, "win": None}
    assert line["layers"]["blocks.0.attn.gate"]["mean"] == [None] * 3
