"""Whether the Triton kernels can serve a call; Triton is imported for a GPU's tensors alone, and a machine without it can query."""

import functools
import importlib.util
import os

import torch

MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
MIN_TRITON = (3, 6)
SHARED = 160 << 10  # bytes a block, less than an A100 has and more than the widest kernel takes


@functools.cache
def is_installed(package: str) -> bool:
    """Return whether it can be imported; looked for once, as each call of the attention needs it."""
    return importlib.util.find_spec(package) is not None


@functools.cache
def why_no_triton() -> str:
    """Return '' where the module triton serves, else the reason. Its distribution may have another name (torch's nightlies)."""
    try:
        import triton

        major, minor = (int(part) for part in triton.__version__.split(".")[:2])
    except Exception as error:  # a module that is broken in any way is not there
        return f"triton cannot be imported ({type(error).__name__}: {error})"
    if (major, minor) < MIN_TRITON:
        return "the Triton kernels need Triton {}.{}, and {} is installed".format(*MIN_TRITON, triton.__version__)
    return ""


def is_interpreted() -> bool:
    """Return whether Triton runs its kernels in Python, on any device (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def why_not(dtype: torch.dtype, device: torch.device, d_k: int, d_v: int) -> str:
    """Return '' where the kernels can serve such tensors, else the reason that they cannot."""
    if device.type != "cuda" and not is_interpreted():
        return f"the Triton kernels need an NVIDIA GPU, and the tensors are on {device.type}"
    if device.type == "cuda" and torch.version.hip is not None:
        return "the Triton kernels are for NVIDIA GPUs, and this torch is built for AMD's (ROCm)"
    if device.type == "cuda" and torch.version.cuda is None:
        return "this torch is built without CUDA"
    if reason := why_no_triton():
        return reason
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the Triton kernels take float32, bfloat16 and float16, not {dtype}"
    if max(d_k, d_v) > MAX_HEAD_DIM:
        return f"the Triton kernels take head dims up to {MAX_HEAD_DIM}, not {d_k} and {d_v}"
    if is_interpreted() and dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 as if it were integers"
    if device.type != "cuda":
        return ""
    return _why_not_on(device.index or 0, d_k, d_v)


@functools.cache
def _why_not_on(device: int, d_k: int, d_v: int) -> str:
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return (
            f"the Triton kernels need compute capability 8.0, and {torch.cuda.get_device_name(device)} has {capability}"
        )
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED)
    if shared < SHARED and d_k + d_v > 320:  # sm_86 and sm_89 have 99 KiB, which the shape 192 and 128 fits
        return f"the Triton kernels for head dims {d_k} and {d_v} need more shared memory than the {shared >> 10} KiB of this GPU"
    return ""
