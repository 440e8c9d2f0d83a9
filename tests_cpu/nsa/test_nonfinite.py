"""A loss or a gradient that is NaN or infinite: no rank makes an update from it, and the run stops, or skips the step."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa import train
from nsa.config import load_config
from nsa.data import Position, batches, open_source
from nsa.data.packing import Batch
from nsa.training import run
from nsa.training.checkpoint import Checkpointer, describe, load
from nsa.training.metrics import Metrics
from nsa.training.parallel import RankInfo
from nsa.training.statistics import GateStatistics
from nsa.training.trainer import StepResult, Trainer
from pytest_nsa import world_size
from pytest_nsa.fixtures import Group
from pytest_nsa.report.curves import curves
from tests_cpu.fsdp2 import that_run

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "configs" / "tiny_cpu.yaml")
SMALL = """
model:
  {dim: 16, n_layers: 1, n_heads: 2, n_kv_heads: 1, head_dim: 8, v_head_dim: 8, compress_block: 8,
   compress_stride: 4, select_block: 16, n_select: 3, window: 16, mlp_hidden: 16, gate_hidden: 8}
train: {steps: 12, batch_size: 2, seq_len: 32, lr: 1.0e-2, dtype: fp32, threads: 1, warmup_steps: 1}
data: {workers: 0}
"""


def small(folder: Path) -> str:
    path = folder / "small.yaml"
    path.write_text(SMALL)
    return str(path)


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


# --- a step -----------------------------------------------------------------------------------------------------------


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    """Return this rank's parameters and moments, copies."""
    parameters = list(trainer.module.parameters())
    moments = [v for p in parameters for _, v in sorted(trainer.optimizer.state.get(p, {}).items())]
    return [getattr(x, "_local_tensor", x).detach().clone() for x in (*parameters, *moments)]


def on_device(trainer: Trainer) -> None:
    """Let the update be as on a GPU: by the fused kernel, which reads on the device whether it may."""
    groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in trainer.optimizer.param_groups]
    trainer.optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    trainer._update, trainer._updates_on_device = trainer.optimizer.step, True


WAYS: list[dict[str, Any]] = [
    {"parallel.mode": "ddp"}, {"parallel.mode": "ddp", "train.accumulation": 2, "train.grad_clip": 0.0},
    {"parallel.mode": "ddp", "train.dtype": "bf16"}, {"parallel.mode": "fsdp"},
    {"parallel.mode": "fsdp", "train.accumulation": 2, "train.dtype": "bf16", "train.grad_clip": 0.0},
    {"parallel.mode": "fsdp", "parallel.fsdp_version": 1}, {"parallel.mode": "average"},
]  # fmt: skip


REST = ((True, "nan"), (False, "gradient"), (False, "inf"), (True, "inf"))


@world_size(2)
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("fused", "how"),
    [(False, "nan"), (True, "gradient"), *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)],
)
def test_one_rank_s_odd_loss_changes_no_rank(group: Group, rank_tmp_path: Path, how: str, fused: bool) -> None:
    """Rank 1 has it in step 3, in the first micro-batch. No parameter and no moment changes; step 4 is as if 3 had not been."""
    ranks = RankInfo(rank=group.rank, world_size=2)
    for way in that_run(WAYS):
        config = load_config(small(rank_tmp_path), **way)
        found: dict[bool, list[StepResult]] = {}
        states: dict[bool, list[torch.Tensor]] = {}
        for is_planted in (False, True):
            trainer = Trainer(config, ranks, rank_tmp_path)
            if fused:
                on_device(trainer)
            data = batches(open_source(config), Position(), config.train.batch_size, group.rank, 2)
            steps = [[next(data) for _ in range(config.train.accumulation)] for _ in range(4)]
            plain = trainer.loss
            for number, taken in enumerate(steps, 1):
                if number == 3 and not is_planted:  # the same learning rate as with it
                    trainer.steps_done += 1
                    continue
                is_odd = number == 3 and group.rank == 1
                trainer.loss = lambda b, odd=is_odd, first=taken[0], plain=plain: (  # type: ignore[method-assign]
                    odd_loss(plain(b), how) if odd and b is first else plain(b)
                )
                before = state_of(trainer)
                trainer.step(taken)
                if number == 3:
                    assert all(torch.equal(a, b) for a, b in zip(before, state_of(trainer), strict=True)), way
            found[is_planted], states[is_planted] = trainer.read(), state_of(trainer)
        first, second, odd, fourth = found[True]
        assert [r.skipped for r in found[True]] == [False, False, True, False], way
        assert math.isfinite(odd.loss) == (how == "gradient"), way
        assert math.isnan(odd.grad_norm) or how == "inf", way
        assert [(r.loss, r.grad_norm) for r in (first, second, fourth)] == [
            (r.loss, r.grad_norm) for r in found[False]
        ], way
        assert all(torch.equal(a, b) for a, b in zip(states[True], states[False], strict=True)), way


@world_size(2)
@pytest.mark.timeout(90)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, of the state of FSDP1
@pytest.mark.parametrize("fused", [False, True])
def test_a_checkpoint_from_before_the_first_update(
    group: Group, artifacts: Path, rank_tmp_path: Path, fused: bool
) -> None:
    """Step 1 was skipped, so the optimizer has nothing to save: a run that goes on from there is the same to the bit."""
    ranks = RankInfo(rank=group.rank, world_size=2)
    for number, way in enumerate(that_run(WAYS[:1] + WAYS[3:6:2])):  # ddp, and both versions of fsdp
        config = load_config(small(rank_tmp_path), **way)
        trainers = [Trainer(config, ranks, rank_tmp_path) for _ in range(2)]
        for trainer in trainers if fused else ():
            on_device(trainer)
        first, again = trainers
        data = batches(open_source(config), Position(), config.train.batch_size, group.rank, 2)
        taken = [[next(data)], [next(data)]]
        plain = first.loss
        first.loss = lambda b, plain=plain: odd_loss(plain(b), "nan")  # type: ignore[method-assign]
        first.step(taken[0])
        folder = artifacts / f"checkpoints{number}"
        writer = Checkpointer(folder, config, group.rank, 2)
        writer.save(1, first.model, first.optimizer, Position(samples=4), finite=False)
        load(folder / "step_00000001", config, again.model, again.optimizer, group.rank)
        first.loss, again.steps_done = plain, 1  # type: ignore[method-assign]
        for trainer in trainers:
            trainer.step(taken[1])
        assert all(torch.equal(a, b) for a, b in zip(*map(state_of, trainers), strict=True)), way
        assert first.read()[1].loss == again.read()[0].loss


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["nan", "inf", "gradient"])
def test_the_run_stops_at_the_first_odd_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    plant(Trainer, monkeypatch, {8}, how)
    out = tmp_path / "out"
    arguments = ["--config", small(tmp_path), "--out", str(out), "--save-every", "3"]
    assert train.main([*arguments, "--set", "checkpoint.keep=1"]) == train.NOT_FINITE
    error = capsys.readouterr().err
    what = "the loss is [0-9.]+, but the norm of its gradients is nan" if how == "gradient" else f"the loss is {how}"
    checkpoint = out / "checkpoints" / "step_00000006"
    pattern = rf"error: step 8: {what}; go on from {checkpoint} \(--resume\) with a lower train\.lr or other data, or set .*skip\n"
    assert error.count("\n") == 1
    assert re.fullmatch(pattern, error), error
    assert saved(out) == [6]
    found = lines(out)
    assert [line["step"] for line in found] == list(range(1, 9))
    assert [line["skipped"] for line in found] == [False] * 7 + [True]
    assert (found[7]["loss"] is None) == (how != "gradient")
    assert found[7]["grad_norm"] is None
    assert all(isinstance(line["grad_norm"], float) for line in found[:7])
    monkeypatch.undo()
    assert train.main([*arguments, "--resume", str(checkpoint)]) == 0
    assert [line["step"] for line in lines(out)[8:]] == list(range(7, 13))


def test_what_was_not_read_yet_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are read every 5 steps and before a checkpoint: the one after the odd step is not written."""
    plant(Trainer, monkeypatch, {7})
    out = tmp_path / "out"
    settings = ("train.log_every=5", "checkpoint.keep=1")
    arguments = ["--config", small(tmp_path), "--out", str(out), "--save-every", "4"]
    assert train.main([*arguments, *(a for s in settings for a in ("--set", s))]) == train.NOT_FINITE
    assert saved(out) == [4]
    assert [line["step"] for line in lines(out) if line["skipped"]] == [7]


def test_skipped_steps_are_recorded_and_push_no_finite_checkpoint_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(Trainer, monkeypatch, {4, 5, 6, 7, 8})
    out = tmp_path / "out"
    arguments = ["--config", small(tmp_path), "--out", str(out), "--save-every", "1", "--set", "checkpoint.keep=2"]
    kept: dict[int, list[int]] = {}
    plain = run.Run.log

    def log(self: run.Run, line: str) -> None:
        plain(self, line)
        if line.startswith("saved"):
            step = self.trainer.steps_done
            kept[step] = saved(out)
            assert describe(out / "checkpoints" / f"step_{step:08d}").finite == (step not in range(4, 9))

    monkeypatch.setattr(run.Run, "log", log)
    assert train.main([*arguments, "--set", "train.nonfinite=skip", "--set", "train.max_skips=5"]) == 0
    said = capsys.readouterr().out
    assert "[train] warning: step 5: the loss is nan; the step is skipped (2 in a row of 5 allowed)" in said
    assert [line["step"] for line in lines(out) if line["skipped"]] == [4, 5, 6, 7, 8]
    assert (kept[3], kept[5], kept[8], kept[9], kept[10]) == ([2, 3], [3, 4, 5], [3, 7, 8], [8, 9], [9, 10])
    assert max(kept) == 12


def test_too_many_skips_in_a_row_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two in a row are allowed: steps 2 and 3 are skipped, 4 is not, and the third of 5, 6 and 7 ends it."""
    plant(Trainer, monkeypatch, {2, 3, 5, 6, 7})
    out = tmp_path / "out"
    arguments = ["--config", small(tmp_path), "--out", str(out), "--save-every", "4", "--set", "train.nonfinite=skip"]
    assert train.main([*arguments, "--set", "train.max_skips=2"]) == train.NOT_FINITE
    error = capsys.readouterr().err
    checkpoint = out / "checkpoints" / "step_00000004"
    assert error == (
        f"error: step 7: the loss is nan; skip 3 in a row, and train.max_skips=2: go on from {checkpoint} (--resume) with a "
        "lower train.lr or other data\n"
    )
    assert [line["step"] for line in lines(out) if line["skipped"]] == [2, 3, 5, 6, 7]


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_every_field_of_metrics_may_be_null(tmp_path: Path) -> None:
    """The curves of the report pass over a loss that is null."""
    metrics = Metrics(tmp_path, load_config(TINY), RankInfo(), math.inf)
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
    assert "loss, nats a token, steps 1 to 14: from 1 to 14" in curves(tmp_path)


def test_gates_that_are_nan_are_null(tmp_path: Path) -> None:
    model = Trainer(load_config(small(tmp_path)), RankInfo(), tmp_path).module
    statistics = GateStatistics(model)
    with torch.no_grad():
        model.blocks[0].attn.gate.fc2.bias.fill_(math.nan)
        model(torch.randint(0, 256, (1, 32)))
    statistics.write(tmp_path / "gate_health.jsonl", 1)
    (line,) = lines(tmp_path, "gate_health.jsonl")
    assert line["means"] == {"cmp": None, "sel": None, "win": None}
    assert line["layers"]["blocks.0.attn.gate"]["mean"] == [None] * 3


def test_the_exit_codes_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["--help"])
    help_text, page = capsys.readouterr().out, (ROOT / "docs" / "training.md").read_text()
    for code, meaning in train.EXIT_CODES.items():
        assert f"  {code:<4} {meaning}\n" in f"{help_text}\n"
        assert f"| {code} | " in page
