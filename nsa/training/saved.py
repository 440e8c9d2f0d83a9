"""Checkpoints on the disk: which one a run resumes from, whether it is complete, and its description.

Without torch, so that an unusable checkpoint is refused before torch is imported.
"""

import dataclasses
import json
import re
import zlib
from pathlib import Path
from typing import Any

from nsa.config import Config, ConfigError, shown
from nsa.data.packing import Position
from nsa.data.sources import identity

SCHEMA = 3
DESCRIPTION = "checkpoint.json"
_CHUNK = 1 << 24  # bytes


def is_name(name: Any) -> bool:
    """Return whether a value is a file's name without a path."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """The content of ``checkpoint.json``. ``files``: (bytes, CRC-32) by name."""

    step: int
    position: Position
    world_size: int
    parallel: str
    model: dict[str, Any]
    data: dict[str, Any]
    train: dict[str, Any]
    torch: str
    files: dict[str, tuple[int, int]]


def find(folder: Path, resume: str, *, verify: bool = True) -> Path | None:
    """Return the checkpoint for ``--resume``: None for 'none', the newest in ``folder`` for 'auto', else the one at this path.

    ``verify``: read all of it. Raises ConfigError for a damaged one, with its path and that of the last undamaged one before it.
    """
    if resume == "none":
        return None
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir():
            raise ConfigError(f"--resume {resume!r}: no such folder; give auto, none or a checkpoint (step_*)")
    else:
        saved = saved_in(folder)
        if (folder / "latest").exists():
            named = folder / (folder / "latest").read_text(errors="replace").strip()
            of_this_run = [path for path in saved if path <= named]  # checkpoints of later steps are another run's
            if saved and not of_this_run:
                raise ConfigError(
                    f"{str(folder / 'latest')!r}: names {shown(named.name)}, which is before every checkpoint there; "
                    f"give --resume one of them, as {saved[-1]}, or another folder with --out"
                )
            saved = of_this_run
        if not saved:
            return None
        path = saved[-1]
    if verify:
        refuse_damaged(path, "--resume ")
    return path


def refuse_damaged(path: Path, option: str = "") -> None:
    """ConfigError for a checkpoint that is damaged, naming it and the whole one before it. ``option``: what gives a path."""
    wrong = damage(path)
    if wrong:
        before = next((p for p in reversed(saved_in(path.parent)) if p < path and not damage(p)), None)
        advice = f"give {option}{before}, which is whole" if before else "no whole one is before it"
        raise ConfigError(f"checkpoint {str(path)!r}: {wrong}; {advice}")


def damage(path: Path) -> str:
    """Return what is wrong with a checkpoint's files; '' if they are undamaged. Reads all of them."""
    try:
        described = describe(path)
    except ConfigError as error:
        return str(error).partition(": ")[2]
    for name, (size, crc) in described.files.items():
        try:
            found = size_and_crc(path / name)
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
    """Return the description of a checkpoint. Raises ConfigError for a folder that is no checkpoint, or a damaged description."""
    try:
        fields = json.loads((path / DESCRIPTION).read_bytes())
        if fields.pop("schema") != SCHEMA:
            raise ValueError
        files = {name: (int(size), int(crc)) for name, (size, crc) in fields.pop("files").items()}
        position = Position.from_json(fields.pop("position"))
        described = Description(**fields, position=position, files=files)
        if not all(map(is_name, files)):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        newest = next(reversed(saved_in(path.parent)), None) if path.name == "latest" else None
        advice = f"give a checkpoint, as {newest}" if newest else "give a step_* folder that --save-every wrote"
        raise ConfigError(f"checkpoint {str(path)!r}: is not a checkpoint of this program; {advice}") from None
    numbered = re.fullmatch(r"step_(\d+)", path.name)
    if numbered and int(numbered[1]) != described.step:
        raise ConfigError(f"checkpoint {str(path)!r}: {DESCRIPTION} is of step {described.step}")
    return described


def refuse_other_data(path: Path, config: Config) -> None:
    """Raise ConfigError if ``config`` reads other samples than the run that wrote the checkpoint, whose position is then wrong."""
    saved, mine = describe(path).data, identity(config)
    other = _differences({name: v for name, v in saved.items() if name != "files"}, mine)
    then, now = saved.get("files", {}), mine.get("files", {})
    changed = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if changed and not other:
        name = changed[0]
        what = "is not there any more" if name not in now else "is new" if name not in then else "has another content"
        other = f"other files: {shown(name)} {what}"
    if other:
        raise ConfigError(f"checkpoint {str(path)!r}: its position in the data is for {other}; use the same data")


def other_settings(path: Path, config: Config) -> list[str]:
    """Return a line for each setting of the training that differs from the checkpoint's."""
    saved, mine = describe(path).train, as_json(config)
    return [
        f"train.{name}={mine[name]!r}, and {saved.get(name)!r} before" for name in mine if saved.get(name) != mine[name]
    ]


def as_json(config: Config) -> dict[str, Any]:
    """Return the training's settings as JSON reads them."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config.train)))
    return found


def _differences(saved: dict[str, Any], mine: dict[str, Any], prefix: str = "") -> str:
    return ", ".join(
        f"{prefix}{name}={value!r} (here {mine.get(name)!r})"
        for name, value in saved.items()
        if mine.get(name) != value
    )


def refuse_trained(folder: Path) -> None:
    """Raise ConfigError for a run's folder that has steps or checkpoints, which another run would replace."""
    metrics = folder / "metrics.jsonl"
    has_steps = metrics.is_file() and metrics.stat().st_size > 0
    if has_steps or saved_in(folder / "checkpoints"):
        raise ConfigError(
            f"--out {str(folder)!r}: has a training; go on with it by --resume auto, or give another folder"
        )


def refuse_another_model(path: Path, config: Config) -> None:
    """Raise ConfigError if a checkpoint has a model of another shape."""
    free = {"backend", "force_branch", "stop_gate_gradient"}  # may differ: the shape does not depend on them
    saved = {name: value for name, value in describe(path).model.items() if name not in free}
    other = _differences(saved, dataclasses.asdict(config.model), "model.")
    if other:
        raise ConfigError(f"checkpoint {str(path)!r}: is of another model: {other}; use its configuration")


def saved_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.suffix == "" and path.is_dir())


def size_and_crc(path: Path) -> tuple[int, int]:
    """Return size in bytes and CRC-32 of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc
