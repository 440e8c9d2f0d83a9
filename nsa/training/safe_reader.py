"""Checkpoints that others may have made. torch.distributed.checkpoint reads pickles; these read only what a checkpoint has."""

from __future__ import annotations

import errno
import io
import os
import pickle
import stat
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in (
        "Metadata", "MetadataIndex", "TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip


MOST = 256 << 20  # bytes of a file that is read as a whole


def open_file(path: Path) -> IO[bytes]:
    """Open a file for reading. Raises OSError; for what is no regular file, too: a pipe or a device would be read for ever."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_file(path: Path) -> bytes:
    """Return the contents of a file. Raises OSError, for one of more than `MOST` bytes, too."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > MOST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read(MOST)


def is_name(name: Any) -> bool:
    """Return whether it is the name of a file in a folder itself."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not ((module, name) in _KNOWN or is_dtype):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint's metadata")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """Reads ``.metadata`` by an unpickler that knows what metadata consists of, name by name, and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raise pickle.UnpicklingError for what is not plain metadata of this folder's files, OSError for what is no file."""
        data = read_file(Path(self.path) / ".metadata")
        try:
            metadata = _MetadataUnpickler(io.BytesIO(data)).load()
            places = [info.relative_path for info in metadata.storage_data.values()]
        except pickle.UnpicklingError:
            raise
        except Exception as error:  # damaged pickles raise anything
            raise pickle.UnpicklingError(f"not a checkpoint's metadata ({type(error).__name__})") from None
        if not isinstance(metadata, Metadata) or not all(map(is_name, places)):
            raise pickle.UnpicklingError("a checkpoint's metadata names a file that is not in its folder")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Loads what is not a tensor, an optimizer's numbers, as ``torch.load(weights_only=True)`` does."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raise pickle.UnpicklingError for any other object."""
        checked = io.BytesIO()  # torch unpickles what it is given without a check
        torch.save(torch.load(value, weights_only=True), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
