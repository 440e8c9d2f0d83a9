"""Write torch's flight recorder when a rank is stalled. It needs the GIL."""

import os
from pathlib import Path

import torch

from nsa.trace.files import write_atomically

# In each, the second is the name in older torch, where NCCL alone has a recorder.
BUFFER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def dump_flight_recorder(path: Path) -> bool:
    """Write the recorder's entries as JSON; return False if torch has no recorder, or it is off."""
    module = torch._C._distributed_c10d
    dump = next((getattr(module, name) for name in DUMPS if hasattr(module, name)), None)
    has_buffer = any(os.environ.get(name, "0") not in ("", "0") for name in BUFFER_VARIABLES)
    if dump is None or not has_buffer:
        return False
    try:
        text = dump(includeCollectives=True, onlyActive=False)
    except (RuntimeError, TypeError):
        return False
    write_atomically(path, text if isinstance(text, bytes) else str(text))
    return True
