"""Checkpoints: everything a run needs to go on, written beside and renamed, loaded with ``weights_only=True``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nsa.config import ConfigError

KEEP = 3
FIELDS = {"step", "batches", "model", "optimizer", "rng"}


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, batches: int, rank: int
) -> Path | None:
    """Write ``step_{N}.pt`` and point ``latest`` at it; every rank calls this, rank 0 writes.

    Under FSDP the full state is gathered (a collective). The oldest beyond KEEP are removed.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    if rank != 0:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "batches": batches,
        "model": weights,
        "optimizer": moments,
        "rng": torch.get_rng_state(),
    }
    target = folder / f"step_{step:08d}.pt"
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(target)
    pointer = folder / "latest.partial"
    pointer.write_text(target.name + "\n", encoding="utf-8")
    pointer.rename(folder / "latest")
    for old in sorted(folder.glob("step_*.pt"))[:-KEEP]:
        old.unlink()
    return target


def find(folder: Path, resume: str) -> Path | None:
    """The checkpoint that ``--resume`` means: none, the newest in ``folder`` (auto), or the one named."""
    if resume == "none":
        return None
    if resume != "auto":
        path = Path(resume)
        if not path.is_file():
            raise ConfigError(f"--resume {resume!r}: no such file; give auto, none or a checkpoint (step_*.pt)")
        return path
    pointer = folder / "latest"
    if not pointer.is_file():
        return None
    path = folder / pointer.read_text(encoding="utf-8").strip()
    if not path.is_file():
        raise ConfigError(f"--resume auto: {pointer} names {path.name}, which is not there; give --resume PATH")
    return path


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Restore model, optimizer and RNG; returns (step, batches taken). ConfigError for a file that is no checkpoint."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"checkpoint {str(path)!r}: cannot be read ({reason}); give --resume with another one"
        ) from None
    if not isinstance(state, dict) or set(state) != FIELDS:
        raise ConfigError(
            f"checkpoint {str(path)!r}: is no checkpoint of this program; give a step_*.pt that --save-every wrote"
        )
    options = StateDictOptions(full_state_dict=True)
    try:
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
        )
    except (KeyError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"checkpoint {str(path)!r}: does not fit this model ({reason}); use its configuration"
        ) from None
    torch.set_rng_state(state["rng"])
    return int(state["step"]), int(state["batches"])
