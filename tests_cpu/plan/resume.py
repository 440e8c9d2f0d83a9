"""The plan's row on checkpoints: a training that is killed and resumed has the losses that it would have had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.training.run import PREEMPTED
from tests_cpu.sockets import free_port

if TYPE_CHECKING:
    from pytest_nsa.fixtures import Group

SAVED, MORE = 4, 3  # the step of the checkpoint, and the steps after it that are done twice
STEPS = 10_000  # never reached: the training is ended


def kill_and_resume(config: Path, settings: Mapping[str, Any], group: Group, folder: Path) -> None:
    """Train by ``nsa.train``, one process for each rank; end all of them by SIGKILL after a checkpoint, and resume from that.

    Assert that the steps after it have the losses that they had before, to the bit, and that SIGTERM ends the second training with
    a checkpoint.
    """
    killed, resumed = folder / "killed", folder / "resumed"
    checkpoint = killed / "checkpoints" / f"step_{SAVED:08d}"
    command = [sys.executable, "-m", "nsa.train", f"--config={config}", f"--steps={STEPS}", f"--save-every={SAVED}"]
    # As this rank's group: its GPU is the only one that the process sees.
    command.append(f"--device={group.device.partition(':')[0]}")
    settings = {**settings, "parallel.backend": group.backend}
    given = {name: value for name, value in settings.items() if name != "train.steps"}
    command += [f"--set={n}={value if isinstance(value, str) else json.dumps(value)}" for n, value in given.items()]
    first = _until(SAVED + MORE, [*command, "--out", str(killed)], group, killed, signal.SIGKILL)
    assert first == -signal.SIGKILL
    assert checkpoint.is_dir(), f"{SAVED + MORE} steps are done, and {checkpoint} is not there"
    again = [*command, "--out", str(resumed), "--resume", str(checkpoint)]
    second = _until(SAVED + MORE, again, group, resumed, signal.SIGTERM)
    assert second == PREEMPTED, f"SIGTERM ends the resumed training with {second}: see {resumed}.log"
    before, after = _losses(killed), _losses(resumed)
    assert min(after) == SAVED + 1
    twice = before.keys() & after.keys()
    assert len(twice) >= MORE
    for step in sorted(twice):
        assert after[step] == before[step], (
            f"step {step}: loss {after[step]!r} after resuming, {before[step]!r} before the kill"
        )
    print(
        f"steps {min(twice)} to {max(twice)} have the same losses, to the bit, after SIGKILL and --resume", flush=True
    )


def _until(step: int, command: list[str], group: Group, out: Path, ending: signal.Signals) -> int:
    """Run this rank's process of a training until ``step`` is done, and send it ``ending``; return how it ended, as all have."""
    ours = {
        "RANK": group.rank, "WORLD_SIZE": group.world_size, "LOCAL_WORLD_SIZE": group.world_size, "LOCAL_RANK": _local_rank(group),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(group),
    }  # fmt: skip
    with out.with_suffix(f".rank{group.rank}.log").open("wb") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **{name: str(value) for name, value in ours.items()}}, stdout=log, stderr=log
        )
        try:
            while max(_losses(out), default=0) < step:
                assert process.poll() is None, f"nsa.train ends with {process.returncode}: see {log.name}"
                time.sleep(0.01)
            group.barrier()  # before any is ended, all have seen the step
            process.send_signal(ending)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
    group.barrier()
    return code


def _local_rank(group: Group) -> int:
    """Return the number by which ``nsa.train`` takes the GPU of this rank."""
    import torch

    return group.rank if group.device == "cpu" else torch.device(group.device).index or 0


def _free_port(group: Group) -> int:
    """Return one port for all ranks, of rank 0's choice."""
    import torch
    import torch.distributed as dist

    port = torch.tensor([free_port() if group.rank == 0 else 0], device=group.device)
    dist.broadcast(port, src=0)
    return int(port)


def _losses(out: Path) -> dict[int, float]:
    """Return the loss of each step that a training has written, whole lines alone."""
    try:
        text = (out / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"]: line["loss"] for line in lines}
