"""Checkpoints: everything a run needs to go on, by torch.distributed.checkpoint: each rank writes its share.

``checkpoints/step_00000003/`` is written as ``step_00000003.partial`` and renamed when whole, then ``latest`` is made to name
it: a rank that is killed at any moment leaves a whole one behind. Its ``checkpoint.json`` lists what is in it, with the size
and CRC-32 of each file. It can be loaded by another number of ranks, and under another way to share the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict

from nsa.config import Config, ConfigError, ModelConfig, model_config
from nsa.data.packing import Position
from nsa.trace.files import write_atomically
from nsa.trace.strict_json import to_json
from nsa.training.safe_reader import SafePlanner, SafeReader, is_name, open_file, read_file

SCHEMA = 1
DESCRIPTION = "checkpoint.json"
_CHUNK = 1 << 24  # bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """The contents of ``checkpoint.json``. ``files``: (bytes, CRC-32) by name; ``finite``: loss and gradients of the step were."""

    step: int
    position: Position
    world_size: int
    parallel: str
    model: dict[str, Any]
    data: dict[str, Any]
    torch: str
    files: dict[str, tuple[int, int]]
    finite: bool = True


class Checkpointer:
    """Saves into ``folder``; made by all ranks together, and each call is a collective of theirs.

    ``asynchronous``: `save` returns once the state is copied to host memory; when `is_written` is true on all ranks, they
    call `finish`. ``on_saved(path)`` is called on rank 0, ``on_failed(reason)`` on every rank, with the same reason; a save
    that failed leaves those before it as they were.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        rank: int,
        world_size: int,
        on_saved: Callable[[Path], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self.folder, self.config, self.rank, self.world_size = folder, config, rank, world_size
        self.on_saved, self.on_failed = on_saved, on_failed
        self._running: tuple[Future[Any], Path, Description] | None = None
        # Its own group: the writing thread's collectives must not mix with those of the training; and on CPU, as dcp's are.
        is_apart = dist.is_initialized() and (config.checkpoint.asynchronous or dist.get_backend() != "gloo")
        self._group = dist.new_group(backend="gloo") if is_apart else None
        if rank == 0:
            for left in (*folder.glob("step_*.partial"), *folder.glob("step_*.removed")):
                shutil.rmtree(left, ignore_errors=True)

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position, *, finite: bool = True
    ) -> None:
        """Write the state after ``step``, of which ``finite`` is kept. A save that still runs is waited for first."""
        self.finish()
        partial = self.folder / f"step_{step:08d}.partial"
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "random": _random_state(self.rank)}
        _be_quiet_about_one_process()
        description = Description(
            step, position, self.world_size, self.config.parallel.mode, dataclasses.asdict(self.config.model),
            data_settings(self.config), torch.__version__, {}, finite,
        )  # fmt: skip
        try:
            writer = dcp.FileSystemWriter(partial)  # makes the folder, and shares a failure with all ranks
            if self.config.checkpoint.asynchronous:
                running = dcp.async_save(state, storage_writer=writer, process_group=self._group)
                assert isinstance(running, Future)
                self._running = running, partial, description
                return
            dcp.save(state, storage_writer=writer, process_group=self._group)
            reason = ""
        except (OSError, CheckpointException) as error:
            reason = _why_not_saved(error, partial)
        self._end(partial, description, reason)

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing more to do for a save that runs; False when none does."""
        return self._running is not None and self._running[0].done()

    def finish(self) -> None:
        """Wait for a save that runs, and name it, or report its failure."""
        if self._running is None:
            return
        running, partial, description = self._running
        self._running, reason = None, ""
        try:
            running.result()
        except (OSError, CheckpointException) as error:
            reason = _why_not_saved(error, partial)
        self._end(partial, description, reason)

    def _end(self, partial: Path, description: Description, reason: str) -> None:
        """All ranks have written, or know that one could not; rank 0 names what is whole, and all ranks receive the outcome."""
        target = partial.with_suffix("")
        if self.rank == 0 and not reason:
            try:
                self._name(partial, target, description)
            except OSError as error:
                reason = str(error)
        heard = [reason]
        if dist.is_initialized():
            dist.broadcast_object_list(heard, src=0, group=self._group)
        if heard[0]:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            self.on_failed(f"{target.name} could not be saved: {' '.join(heard[0].split())[:200]}")
        elif self.rank == 0:
            self.on_saved(target)

    def _name(self, partial: Path, target: Path, description: Description) -> None:
        files = {path.name: _size_and_crc(path) for path in sorted(partial.iterdir())}
        described = dataclasses.asdict(dataclasses.replace(description, files=files))
        write_atomically(partial / DESCRIPTION, to_json({"schema": SCHEMA, **described}, indent=1) + "\n", synced=True)
        if target.exists():  # a run that went on from an earlier step comes here again
            _remove(target)
        partial.rename(target)
        write_atomically(self.folder / "latest", target.name + "\n", follow=True, synced=True)
        # Those of later steps are another run's, or will be written again.
        saved = [path for path in _saved(self.folder) if path <= target]
        last_finite = next((path for path in reversed(saved) if is_finite(path)), None)
        for old in saved[: -self.config.checkpoint.keep]:
            if old != last_finite:
                with contextlib.suppress(OSError):
                    _remove(old)


def _reason(error: BaseException) -> str:
    """Return what dcp gathered from all ranks, or the error itself."""
    causes = getattr(error, "failures", {}).values()  # of CheckpointException: (exception, traceback) by rank
    return "; ".join(sorted({str(cause[0]) for cause in causes})) or str(error) or type(error).__name__


def _why_not_saved(error: BaseException, folder: Path) -> str:
    """Return the reason; where torch's writer failed, what the disk refuses."""
    text = _reason(error)
    # On a full disk torch's writer reports its own position ("unexpected pos 704 vs 598"), and not what the system said.
    return (_what_the_disk_refuses(folder) if "inline_container" in text else "") or text


def _what_the_disk_refuses(folder: Path) -> str:
    """Return the system's words where a further MiB in ``folder`` cannot be written, as 'No space left on device'; else ''."""
    probe = folder / "room"
    try:
        probe.write_bytes(bytes(1 << 20))
    except OSError as error:
        return error.strerror or ""
    finally:
        probe.unlink(missing_ok=True)
    return ""


def find(folder: Path, resume: str, *, verify: bool = True) -> Path | None:
    """Return the checkpoint that ``--resume`` means: none, the newest in ``folder`` (auto), or the one named.

    ``verify`` reads it all. Raises ConfigError for one that is damaged, naming it and the whole one before it.
    """
    if resume == "none":
        return None
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir():
            raise ConfigError(f"--resume {resume!r}: no such folder; give auto, none or a checkpoint (step_*)")
    else:
        saved = _saved(folder)
        if (folder / "latest").exists():
            named = folder / read_file(folder / "latest").decode(errors="replace").strip()
            saved = [path for path in saved if path <= named]  # those of later steps are not this run's
        if not saved:
            return None
        path = saved[-1]
    wrong = damage(path) if verify else ""
    if wrong:
        before = next((p for p in reversed(_saved(path.parent)) if p < path and not damage(p)), None)
        advice = f"give --resume {before}, which is whole" if before else "no whole one is before it"
        raise ConfigError(f"checkpoint {str(path)!r}: {wrong}; {advice}")
    return path


def damage(path: Path) -> str:
    """Return what is wrong with a checkpoint's files, '' when nothing is. Reads all of them."""
    try:
        described = describe(path)
    except ConfigError as error:
        return str(error).partition(": ")[2]
    for name, (size, crc) in described.files.items():
        try:
            found = _size_and_crc(path / name, size)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != (size, crc):
            return (
                f"{name} is damaged ({found[0]} bytes, {size} were written)"
                if found[0] != size
                else f"{name} is damaged"
            )
    return ""


def describe(path: Path) -> Description:
    """Return what is in a checkpoint. ConfigError for a folder that is not one."""
    try:
        fields = json.loads(read_file(path / DESCRIPTION))
        if fields.pop("schema") != SCHEMA:
            raise ValueError
        files = {name: (int(size), int(crc)) for name, (size, crc) in fields.pop("files").items()}
        position = Position.from_json(fields.pop("position"))
        described = Description(**fields, position=position, files=files)
        numbers = [
            described.step,
            position.samples,
            position.tokens,
            position.bad_rows,
            *dataclasses.astuple(position.place),
        ]
        if not all(isinstance(n, int) and n >= 0 for n in numbers) or not all(map(is_name, files)):
            raise ValueError
        return dataclasses.replace(described, model=dict(described.model), data=dict(described.data))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ConfigError(
            f"checkpoint {str(path)!r}: is not a checkpoint of this program; give a step_* folder that --save-every wrote"
        ) from None


def is_finite(path: Path) -> bool:
    """Return whether it is a checkpoint of a step with finite loss and gradients; its other files are not read."""
    try:
        return describe(path).finite
    except ConfigError:
        return False


def newest_finite(folder: Path, before: int) -> Path | None:
    """Return the newest checkpoint in ``folder`` of a step below ``before``, with finite loss and gradients, if any."""
    return next((path for path in reversed(_saved(folder)) if is_finite(path) and describe(path).step < before), None)


def load_model(path: Path) -> tuple[nn.Module, Description]:
    """Return the model of a checkpoint (a step_* folder) on the CPU, and what else is in it. ConfigError for a damaged one."""
    from nsa.model.transformer import build_model

    found = find(path.parent, str(path))
    assert found is not None
    described = describe(found)
    shape = model_config(described.model, f"checkpoint {str(path)!r}")
    _check_shapes(found, shape)
    model = build_model(Config(model=shape))
    state = {"model": model.state_dict()}
    read(found, state)
    model.load_state_dict(state["model"])
    return model, described


def _metadata(path: Path) -> Metadata:
    """Return what its shards hold. ConfigError for what cannot be unpickled, or would run code."""
    try:
        return SafeReader(path).read_metadata()
    except (pickle.UnpicklingError, OSError) as error:
        raise ConfigError(f"checkpoint {str(path)!r}: .metadata cannot be read ({error}); give another one") from None


def _check_shapes(path: Path, shape: ModelConfig) -> None:
    """ConfigError where a checkpoint's shards do not hold a model of this shape: it is not built, however large it claims to be."""
    from nsa.model.transformer import build_model

    saved = {name: entry for name, entry in _metadata(path).state_dict_metadata.items() if name.startswith("model.")}
    layers = {name.split(".")[2] for name in saved if name.startswith("model.blocks.")}
    if len(layers) != shape.n_layers:
        raise ConfigError(
            f"checkpoint {str(path)!r}: {DESCRIPTION} has n_layers={shape.n_layers}, and its weights are of {len(layers)} layers; "
            "give another one"
        )
    wanted = {f"model.{k}": v for k, v in build_model(Config(model=shape), torch.device("meta")).state_dict().items()}
    for name, tensor in wanted.items():
        size = getattr(saved.get(name), "size", None)
        if size != tensor.shape:
            there = "is missing" if size is None else f"is {list(size)}"
            raise ConfigError(
                f"checkpoint {str(path)!r}: {name} {there}, and must be {list(tensor.shape)} by {DESCRIPTION}; give another one"
            )
    held, needed = sum(p.stat().st_size for p in path.iterdir()), sum(t.numel() for t in wanted.values())
    if needed > held:  # a weight has 2 bytes or more
        raise ConfigError(
            f"checkpoint {str(path)!r}: its files have {held} bytes, too few for {needed} weights; give another one"
        )


def data_settings(config: Config) -> dict[str, Any]:
    """Return what the position in the data depends on."""
    return {"seq_len": config.train.seq_len, "dataset": config.data.dataset, "tokenizer": config.data.tokenizer}


def refuse_other_data(path: Path, config: Config) -> None:
    """ConfigError where ``config`` reads other samples than the run that wrote the checkpoint: its position means nothing."""
    other = _differences(describe(path).data, data_settings(config))
    if other:
        raise ConfigError(f"checkpoint {str(path)!r}: its place in the data is of {other}; go on with the same")


def _differences(saved: dict[str, Any], mine: dict[str, Any], prefix: str = "") -> str:
    return ", ".join(
        f"{prefix}{name}={value!r} (here {mine.get(name)!r})"
        for name, value in saved.items()
        if mine.get(name) != value
    )


def load(path: Path, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Restore model, optimizer and this rank's random state; a collective. ConfigError for a model of another shape."""
    described = describe(path)
    _refuse_another_model(path, described, config)
    weights, moments = get_state_dict(model, optimizer)
    # How it computes is this trainer's, whatever wrote the checkpoint: fused on a GPU, for example.
    ways = [{way: group.get(way) for way in ("fused", "foreach", "capturable")} for group in moments["param_groups"]]
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    saved = _metadata(path).state_dict_metadata
    has_moments = any(name.startswith("optimizer.state.") for name in saved)
    if not has_moments:  # no step before it made an update: drop the state that `get_state_dict` has made
        del state["optimizer"]
        optimizer.state.clear()
    random = {name: value for name, value in _random_state(rank).items() if f"random.{name}" in saved}
    if random:  # ranks beyond those that saved have none
        state["random"] = random
    read(path, state)
    if has_moments:
        for group, way in zip(state["optimizer"]["param_groups"], ways, strict=True):
            group.update(way)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        set_model_state_dict(model, state["model"])
    _restore_random_state(rank, state.get("random", {}))


def read(path: Path, state: dict[str, Any]) -> None:
    """Fill ``state`` from the shards, in place; a collective. ConfigError where they do not hold it."""
    _be_quiet_about_one_process()
    try:
        dcp.load(state, storage_reader=SafeReader(path), planner=SafePlanner())
    except CheckpointException as error:
        reason = " ".join(_reason(error).split())[:200]
        raise ConfigError(f"checkpoint {str(path)!r}: cannot be loaded ({reason}); give another one") from None


def _refuse_another_model(path: Path, described: Description, config: Config) -> None:
    free = {"backend", "force_branch", "stop_gate_gradient"}  # how it is computed, not what it is
    saved = {name: value for name, value in described.model.items() if name not in free}
    other = _differences(saved, dataclasses.asdict(config.model), "model.")
    if other:
        raise ConfigError(f"checkpoint {str(path)!r}: is of another model: {other}; use its configuration")


def _be_quiet_about_one_process() -> None:
    """Torch warns of every save and load of a process that is alone."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


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


def _saved(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.suffix == "" and path.is_dir())


def _remove(folder: Path) -> None:
    """Renamed first: half of a checkpoint must not look like one."""
    doomed = folder.with_suffix(".removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _size_and_crc(path: Path, most: int | None = None) -> tuple[int, int]:
    """Return bytes and CRC-32 of a file; of one that has more than ``most`` bytes, or fewer, only how many."""
    size, crc = 0, 0
    with open_file(path) as file:
        there = os.fstat(file.fileno()).st_size
        if most not in (None, there):
            return there, 0
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc
