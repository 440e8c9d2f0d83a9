"""Whether a tensor's numbers are finite: read at once, and only where reading leaves no trace in the program."""

from __future__ import annotations

import math
from typing import Any

import torch

MAX_LOOK = 1 << 20  # numbers: their sum takes a tenth of a millisecond


def is_finite(value: Any) -> bool:
    """Return whether all numbers of a tensor are finite; True where they cannot be read, or to read them would cost."""
    if not _can_be_read(value) or value.numel() > MAX_LOOK:
        return True
    try:
        values = value.detach()
        # A sum of finite numbers may be infinite, too.
        return math.isfinite(values.sum()) or bool(values.isfinite().all())
    except Exception:  # a tensor without storage, for example
        return True


def _can_be_read(value: Any) -> bool:
    """Return whether a value is a plain tensor with numbers on the CPU, and nothing records or replaces what is done with it.

    A subclass, a mode, `torch.jit.trace` and a transform such as vmap see each operation on a tensor, attributes included.
    """
    if type(value) is not torch.Tensor or torch._C._get_tracing_state() is not None:
        return False
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    if modes or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return value.device.type == "cpu" and value.layout is torch.strided and value.is_floating_point()
