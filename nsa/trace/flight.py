"""torch's flight recorder and DDP's own numbers, written down where a rank stands still. Both need the interpreter's lock."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

BUFFER_VARIABLES = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
)  # today's name, and the one before torch 2.9
_DDP_NUMBERS = ("iteration", "has_rebuilt_buckets", "bucket_sizes", "unused_parameter_size", "num_parameter_tensors")


def is_recording() -> bool:
    """Whether the user has given the flight recorder a buffer."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in BUFFER_VARIABLES)


def dump_flight_recorder(path: Path) -> bool:
    """Write the recorder's entries as JSON; False where torch has none to give."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None or not is_recording():
        return False
    try:
        text = dump(includeCollectives=True, onlyActive=False)
    except (RuntimeError, TypeError):
        return False
    path.write_bytes(text if isinstance(text, bytes) else str(text).encode())
    return True


def ddp_numbers(model: Any) -> dict[str, Any]:
    """What DDP knows of itself: iteration, buckets, unused parameters. {} for another model.

    Not in debug level DETAIL, in which its logger crashes on gloo (torch 2.13).
    """
    if (
        not isinstance(model, DistributedDataParallel)
        or os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    ):
        return {}
    with contextlib.suppress(RuntimeError, AttributeError):
        data = model._get_ddp_logging_data()
        return {name: data[name] for name in _DDP_NUMBERS if name in data and json.dumps(data[name])}
    return {}
