"""Compile kernels on all cores before they are measured: by calls on tensors without memory, whose launches compile."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from nsa.kernels import blocks
from nsa.kernels.triton import block_schedule, branches, selection_schedule, single, tiles, whole

Job = tuple[tuple[int, int, int, int], dict[str, int], torch.dtype, int, str, int, int]


@contextlib.contextmanager
def compiling(on: str, is_due: Callable[[Any], bool], *, refused: type[Exception] | None = None) -> Iterator[None]:
    """Compile the kernels that ``is_due`` allows where they would be launched, for GPUs ``on``, as tiles.json names them.

    An exception of type ``refused`` from the compiler is passed over.
    """

    def compile_it(kernel: Any, grid: tuple[int, ...], like: torch.Tensor, *arguments: Any, **settings: Any) -> None:
        if is_due(kernel) and 0 not in grid:
            with contextlib.suppress(*(() if refused is None else (refused,))):
                kernel.warmup(*arguments, grid=grid, **settings)

    with contextlib.ExitStack() as stack:
        for module in (branches, block_schedule, selection_schedule, single):
            stack.enter_context(mock.patch.object(module, "launch", compile_it))
        for module in (selection_schedule, tiles):
            stack.enter_context(mock.patch.object(module, "capability", return_value=on))
        yield


def compile_one(job: Job) -> None:
    """Fill Triton's cache with every ``of``-th kernel that the branches and the whole launch; runs in a process of its own."""
    (H, G, d_k, d_v), sizes, dtype, S, on, part, of = job
    n, n_blocks, scale, seen = (
        blocks.num_compressed(S, sizes.compress_block, sizes.compress_stride),
        blocks.num_selection(S, sizes.select_block),
        d_k**-0.5,
        0,
    )

    def is_mine(kernel: Any) -> bool:
        nonlocal seen
        seen += 1
        return seen % of == part

    def tensor(*size: int) -> torch.Tensor:
        return torch.empty(size, device="meta", dtype=dtype)

    q, k, v, out = tensor(1, S, H, d_k), tensor(1, S, G, d_k), tensor(1, S, G, d_v), tensor(1, S, H, d_v)
    cmp, gates, lse = (tensor(1, n, G, d_k), tensor(1, n, G, d_v)), tensor(1, S, H, 3), q.new_empty(1, S, H).float()
    chosen = q.new_empty(1, S, G, n_blocks, dtype=torch.bool)
    selection, blocked = (sizes.select_block, min(sizes.n_select, n_blocks), scale), sizes[:2]
    with compiling(on, is_mine, refused=Exception):  # measuring meets it again, and reports it
        _, kept = whole.forward(q, cmp, (k, v), (k, v), gates, None, sizes, scale)
        whole.backward(out, q, cmp, (k, v), (k, v), gates, kept, None, sizes, scale)
        single.sliding_backward(
            out, q, k, v, *single.sliding_forward(q, k, v, sizes.window, scale), sizes.window, scale
        )
        single.compressed_forward(q, *cmp, *blocked, sizes.select_block, scale)
        single.compressed_backward(out, q, *cmp, out, lse, *blocked, sizes.select_block, scale)
        single.selected_forward(q, k, v, chosen, *selection)
        single.selected_backward(out, q, k, v, out, lse, chosen, *selection)


def compile_ahead(
    shapes: list[tuple[tuple[int, int, int, int], dict[str, int]]], lengths: list[int], dtype: torch.dtype, on: str
) -> None:
    """Compile on all cores what is to be measured, a part of the kernels per job, so that measuring compiles next to nothing.

    ``shapes``: heads, groups and head dims, each with block and window sizes.
    """
    cores = len(os.sched_getaffinity(0))
    jobs = [(*shape, dtype, S, on, part, cores) for shape in shapes for S in lengths for part in range(cores)]
    with multiprocessing.get_context("forkserver").Pool(cores) as pool:
        pool.map(compile_one, jobs, chunksize=1)
