"""The table of backends: what each computes, when it cannot serve, and what it does in one operator.

To add one: a module with the four functions of `reference`, and a row here; `nsa.sections.ModelConfig.backend` names it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.config import ConfigError
from nsa.kernels import blocks, flash, reference, sdpa
from nsa.kernels.ops import Operators, attend_on_cpu
from nsa.kernels.triton import support
from nsa.kernels.triton.operators import attend_on_gpu, selection_mask
from nsa.sizes import KV, Sizes

Listener = Callable[[torch.Tensor], None]


def _serves_all(dtype: torch.dtype, device: torch.device, d_k: int, d_v: int) -> str:
    return ""


def _serves_cpus(dtype: torch.dtype, device: torch.device, d_k: int, d_v: int) -> str:
    return "" if device.type == "cpu" else f"the cpu backend is for tensors on a CPU, and these are on {device.type}"


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A row of the table. ``why_not`` returns '' where it can serve tensors (dtype, device, Dk, Dv), else the reason.

    ``branches`` has compressed, select, selected and sliding, as `nsa.kernels.reference` has them. ``whole`` is all three branches,
    weighted and summed (Eq. 5), in one operator, with the arguments of `dispatch.attend`; None where the branches are computed one
    by one. ``takes_packs`` is true where it takes a pack as a whole.
    ``selects_by_operator`` is true where checkpointing can keep what was selected. ``dense`` is plain causal attention, where
    another way is faster than a window of all tokens.
    """

    branches: Any
    why_not: Callable[[torch.dtype, torch.device, int, int], str] = _serves_all
    whole: Callable[..., torch.Tensor] | None = None
    takes_packs: bool = False
    selects_by_operator: bool = False
    dense: Callable[..., torch.Tensor] | None = None


def _by_math(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``function`` by torch's math attention alone: no flash, memory-efficient or cuDNN kernel, forward or backward."""

    def run(*args: torch.Tensor, **settings: float) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return function(*args, **settings)

    return run


def _whole_on_cpu(
    q: torch.Tensor, cmp: KV, sel: KV, win: KV, gates: torch.Tensor, sizes: Sizes, scale: float, ends: Sequence[int] | None,
    listener: Listener | None,
) -> torch.Tensor:  # fmt: skip
    y, chosen = attend_on_cpu(q, cmp, sel, win, gates.to(q.dtype), sizes, scale)
    if listener is not None:
        listener(chosen)
    return y


def _whole_on_gpu(
    q: torch.Tensor, cmp: KV, sel: KV, win: KV, gates: torch.Tensor, sizes: Sizes, scale: float, ends: Sequence[int] | None,
    listener: Listener | None,
) -> torch.Tensor:  # fmt: skip
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cpu")
    y, picks = attend_on_gpu(q, cmp, sel, win, gates, cu_seqlens, sizes, scale)
    if listener is not None:
        if ends is None:
            listener(
                selection_mask(picks, blocks.num_selection(q.shape[1], sizes.select_block)).unflatten(0, q.shape[:2])
            )
        for a, b in pairwise(ends or ()):
            if b > a:
                listener(selection_mask(picks[a:b], blocks.num_selection(b - a, sizes.select_block))[None])
    return y


BACKENDS: dict[str, Backend] = {
    "reference": Backend(branches=reference),
    "sdpa": Backend(branches=sdpa),
    "math": Backend(
        branches=SimpleNamespace(
            compressed=sdpa.compressed, select=sdpa.select, selected=_by_math(sdpa.selected), sliding=_by_math(sdpa.sliding),
        )
    ),
    "cpu": Backend(branches=Operators("cpu"), why_not=_serves_cpus, whole=_whole_on_cpu, selects_by_operator=True),
    "triton": Backend(
        branches=Operators("triton"), why_not=support.why_not, whole=_whole_on_gpu, takes_packs=True, selects_by_operator=True,
        dense=sdpa.dense,
    ),
    "flash": Backend(branches=flash, why_not=flash.why_not),
}  # fmt: skip


def refuse_to_keep_selection(backend: str) -> None:
    """Raise ConfigError for a backend that selects without an operator, whose selection checkpointing cannot keep."""
    row = BACKENDS.get(backend)  # None for auto
    if row is not None and not row.selects_by_operator:
        able = ", ".join(name for name, other in BACKENDS.items() if other.selects_by_operator)
        raise ConfigError(
            f"train.gc_keep_selection: model.backend={backend!r} selects without an operator; use auto, {able}"
        )
