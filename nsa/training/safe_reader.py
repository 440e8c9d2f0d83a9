"""Read checkpoints that others may have made. torch.distributed.checkpoint reads pickles; these allow only a checkpoint's types."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from nsa.training.saved import is_name

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in (
        "Metadata", "MetadataIndex", "TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not ((module, name) in _KNOWN or is_dtype):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint's metadata")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """Reads ``.metadata`` by an unpickler that allows only the listed types of metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata. Raises pickle.UnpicklingError if it is not plain metadata of files in this folder, OSError without
        the file.
        """
        data = (Path(self.path) / ".metadata").read_bytes()
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
    """Loads objects that are no tensors (an optimizer's numbers) as ``torch.load(weights_only=True)`` does."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raise pickle.UnpicklingError for any other object."""
        checked = io.BytesIO()  # torch unpickles its input without a check
        torch.save(torch.load(value, weights_only=True), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
