"""The window and the compressed branch on a CPU, forward and backward; `nsa.kernels.cpu.tiles` has the design.

Shapes: B batch, S tokens, H query heads, G KV groups, D head dim, Nc compressed and Ns selection blocks; q [B, S, H, Dk],
k [B, S, G, Dk], v [B, S, G, Dv]. The log-sum-exp is [B, S, H], float32, or float64 for float64.
"""

from collections.abc import Iterator

import torch

from nsa.kernels import blocks
from nsa.kernels.cpu.tiles import (
    STEP,
    Backward,
    Forward,
    Rooms,
    Tensors3,
    Tile,
    minus_infinity,
    of_keys_undone,
    queries_of_tile,
    run_backward,
    run_forward,
)

# --- the window -------------------------------------------------------------------------------------------------------


def window_tiles(S: int, w: int, q: torch.Tensor) -> list[Tile]:
    """For S queries, each of which sees the last ``w`` tokens, its own included. q [B, G, ..., h, D]."""
    tiles: list[Tile] = []
    masks: dict[tuple[int, int], tuple[tuple[int, int, torch.Tensor], ...]] = {}
    at, h = 0, q.shape[3]
    while at < S:
        end, first = min(at + queries_of_tile(h, min(at, w)), S), max(0, at - w + 1) // STEP * STEP
        before, n = at - first, end - at
        if (before, n) not in masks:
            masks[before, n] = tuple(_hidden_by_window(before, n, w, q))
        tiles.append(Tile(at, n, first, end - first, masks[before, n]))
        at = end
    return tiles


def _hidden_by_window(before: int, n: int, w: int, q: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """As `Tile.hidden`, for n queries and the keys from ``before`` the first of them on."""
    t, key = torch.arange(before, before + n, device=q.device)[:, None], torch.arange(before + n, device=q.device)
    yield before, n, minus_infinity(key[before:] > t, q)[:, None]
    gone = before + n - w  # of the first keys, those that some query has left behind
    if gone > 0:
        yield 0, gone, minus_infinity(key[:gone] <= t - w, q)[:, None]


def sliding_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the last ``w`` tokens, the query's own included: output [B, S, H, Dv] and log-sum-exp."""
    z = Forward.of(q, k, v, scale)
    run_forward(z, window_tiles(q.shape[1], w, z.q), Rooms(q))
    return z.results()


def sliding_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    w: int, scale: float,
) -> Tensors3:  # fmt: skip
    """Gradients of q, k and v."""
    dq = torch.empty_like(q)
    z = Backward.of(grad, q, k, v, lse, None, scale, dq)
    sliding_gradients(z, w)
    return dq, *z.of_keys_and_values(k, v, scale)


def sliding_gradients(z: Backward, w: int) -> None:
    """Write those of q, k and v."""
    run_backward(z, window_tiles(z.q.shape[2], w, z.q), Rooms(z.q))


# --- the compressed branch --------------------------------------------------------------------------------------------


def compressed_tiles(n_cmp: int, l: int, d: int, q: torch.Tensor) -> list[Tile]:
    """For every query that sees a compressed block; the first is at l - 1. q [B, G, S, h, D]."""
    S, h = q.shape[2:4]
    tiles, at = [], l - 1
    while n_cmp and at < S:
        by_first = blocks.num_compressed(at + 1, l, d)
        end = min(at + queries_of_tile(h, by_first), S)
        by_last = blocks.num_compressed(end, l, d)
        last = torch.arange(by_first, by_last, device=q.device) * d + (l - 1)
        mask = minus_infinity(last > torch.arange(at, end, device=q.device)[:, None], q)[:, None]
        tiles.append(Tile(at, end - at, 0, by_last, ((by_first, by_last - by_first, mask),)))
        at = end
    return tiles


def compressed_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, l: int, d: int, l_sel: int, scale: float
) -> Tensors3:
    """Attention over the compressed blocks k [B, Nc, G, Dk], v [B, Nc, G, Dv] that are visible (Eq. 7), zero where none is.

    Output [B, S, H, Dv], log-sum-exp (-inf where no block is visible) and importance [B, S, G, Ns] (Eq. 8 to 10).
    """
    B, S, n_cmp, G = q.shape[0], q.shape[1], k.shape[1], k.shape[2]
    z = Forward.of(q, k, v, scale)
    h, n_blocks = z.q.shape[3], blocks.num_selection(S, l_sel)
    z.out[:, :, : l - 1], z.top[:, : (l - 1) * h], z.total[:, : (l - 1) * h] = 0, float("-inf"), 1
    shared = blocks.overlap(n_cmp, n_blocks, l, d, l_sel, q.device, z.k.dtype)
    importance = z.k.new_zeros(B * G, S, n_blocks)

    def add_importance(groups: slice, tile: Tile, p: torch.Tensor, total: torch.Tensor) -> None:
        summed = p.div_(total).unflatten(1, (-1, h)).sum(2)
        importance[groups].narrow(1, tile.at, tile.n).copy_(summed @ shared[: tile.keys])

    run_forward(z, compressed_tiles(n_cmp, l, d, z.q), Rooms(q), add_importance)
    return *z.results(), of_keys_undone(importance, B)


def compressed_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    l: int, d: int, _: int, scale: float,
) -> Tensors3:  # fmt: skip
    """Gradients of q, k and v; the importance has none."""
    dq = torch.zeros_like(q)
    z = Backward.of(grad, q, k, v, lse, None, scale, dq)
    compressed_gradients(z, l, d)
    return dq, *z.of_keys_and_values(k, v, scale)


def compressed_gradients(z: Backward, l: int, d: int) -> None:
    """Write those of q, except for the first l - 1, and of k and v."""
    run_backward(z, compressed_tiles(z.k.shape[1], l, d, z.q), Rooms(z.q))
