"""Checkpoints: whole whatever happens, loadable by other numbers of ranks and other parallelism, refused by name when damaged.

More than 400 lines: one subject, with helpers that train and damage for all of them.
"""

import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa import train
from nsa.config import Config, ConfigError, ModelConfig, load_config
from nsa.data import Position, batches, open_source
from nsa.training import checkpoint
from nsa.training.parallel import RankInfo
from nsa.training.saved import damage, describe, find, refuse_other_data
from nsa.training.trainer import Trainer
from pytest_nsa import world_size
from pytest_nsa.fixtures import Group
from tests_cpu.fsdp2 import needs_fsdp2
from tests_cpu.namespaces import MOUNT, in_namespace
from tests_cpu.warm import WarmPython

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
model:
  {dim: 16, n_layers: 1, n_heads: 2, n_kv_heads: 1, head_dim: 8, v_head_dim: 8, compress_block: 8,
   compress_stride: 4, select_block: 16, n_select: 3, window: 16, mlp_hidden: 16, gate_hidden: 8}
train: {steps: 80, batch_size: 2, seq_len: 32, lr: 1.0e-2, dtype: fp32, threads: 1}
data: {workers: 0}
"""


def small(tmp_path: Path, **overrides: Any) -> Config:
    (tmp_path / "small.yaml").write_text(SMALL)
    return load_config(tmp_path / "small.yaml", **overrides)


def options(tmp_path: Path, *more: str) -> list[str]:
    """Return the options of a small run in `run`."""
    small(tmp_path)
    return ["--config", str(tmp_path / "small.yaml"), "--out", str(tmp_path / "run"), *more]


def losses(folder: Path) -> dict[int, float]:
    """Return the losses by step; of a step that was done twice, the later one."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return {line["step"]: line["loss"] for line in lines}


KILLED = """
import os, random, signal, sys, time
import torch
from nsa import train
import nsa.training.run

config, out, seed, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
folder = out + "/checkpoints"
# What is imported late is imported here, so that the children get to their saves.
assert train.main(["--config", config, "--out", out + "-warm", "--save-every", "1", "--steps", "2", "--resume", "auto"]) == 0

def start():
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os._exit(train.main(["--config", config, "--out", out, "--save-every", "1", "--steps", str(steps), "--resume", "auto"]))
    return pid

def left():
    return os.listdir(folder) if os.path.isdir(folder) else []

began, pid = time.monotonic(), start()
while "latest" not in left():
    time.sleep(0.001)
until_saved = time.monotonic() - began  # on this machine, as busy as it is
choose, in_save = random.Random(seed), 0
def unfinished():
    return any(name.endswith((".partial", ".removed")) for name in left())

for kill in range(int(sys.argv[5])):
    time.sleep(choose.uniform(0.3, 1.5) * until_saved)
    while kill % 5 == 0 and not unfinished() and not os.path.exists(f"{folder}/step_{steps:08d}"):
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    in_save += unfinished()
    pid = start()
print("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "in_save", in_save)
"""


@pytest.mark.parametrize(("steps", "kills", "in_saves"), [(40, 3, 1), pytest.param(80, 50, 5, marks=pytest.mark.slow)])
def test_kills_at_random_moments_cost_nothing(
    warm: WarmPython, tmp_path: Path, steps: int, kills: int, in_saves: int
) -> None:
    small(tmp_path)
    config = str(tmp_path / "small.yaml")
    assert train.main(["--config", config, "--out", str(tmp_path / "whole"), "--steps", str(steps)]) == 0
    arguments = (config, str(tmp_path / "killed"), "1", str(steps), str(kills))
    done = warm.call("-c", KILLED, *arguments, cwd=ROOT, timeout=280)
    print(done.stderr[-3000:])
    *_, code, _, in_save = done.stdout.split()
    assert code == "0"
    assert int(in_save) >= in_saves  # in the middle of a save, or of a removal
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    saved = sorted(p.name for p in (tmp_path / "killed" / "checkpoints").iterdir())
    assert saved == ["latest", *(f"step_{n:08d}" for n in (steps - 2, steps - 1, steps))]


def test_the_last_step_is_saved_and_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step_00000009.partial").mkdir(parents=True)
    (folder / ".latest.0123456789abcdef.partial").write_text("step_0000")
    assert train.main(options(tmp_path, "--steps", "5", "--save-every", "3")) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_00000003", "step_00000005"]


def trained(config: Config, ranks: RankInfo, folder: Path, steps: int) -> tuple[Trainer, Position]:
    trainer = Trainer(config, ranks, folder)
    data = batches(open_source(config), Position(), config.train.batch_size, ranks.rank, ranks.world_size)
    position = Position()
    for _ in range(steps):
        batch = next(data)
        trainer.step([batch])
        position = batch.position
    trainer.read()
    return trainer, position


def save(config: Config, ranks: RankInfo, folder: Path, trainer: Trainer, position: Position) -> Path:
    """Return what was saved."""
    writer = checkpoint.Checkpointer(folder, config, ranks.rank, ranks.world_size)
    return writer.save(trainer.steps_done, trainer.model, trainer.optimizer, position)


@pytest.fixture
def one(tmp_path: Path) -> tuple[Trainer, Path]:
    """Train one step and save it."""
    trainer, position = trained(small(tmp_path), RankInfo(), tmp_path, 1)
    return trainer, save(trainer.config, RankInfo(), tmp_path / "checkpoints", trainer, position)


def full(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return weights and moments as one rank would have them."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, moments = get_state_dict(
        trainer.model,
        trainer.optimizer,
        options=StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
    )
    return {name: v.detach().clone() for name, v in {**weights, **moments}.items() if isinstance(v, torch.Tensor)}


@needs_fsdp2
@pytest.mark.parametrize("saved_by", ["fsdp", "ddp"])
@world_size(2)
@pytest.mark.timeout(60)
def test_another_parallelism_and_another_number_of_ranks(
    group: Group, artifacts: Path, rank_tmp_path: Path, saved_by: str
) -> None:
    ranks = RankInfo(rank=group.rank, world_size=2)
    folder = artifacts / "checkpoints"
    config = small(rank_tmp_path, **{"parallel.mode": saved_by})
    trainer, position = trained(config, ranks, artifacts, 3)
    expected = full(trainer)
    save(config, ranks, folder, trainer, position)
    torch.distributed.barrier()
    found = find(folder, "auto")
    assert describe(found).position.samples == 3 * 2 * 2
    random = torch.get_rng_state()
    other = {"fsdp": "ddp", "ddp": "fsdp"}[saved_by]
    for mode, ranks_then in ((saved_by, ranks), (other, ranks), ("none", RankInfo())):
        again = Trainer(small(rank_tmp_path, **{"parallel.mode": mode}), ranks_then, artifacts)
        torch.manual_seed(group.rank)
        checkpoint.load(found, again.config, again.model, again.optimizer, group.rank)
        assert torch.equal(torch.get_rng_state(), random)
        now = full(again)
        assert now.keys() == expected.keys()
        assert all(torch.equal(now[name], expected[name]) for name in expected)


def test_what_is_damaged_is_refused_by_name_and_the_one_before_is_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = options(tmp_path, "--save-every", "1")
    assert train.main([*command, "--steps", "3"]) == 0
    folder = tmp_path / "run" / "checkpoints"
    shard = folder / "step_00000003" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    capsys.readouterr()
    assert train.main([*command, "--steps", "4", "--resume", "auto"]) == 2
    first = capsys.readouterr().err
    assert first == (
        f"error: checkpoint '{folder / 'step_00000003'}': __0_0.distcp is damaged; "
        f"give --resume {folder / 'step_00000002'}, which is whole\n"
    )
    shard.unlink()
    assert "__0_0.distcp cannot be read (No such file or directory)" in damage(folder / "step_00000003")
    (folder / "latest").unlink()  # without the pointer, the newest is taken
    with pytest.raises(ConfigError, match=r"step_00000003.* cannot be read"):
        find(folder, "auto")
    assert train.main([*command, "--steps", "4", "--resume", str(folder / "step_00000002")]) == 0
    other = load_config(tmp_path / "small.yaml", dim=32)
    trainer = Trainer(other, RankInfo(), tmp_path)
    with pytest.raises(ConfigError, match=r"is of another model: model.dim=16 \(here 32\); use its configuration"):
        checkpoint.load(folder / "step_00000002", other, trainer.model, trainer.optimizer, 0)


def test_a_disk_without_room_is_named_by_the_systems_words(warm: WarmPython, tmp_path: Path) -> None:
    """On a file system of 500 KiB, in a new mount namespace."""
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "run").mkdir()
    command = ("nsa.train", "--config", "small.yaml", "--out", "run", "--save-every", "1", "--steps", "20")
    done = warm.call(*in_namespace(MOUNT, "mount -t tmpfs -o size=500k none run", *command), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert re.search(r"^error: step_\d+ could not be saved: .*No space left on device", done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "make room and use --resume auto" in done.stderr
    assert "inline_container" not in done.stderr


def test_what_is_kept_are_the_newest_of_this_run(tmp_path: Path) -> None:
    config = small(tmp_path, **{"checkpoint.keep": 2})
    trainer, position = trained(config, RankInfo(), tmp_path, 1)
    folder = tmp_path / "checkpoints"

    def saved_at(step: int) -> list[str]:
        trainer.steps_done = step
        save(config, RankInfo(), folder, trainer, position)
        return sorted(p.name for p in folder.iterdir())

    names = {n: f"step_{n:08d}" for n in (1, 2, 3, 80, 90)}
    for step in (80, 90):
        saved_at(step)
    # Another run in the same folder removes only its own, keeps the other's, and resumes from its own.
    assert saved_at(1) == ["latest", names[1], names[80], names[90]]
    assert find(folder, "auto") == folder / names[1]
    saved_at(2)
    (folder / (names[1] + ".removed")).mkdir()  # left by a kill
    (folder / (names[1] + ".removed") / "x").touch()
    assert saved_at(3) == ["latest", names[2], names[3], names[80], names[90]]
    (folder / "latest").write_text("step_00000004\n")  # it is gone: the one before it is taken
    assert find(folder, "auto") == folder / names[3]


def test_what_is_replaced_is_deleted_after_its_successor_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill in the seconds that a deletion takes must find a whole checkpoint."""
    config = small(tmp_path, **{"checkpoint.keep": 1})
    trainer, position = trained(config, RankInfo(), tmp_path, 1)
    folder = tmp_path / "checkpoints"
    save(config, RankInfo(), folder, trainer, position)
    there: list[Path | None] = []

    def removed(path: Path, ignore_errors: bool) -> None:
        if path.is_dir():
            there.append(find(folder, "auto"))

    monkeypatch.setattr(checkpoint.shutil, "rmtree", removed)
    save(config, RankInfo(), folder, trainer, position)
    assert there == [folder / "step_00000001"]


@pytest.mark.parametrize("text", ["", "step_00000000\n"])
def test_latest_that_is_before_every_checkpoint_is_no_new_run(one: tuple[Trainer, Path], text: str) -> None:
    folder = one[1].parent
    (folder / "latest").write_text(text)
    with pytest.raises(
        ConfigError, match=r"latest': names .*, which is before every checkpoint there; give --resume one"
    ):
        find(folder, "auto")


def test_a_place_in_other_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "texts" / "a.txt"
    text.parent.mkdir()
    text.write_text("some words " * 100)
    command = options(tmp_path, "--save-every", "1", "--dataset")
    assert train.main([*command, str(text), "--steps", "1"]) == 0
    elsewhere = tmp_path / "moved" / "a.txt"
    elsewhere.parent.mkdir()
    text.rename(elsewhere)
    resumed = ("--resume", "auto", "--steps")
    assert train.main([*command, str(elsewhere), *resumed, "2", "--set", "train.lr=2e-2"]) == 0
    assert "[train] resume: train.lr=0.02, and 0.01 before" in capsys.readouterr().out
    assert train.main([*command, "synthetic", *resumed, "3"]) == 2
    assert "its position in the data is for other files: 'a.txt' is not there any more" in capsys.readouterr().err
    elsewhere.write_text("other words " * 100)
    assert train.main([*command, str(elsewhere), *resumed, "3"]) == 2
    assert "is for other files: 'a.txt' has another content" in capsys.readouterr().err


def test_made_samples_follow_from_the_seed(tmp_path: Path, one: tuple[Trainer, Path]) -> None:
    with pytest.raises(ConfigError, match=r"is for seed=1234 \(here 5\)"):
        refuse_other_data(one[1], load_config(tmp_path / "small.yaml", seed=5))


def test_a_folder_with_a_training_is_not_taken_by_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = options(tmp_path, "--save-every", "1", "--steps")
    assert train.main([*command, "2"]) == 0
    before = {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}
    assert train.main([*command, "1", "--set", "train.seed=7"]) == 2
    assert "has a training; go on with it by --resume auto, or give another folder" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()} == before
    assert train.main([*command, "3", "--resume", "auto"]) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_held_out_loss_is_that_of_the_validation_set(warm: WarmPython, tmp_path: Path, ranks: int) -> None:
    (tmp_path / "held.md").write_text("the same words " * 300)
    (tmp_path / "text.md").write_text("the same words " * 300)
    small(tmp_path)
    command = [
        "--config", str(tmp_path / "small.yaml"), "--dataset", str(tmp_path / "text.md"), "--steps", "5",
        "--set", f"data.validation={tmp_path / 'held.md'}", "--set", "data.validate_every=2",
        "--set", "data.validation_samples=8", "--set", "train.lr=1e-30", "--set", "train.min_lr=0",
    ]  # fmt: skip
    out = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if ranks == 2 else []
    done = warm.call(*launcher, "-m", "nsa.train", *command, "--ddp", str(ranks - 1), "--out", str(out), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    held = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert held.keys() == {2, 4, 5}
    # Nothing is learnt at this rate, and the texts are the same: so is each loss, of 8 samples or of a step's.
    assert max(held.values()) - min(held.values()) < 1e-6
    assert abs(held[5] - sum(line["loss"] for line in lines) / 5) < 0.05
    assert "validation 5." in done.stdout


def test_sigterm_to_the_whole_group_saves_and_exits_with_75(warm: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL.replace("workers: 0", "workers: 1"))  # a reader must not die of SIGTERM
    command = ["-m", "nsa.train", "--config", str(tmp_path / "small.yaml"), "--steps", "100000", "--ddp", "1"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = warm.popen(*launcher, *command, "--out", str(tmp_path / "run"), cwd=ROOT, nursery=True, **pipes)
    for line in run.stdout:
        if "step 3/" in line:
            break
    run.send_signal(signal.SIGTERM)  # torchrun passes it on, to the process group of each rank
    out, _ = run.communicate(timeout=60)
    (stopped,) = (line for line in out.splitlines() if "stopped after step" in line)
    step = int(stopped.split("step ")[1].split(",")[0])
    described = describe(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
    assert (described.step, described.world_size, described.position.samples) == (step, 2, 4 * step)
    resumed = (*command[:-2], "--resume", "auto", "--out", str(tmp_path / "run"))
    alone = warm.popen(*resumed, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    first = next(line for line in alone.stdout if "] step " in line)
    assert first.startswith(f"[train] step {step + 1}/")
    os.killpg(alone.pid, signal.SIGTERM)
    alone.communicate(timeout=60)
    assert alone.returncode == 75


def test_a_checkpoint_has_the_model_s_weights(one: tuple[Trainer, Path]) -> None:
    trainer, saved = one
    model, described = checkpoint.load_model(saved)
    assert ModelConfig(**described.model) == trainer.config.model
    weights = dict(model.named_parameters())
    assert weights.keys() == dict(trainer.module.named_parameters()).keys()
    assert all(torch.equal(weights[name], parameter) for name, parameter in trainer.module.named_parameters())
    with pytest.raises(ConfigError, match=f"give a checkpoint, as {saved}"):
        checkpoint.load_model(saved.parent / "latest")
    (saved / "checkpoint.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a checkpoint of this program"):
        checkpoint.load_model(saved)


def test_a_resumed_run_waits_for_ranks_that_still_write(
    warm: WarmPython, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small(tmp_path)
    out = tmp_path / "run"
    command = ("-m", "nsa.train", "--config", str(tmp_path / "small.yaml"), "--out", str(out), "--steps", "1000000")
    first = warm.popen(*command, cwd=ROOT, stdout=subprocess.PIPE)
    assert next(line for line in first.stdout if "first batch" in line)
    train.wait_for_earlier_ranks(out, 0.1)
    assert f"process {first.pid} of an earlier start" in capsys.readouterr().out
    ends = threading.Thread(target=first.kill)
    ends.start()
    train.wait_for_earlier_ranks(out, 60)
    ends.join()
    first.communicate()
    assert first.returncode == -signal.SIGKILL
