"""How kernels are started: on the device of a tensor, with its head dims, tile and descriptors."""

import contextlib
from typing import Any

import torch
import triton

from nsa.kernels.triton.tiles import Tile, widths

LOG2E = 1.4426950408889634
MOST_PROGRAMS = 65535  # of a grid's second and third dimension, on every GPU


def launch(kernel: Any, grid: tuple[int, ...], like: torch.Tensor, *arguments: Any, **settings: Any) -> None:
    """Run a kernel on the device of ``like``; a grid without programs is not run. ValueError for more than a GPU can number."""
    if 0 in grid:
        return
    if any(n > MOST_PROGRAMS for n in grid[1:]):
        raise ValueError(
            f"{like.shape[0]} tokens: the grid {grid} has more programs than the {MOST_PROGRAMS} that a GPU numbers"
        )
    is_elsewhere = like.is_cuda and like.device.index != torch.cuda.current_device()
    with torch.cuda.device(like.device) if is_elsewhere else contextlib.nullcontext():
        kernel[grid](*arguments, **settings)


def head_dims(d_k: int, d_v: int) -> dict[str, Any]:
    """Return what every kernel that reads keys and values requires."""
    return {"DK": widths(d_k), "DV": widths(d_v)}


def meta(tile: Tile) -> dict[str, int]:
    """Return Triton's own settings."""
    limit = {"maxnreg": tile.registers} if tile.registers else {}
    return {"num_warps": tile.warps, "num_stages": tile.stages, **limit}


def rows_for(tile: Tile, h: int) -> int:
    """Return the rows of a program, at least one query's."""
    return max(tile.bm, triton.next_power_of_2(h))


def can_describe(tile: Tile, *tensors: torch.Tensor) -> bool:
    """Return whether TMA reads keys and values: where the tile has it, no part is padded, and addresses are as TMA wants them."""
    return tile.tma and all(
        widths(x.shape[-1]).is_exact and x.numel() > 0 and x.data_ptr() % 16 == 0 and x[0].nbytes % 16 == 0
        for x in tensors
    )


def descriptors(x: torch.Tensor, rows: int, is_wanted: bool) -> tuple[Any, Any]:
    """Return TMA descriptors of both parts of x [N, G, D], ``rows`` at a time; x itself, twice, where they are not wanted."""
    if not is_wanted:
        return x, x
    from triton.tools.tensor_descriptor import TensorDescriptor

    flat, part = x.flatten(1), widths(x.shape[-1])
    one, other = (
        TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, width])
        for width in (part.d0, part.d1 or part.d0)
    )
    return one, other
