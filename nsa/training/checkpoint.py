"""Checkpoints: everything a run needs to continue, by torch.distributed.checkpoint: each rank writes its share.

``checkpoints/step_00000003/`` is written as ``step_00000003.partial``, renamed when it is complete, and then named in ``latest``:
a rank that is killed at any moment leaves a complete checkpoint. Its ``checkpoint.json`` lists the content, with the size
and CRC-32 of each file. It can be loaded with another number of ranks, and another way to share the model.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from nsa.config import Config, ConfigError, model_config
from nsa.data.packing import Position
from nsa.data.sources import identity
from nsa.model.transformer import build_model
from nsa.trace.files import write_atomically
from nsa.training.safe_reader import SafePlanner, SafeReader
from nsa.training.saved import (
    DESCRIPTION,
    SCHEMA,
    Description,
    as_json,
    describe,
    refuse_another_model,
    refuse_damaged,
    saved_in,
    size_and_crc,
)


class Checkpointer:
    """Saves into ``folder``. Its creation and each of its calls are collectives of all ranks."""

    def __init__(self, folder: Path, config: Config, rank: int, world_size: int) -> None:
        self.folder, self.config, self.rank, self.world_size = folder, config, rank, world_size
        self._data = identity(config)
        needs_gloo = dist.is_initialized() and dist.get_backend() != "gloo"  # dcp uses the CPU
        self._group = dist.new_group(backend="gloo") if needs_gloo else None
        if rank == 0:
            for left in (*folder.glob("step_*.partial"), *folder.glob("step_*.removed")):
                shutil.rmtree(left, ignore_errors=True)
            for left in folder.glob(".latest.*.partial"):  # of a process that was killed while it wrote
                left.unlink(missing_ok=True)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> Path:
        """Write the state after ``step``, and return where.

        Raises ConfigError on all ranks where one cannot write; the checkpoints before it are unchanged then.
        """
        target = self.folder / f"step_{step:08d}"
        partial = target.with_suffix(".partial")
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "random": _random_state(self.rank)}
        _ignore_single_process_warning()
        description = Description(
            step, position, self.world_size, self.config.parallel.mode, dataclasses.asdict(self.config.model),
            self._data, as_json(self.config), torch.__version__, {},
        )  # fmt: skip
        outcome = [""]
        try:
            writer = dcp.FileSystemWriter(partial)  # makes the folder, and shares a failure with all ranks
            dcp.save(state, storage_writer=writer, process_group=self._group)
            if self.rank == 0:
                self._name(partial, target, description)
        except (OSError, CheckpointException) as error:
            outcome = [_why_not_saved(error, partial)]
        if dist.is_initialized():
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[0]:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            reason = " ".join(outcome[0].split())[:200]
            raise ConfigError(f"{target.name} could not be saved: {reason}; make room and use --resume auto")
        return target

    def _name(self, partial: Path, target: Path, description: Description) -> None:
        files = {path.name: size_and_crc(path) for path in sorted(partial.iterdir())}
        described = dataclasses.asdict(dataclasses.replace(description, files=files))
        text = json.dumps({"schema": SCHEMA, **described}, indent=1) + "\n"
        write_atomically(partial / DESCRIPTION, text, synced=True)
        # A run that was resumed from an earlier step reaches this one again. Deleting the older one takes time: it is last.
        replaced = _set_aside(target) if target.exists() else None
        partial.rename(target)
        write_atomically(self.folder / "latest", target.name + "\n", follow=True, synced=True)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        # Checkpoints of later steps are another run's, or will be written again.
        saved = [path for path in saved_in(self.folder) if path <= target]
        for old in saved[: -self.config.checkpoint.keep]:
            with contextlib.suppress(OSError):
                shutil.rmtree(_set_aside(old), ignore_errors=True)


def _reason(error: BaseException) -> str:
    """Return what dcp gathered from all ranks, or the error itself."""
    causes = getattr(error, "failures", {}).values()  # of CheckpointException: (exception, traceback) by rank
    return "; ".join(sorted({str(cause[0]) for cause in causes})) or str(error) or type(error).__name__


def _why_not_saved(error: BaseException, folder: Path) -> str:
    """Return the reason; if torch's writer failed, the system's error for a write to this disk."""
    text = _reason(error)
    # On a full disk torch's writer reports its own position ("unexpected pos 704 vs 598"), and not the system's message.
    return (_disk_error(folder) if "inline_container" in text else "") or text


def _disk_error(folder: Path) -> str:
    """Return the system's error, such as 'No space left on device', if a further MiB cannot be written to ``folder``; else ''."""
    probe = folder / "room"
    try:
        probe.write_bytes(bytes(1 << 20))
    except OSError as error:
        return error.strerror or ""
    finally:
        probe.unlink(missing_ok=True)
    return ""


def load_model(path: str | os.PathLike[str]) -> tuple[nn.Module, Description]:
    """Return the model of a checkpoint (a step_* folder) on the CPU, and its description. Raises ConfigError if it is damaged."""
    path = Path(path)
    refuse_damaged(path)
    described = describe(path)
    model = build_model(Config(model=model_config(described.model, f"checkpoint {str(path)!r}")))
    state = {"model": model.state_dict()}
    _metadata(path)
    read(path, state)
    model.load_state_dict(state["model"])
    return model, described


def _metadata(path: Path) -> Metadata:
    """Return the metadata of the shards. Raises ConfigError if it cannot be unpickled, or would run code."""
    try:
        return SafeReader(path).read_metadata()
    except (pickle.UnpicklingError, OSError) as error:
        raise ConfigError(f"checkpoint {str(path)!r}: .metadata cannot be read ({error}); give another one") from None


def load(path: Path, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Restore model, optimizer and this rank's random state; a collective. Raises ConfigError for a model of another shape."""
    refuse_another_model(path, config)
    weights, moments = get_state_dict(model, optimizer)
    # The optimizer's implementation (fused on a GPU, for example) stays this trainer's, and is not the checkpoint's.
    ways = [{way: group.get(way) for way in ("fused", "foreach", "capturable")} for group in moments["param_groups"]]
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    saved = _metadata(path).state_dict_metadata
    random = {name: value for name, value in _random_state(rank).items() if f"random.{name}" in saved}
    if random:  # ranks that did not exist when it was saved have none
        state["random"] = random
    read(path, state)
    for group, way in zip(state["optimizer"]["param_groups"], ways, strict=True):
        group.update(way)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    _restore_random_state(rank, state.get("random", {}))


def read(path: Path, state: dict[str, Any]) -> None:
    """Fill ``state`` from the shards, in place; a collective. Raises ConfigError if they lack a part of it."""
    _ignore_single_process_warning()
    try:
        dcp.load(state, storage_reader=SafeReader(path), planner=SafePlanner())
    except CheckpointException as error:
        reason = " ".join(_reason(error).split())[:200]
        raise ConfigError(f"checkpoint {str(path)!r}: cannot be loaded ({reason}); give another one") from None


def _ignore_single_process_warning() -> None:
    """Ignore torch's warning at every save and load of a single process, and one that torch 2.6 gives of its code."""
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled, )?unavailable or uninitialized")
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated", module="torch.distributed.checkpoint")


def _random_state(rank: int) -> dict[str, torch.Tensor]:
    state = {f"cpu_{rank}": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state[f"cuda_{rank}"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(rank: int, state: dict[str, torch.Tensor]) -> None:
    if f"cpu_{rank}" in state:
        torch.set_rng_state(state[f"cpu_{rank}"])
    if f"cuda_{rank}" in state:
        torch.cuda.set_rng_state(state[f"cuda_{rank}"])


def _set_aside(folder: Path) -> Path:
    """Rename a checkpoint that is to be deleted, as half of one must not look whole. Return its new name."""
    doomed = folder.with_suffix(".removed")
    shutil.rmtree(doomed, ignore_errors=True)
    return folder.rename(doomed)
