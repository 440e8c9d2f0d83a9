"""Whether a tensor's numbers are finite. They are read only where that has no effect on the program."""

import math
from typing import Any

import torch

MAX_LOOK = 1 << 20  # numbers: their sum takes a tenth of a millisecond


def is_finite(value: Any) -> bool:
    """Return whether all numbers of a tensor are finite; True if they cannot be read, or are too expensive to read."""
    try:
        if not _can_be_read(value):
            return True
        values = value.detach()
        # A sum of finite numbers may be infinite, too.
        return math.isfinite(values.sum()) or bool(values.isfinite().all())
    except Exception:  # an unusual kind of tensor
        return True


def _can_be_read(value: Any) -> bool:
    """Return whether a value is a plain tensor with few numbers on the CPU, and nothing records or replaces operations on it.

    A subclass, a mode, `torch.jit.trace` and a transform such as vmap see each operation on a tensor, including attributes. A
    program may also have freed the storage of a tensor that it keeps.
    """
    if type(value) is not torch.Tensor or torch._C._get_tracing_state() is not None:
        return False
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    if modes or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if value.device.type != "cpu" or value.layout is not torch.strided or not value.is_floating_point():
        return False
    return value.numel() <= MAX_LOOK and value.untyped_storage().nbytes() > 0
