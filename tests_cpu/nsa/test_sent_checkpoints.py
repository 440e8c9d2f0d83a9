"""Checkpoints that others may have made: what they claim is checked before anything is built, read for ever, or run."""

import contextlib
import dataclasses
import io
import json
import os
import pickle
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from nsa.config import ConfigError
from nsa.training.checkpoint import load_model
from nsa.training.parallel import RankInfo
from nsa.training.safe_reader import SafePlanner, SafeReader
from tests_cpu.nsa.test_checkpoint import save, small, trained


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    config = small(folder)
    trainer, position = trained(config, RankInfo(), folder, 1)
    return save(config, RankInfo(), folder, trainer, position)


@pytest.fixture
def saved(whole: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may change."""
    return shutil.copytree(whole, tmp_path / "step_00000001")


def replace_metadata(saved: Path, data: bytes) -> None:
    """Write other metadata, and the description that fits it."""
    (saved / ".metadata").write_bytes(data)
    described = json.loads((saved / "checkpoint.json").read_text())
    described["files"][".metadata"] = [len(data), zlib.crc32(data)]
    (saved / "checkpoint.json").write_text(json.dumps(described))


CLAIMS: list[tuple[dict[str, Any], str]] = [
    ({"files": {"/dev/zero": [1, 1]}}, "is not a checkpoint"),
    ({"files": {"../step_00000001/.metadata": [1, 1]}}, "is not a checkpoint"),
    ({"files": {".metadata": [1, 1]}}, ".metadata is damaged ("),
    ({"files": {".metadata": [1]}}, "is not a checkpoint"),
    ({"step": 2}, "checkpoint.json is of step 2"),
    ({"position": {"samples": 1}}, "is not a checkpoint"),
    ({"model": {"n_layers": 2}}, "cannot be loaded (Missing key in checkpoint state_dict: model.blocks.1."),
    ({"model": {"dim": 32}}, "cannot be loaded (Size mismatch between saved"),
    ({"model": {"n_layers": 0}}, "model.n_layers: must be at least 1"),
]


@pytest.mark.parametrize(
    ("claim", "says"), CLAIMS, ids=lambda value: None if isinstance(value, str) else str(value)[:40]
)
def test_what_a_checkpoint_claims_is_checked_before_it_is_believed(
    saved: Path, claim: dict[str, Any], says: str
) -> None:
    fields = json.loads((saved / "checkpoint.json").read_text())
    for name, value in claim.items():
        is_part = isinstance(value, dict) and name in ("model", "data")
        fields[name] = {**fields[name], **value} if is_part else value
    (saved / "checkpoint.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        load_model(saved)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["[", ""])
@pytest.mark.parametrize("name", ["checkpoint.json", ".metadata"])
def test_files_of_a_checkpoint_that_cannot_be_read_are_named(saved: Path, name: str, text: str) -> None:
    (saved / name).write_text(text)
    if name == ".metadata":
        replace_metadata(saved, text.encode())
    with pytest.raises(ConfigError, match=r"is not a checkpoint of this program|\.metadata cannot be read"):
        load_model(saved)


@pytest.mark.parametrize("place", ["../../secret", "/etc/hostname", ""])
def test_metadata_names_files_of_its_folder_alone(saved: Path, place: str) -> None:
    metadata = SafeReader(saved).read_metadata()
    moved = {index: dataclasses.replace(info, relative_path=place) for index, info in metadata.storage_data.items()}
    (saved / ".metadata").write_bytes(pickle.dumps(dataclasses.replace(metadata, storage_data=moved)))
    with pytest.raises(pickle.UnpicklingError, match="names a file that is not in its folder"):
        SafeReader(saved).read_metadata()


class Evil:
    """An object that runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


# By name, and by a path of names through a module that metadata may name.
@pytest.mark.parametrize("way", ["by name", "by a path"])
def test_a_checkpoint_that_would_run_code_is_not_unpickled(saved: Path, tmp_path: Path, way: str) -> None:
    dotted = b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x94\x8c\x09os.system\x94\x93\x94."
    replace_metadata(saved, pickle.dumps(Evil(f"touch {tmp_path / 'ran'}")) if way == "by name" else dotted)
    with pytest.raises(ConfigError, match="does not belong into a checkpoint's metadata"):
        load_model(saved)
    assert not (tmp_path / "ran").exists()


def test_objects_that_are_no_tensors_are_checked_before_they_are_unpickled(tmp_path: Path) -> None:
    state: dict[str, Any] = {"betas": None}
    planner = SafePlanner()
    planner.set_up_planner(state, Metadata({}), is_coordinator=True)
    index, none = MetadataIndex("betas"), torch.Size([0])
    item = ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)
    for value in ((0.9, 0.95), Evil(f"touch {tmp_path / 'ran'}")):
        given = io.BytesIO()
        torch.save(value, given)
        given.seek(0)
        with pytest.raises(pickle.UnpicklingError) if isinstance(value, Evil) else contextlib.nullcontext():
            planner.load_bytes(item, given)
    assert state["betas"] == (0.9, 0.95)
    assert not (tmp_path / "ran").exists()
