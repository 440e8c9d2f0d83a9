"""Calls of the Triton kernels: layouts, grids, tile sizes. The interface is that of `nsa.kernels.cpu`."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from nsa.kernels import blocks, triton_gates, triton_selected, triton_strided

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

NO_WINDOW = 1 << 30
MOST_PROGRAMS = 65535  # of a grid's second and third dimension, on every GPU
MEASURED = Path(__file__).with_name("tiles.json")  # written by benchmarks/tune_gpu.py
WIDE_GROUP = 16  # heads a group, from which on a query at a time fills a product's rows
SEGMENT = 16384  # rows (query, head) of a block's list that one program of the backward adds up


class Tiles(NamedTuple):
    """Rows, keys, warps and pipeline stages of a program."""

    bm: int
    bn: int
    warps: int
    stages: int


def tiles(kernel: str, q: torch.Tensor, d_v: int) -> Tiles:
    """The tile sizes of a kernel: those measured on a GPU like that of ``q``, where it was measured, else `fitting`."""
    d_k, itemsize = q.shape[-1], q.element_size()
    if q.is_cuda:
        found = measured(capability(q.device.index or 0)).get(tile_name(kernel, d_k, d_v, itemsize))
        if found is not None:
            return found
    return fitting(kernel, d_k, d_v, itemsize)


def tile_name(kernel: str, d_k: int, d_v: int, itemsize: int) -> str:
    """As tiles.json names what it has: 'dkv 192/128 2' are the head dims and the bytes of an element."""
    return f"{kernel} {d_k}/{d_v} {itemsize}"


@functools.cache
def capability(device: int) -> str:
    """As tiles.json names a GPU: 'sm_90'."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@functools.cache
def measured(capability: str) -> dict[str, Tiles]:
    """What tiles.json has for a GPU: by `tile_name`, the fastest of those that were tried."""
    table = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    return {name: Tiles(*sizes) for name, sizes in table.get(capability, {}).items()}


def fitting(kernel: str, d_k: int, d_v: int, itemsize: int) -> Tiles:
    """Chosen by what the compiler says: they fit the shared memory of sm_80 (163 KiB); tests compile all of them."""
    wide = max(d_k, d_v) > 128
    if itemsize == 4:
        return Tiles(16, 16, 4, 1) if wide else Tiles(32, 32, 8 if kernel.endswith("dkv") else 4, 1)
    table = {
        "forward": Tiles(64, 32, 4, 2) if wide else Tiles(128, 64, 4 if d_k <= 64 else 8, 2),
        "dq": Tiles(64, 32, 8, 1) if wide else Tiles(64, 64, 4 if d_k <= 64 else 8, 2),
        "dkv": Tiles(32, 64, 8, 1) if wide else Tiles(32, 64, 8, 2),
        "importance": Tiles(64, 32, 4, 2) if wide else Tiles(64, 64, 8, 2),
        "by_query": Tiles(0, 32, 4, 2) if wide else Tiles(0, 64, 2, 2),
        "selected_dq": Tiles(0, 32, 4, 2) if wide else Tiles(0, 64, 2, 2),
        "by_block": Tiles(64, 64, 4, 2),
        "selected_dkv": Tiles(32, 64, 8, 1) if wide else Tiles(64, 64, 8, 2),
    }
    return table[kernel]


def _padded(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _widths(q: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    return {
        "DK": q.shape[-1], "DV": v.shape[-1], "PK": _padded(q.shape[-1]), "PV": _padded(v.shape[-1]),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def _launch(kernel: Any, grid: tuple[int, ...], like: torch.Tensor, *arguments: Any, **settings: Any) -> None:
    """Run a kernel on the device of ``like``; a grid without programs is no run. ValueError for more than a GPU can number."""
    if 0 in grid:
        return
    if any(n > MOST_PROGRAMS for n in grid[1:]):
        raise ValueError(
            f"batch times heads, {like.shape[0]} x {like.shape[2]}: a GPU numbers {MOST_PROGRAMS} of them; split the batch"
        )
    on = torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext()
    with on:
        kernel[grid](*arguments, **settings)


def _meta(t: Tiles) -> dict[str, int]:
    return {"num_warps": t.warps, "num_stages": t.stages}


def _delta(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """[B, S, H] float32: the sum of grad * out."""
    delta = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    rows, width = delta.numel(), out.shape[-1]
    _launch(
        triton_strided.row_dot, (triton.cdiv(rows, 32),), out, grad, out, delta, rows, WIDTH=width, PADDED=_padded(width),
        BLOCK=32,
    )  # fmt: skip
    return delta


# --- keys at regular places -------------------------------------------------------------------------------------------


def _strided_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stride: int, offset: int, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    B, S, H, _ = q.shape
    out = q.new_empty(B, S, H, v.shape[-1])
    lse = q.new_empty(B, S, H, dtype=torch.float32)
    t = tiles("forward", q, v.shape[-1])
    _launch(
        triton_strided.strided_forward, (triton.cdiv(S, t.bm), B * H), q, q, k, v, out, lse, S, k.shape[1], H, k.shape[2],
        window, scale, STRIDE=stride, OFFSET=offset, BM=t.bm, BN=t.bn, **_widths(q, v), **_meta(t),
    )  # fmt: skip
    return out, lse


def _strided_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    stride: int, offset: int, window: int, scale: float,
) -> Triple:  # fmt: skip
    grad, q, k, v = (x.contiguous() for x in (grad, q, k, v))
    B, S, H, _ = q.shape
    N, G = k.shape[1], k.shape[2]
    delta = _delta(grad, out)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    common = {"STRIDE": stride, "OFFSET": offset, **_widths(q, v)}
    t = tiles("dq", q, v.shape[-1])
    _launch(
        triton_strided.strided_dq, (triton.cdiv(S, t.bm), B * H), q, q, k, v, grad, lse, delta, dq, S, N, H, G, window, scale,
        BM=t.bm, BN=t.bn, **common, **_meta(t),
    )  # fmt: skip
    t = tiles("dkv", q, v.shape[-1])
    _launch(
        triton_strided.strided_dkv, (triton.cdiv(N, t.bn), B * G), q, q, k, v, grad, lse, delta, dk, dv, S, N, H, G, window,
        scale, BM=t.bm, BN=t.bn, **common, **_meta(t),
    )  # fmt: skip
    return dq, dk, dv


def sliding_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cpu.sliding_forward`."""
    return _strided_forward(q.contiguous(), k.contiguous(), v.contiguous(), 1, 0, w, scale)


def sliding_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    w: int, scale: float,
) -> Triple:  # fmt: skip
    """As `cpu.sliding_backward`."""
    return _strided_backward(grad, q, k, v, out, lse, 1, 0, w, scale)


def compressed_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, l: int, d: int, l_sel: int, scale: float
) -> Triple:
    """As `cpu.compressed_forward`, with the log-sum-exp [B, S, H] too, -inf where a query sees no block."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse = _strided_forward(q, k, v, d, l - 1, NO_WINDOW, scale)
    B, S, H, _ = q.shape
    G, n_blocks = k.shape[2], blocks.num_selection(S, l_sel)
    importance = q.new_empty(B, S, G, n_blocks, dtype=torch.float32)
    t = tiles("importance", q, v.shape[-1])
    widths = _widths(q, v)
    _launch(
        triton_strided.block_importance, (triton.cdiv(S, t.bm), triton.cdiv(n_blocks, 16), B * G), q, q, k, lse, importance,
        S, k.shape[1], H, G, n_blocks, scale, STRIDE=d, OFFSET=l - 1, A=l // d, R=l_sel // d, DK=widths["DK"],
        PK=widths["PK"], PRECISION=widths["PRECISION"], BM=t.bm, BN=t.bn, BJ=16, **_meta(t),
    )  # fmt: skip
    return out, lse, importance


def compressed_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    l: int, d: int, scale: float,
) -> Triple:  # fmt: skip
    """As `cpu.compressed_backward`."""
    return _strided_backward(grad, q, k, v, out, lse, d, l - 1, NO_WINDOW, scale)


# --- the selection ----------------------------------------------------------------------------------------------------


def select(importance: torch.Tensor, l_sel: int, n_sel: int) -> torch.Tensor:
    """As `blocks.select`."""
    importance = importance.contiguous()
    B, S, G, n_blocks = importance.shape
    chosen = torch.empty(importance.shape, dtype=torch.int8, device=importance.device)
    _launch(
        triton_selected.select_blocks, (B * S * G,), importance, importance, chosen, S, G, n_blocks, n_sel, L_SEL=l_sel,
        LOCAL=blocks.NUM_LOCAL, PAD=_padded(n_blocks), num_warps=1,
    )  # fmt: skip
    return chosen.view(torch.bool)


class Lists(NamedTuple):
    """Who chose whom. picks [B, S, G, n_sel]; offsets [B*G*Ns + 1]; queries: the lists, one after the other (all int32)."""

    picks: torch.Tensor
    offsets: torch.Tensor
    queries: torch.Tensor


def _picks(chosen: torch.Tensor, n_sel: int) -> torch.Tensor:
    B, S, G, n_blocks = chosen.shape
    picks = torch.full((B, S, G, n_sel), -1, dtype=torch.int32, device=chosen.device)
    _launch(
        triton_selected.list_picks, (B * S * G,), chosen, chosen.view(torch.int8), picks, n_blocks, n_sel,
        PAD=_padded(n_blocks), num_warps=1,
    )  # fmt: skip
    return picks


def _lists(chosen: torch.Tensor, n_sel: int) -> Lists:
    B, S, G, n_blocks = chosen.shape
    counts = chosen.sum(1).flatten()  # by (b, g, j)
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int32, device=chosen.device)
    offsets[1:] = counts.cumsum(0)
    queries = torch.zeros(B * S * G * n_sel, dtype=torch.int32, device=chosen.device)
    _launch(
        triton_selected.list_queries, (triton.cdiv(n_blocks, 16), B * G), chosen, chosen.view(torch.int8), offsets, queries,
        S, G, n_blocks, BT=128, BJ=16,
    )  # fmt: skip
    return Lists(_picks(chosen, n_sel), offsets, queries)


def _cut(offsets: torch.Tensor, h: int, rows: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block's list cut into pieces of ``rows`` rows (query, head): the block of each piece, -1 behind the last one, and
    where each block's pieces begin [blocks + 1]. The number of pieces is bounded by ``total`` rows, so that nobody waits for it.
    """
    pieces = (offsets.diff() * h + (rows - 1)) // rows
    starts = torch.zeros_like(offsets)
    starts[1:] = pieces.cumsum(0)
    number = torch.arange(total // rows + len(pieces), dtype=torch.int32, device=offsets.device)
    block = torch.searchsorted(starts[1:], number, right=True, out_int32=True)
    return torch.where(number < starts[-1], block, -1), starts


def selected_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, l_sel: int, n_sel: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cpu_selected.selected_forward`: by query for groups of `WIDE_GROUP` heads and more, else by block."""
    q, k, v, chosen = (x.contiguous() for x in (q, k, v, chosen))
    form: Callable[..., tuple[torch.Tensor, torch.Tensor]] = (
        by_query if q.shape[2] // k.shape[2] >= WIDE_GROUP else by_block
    )
    return form(q, k, v, chosen, l_sel, n_sel, scale)


def by_query(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, l_sel: int, n_sel: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A query at a time, the heads of a group together."""
    B, S, H, _ = q.shape
    G = k.shape[2]
    out, lse = q.new_empty(B, S, H, v.shape[-1]), q.new_empty(B, S, H, dtype=torch.float32)
    t = tiles("by_query", q, v.shape[-1])
    _launch(
        triton_selected.selected_by_query, (S, B * G), q, q, k, v, _picks(chosen, n_sel), out, lse, S, H, G, n_sel, scale,
        L_SEL=l_sel, BH=_padded(H // G), BN=min(t.bn, _padded(l_sel)), **_widths(q, v), **_meta(t),
    )  # fmt: skip
    return out, lse


def by_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, l_sel: int, n_sel: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of keys at a time, with the queries that chose it; then their partial results are merged."""
    B, S, H, _ = q.shape
    G, n_blocks, d_v = k.shape[2], chosen.shape[3], v.shape[-1]
    h = H // G
    lists = _lists(chosen, n_sel)
    t = tiles("by_block", q, d_v)
    block, starts = _cut(lists.offsets, h, t.bm, B * S * G * n_sel * h)
    part = q.new_empty(B * S * G * n_sel * h, d_v)
    part_lse = q.new_empty(B * S * G * n_sel * h, dtype=torch.float32)
    widths = _widths(q, v)
    _launch(
        triton_selected.selected_by_block, (len(block),), q, q, k, v, lists.picks, lists.offsets, lists.queries, block, starts,
        part, part_lse, S, H, G, n_blocks, n_sel, scale, L_SEL=l_sel, PN=_padded(n_sel), BR=t.bm,
        BN=min(t.bn, _padded(l_sel)), **widths, **_meta(t),
    )  # fmt: skip
    out, lse = q.new_empty(B, S, H, d_v), q.new_empty(B, S, H, dtype=torch.float32)
    _launch(
        triton_selected.merge_parts, (B * S * G,), q, lists.picks, part, part_lse, out, lse, H, G, n_sel, DV=d_v,
        PV=widths["PV"], BH=triton.next_power_of_2(h), num_warps=2,
    )  # fmt: skip
    return out, lse


def selected_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    chosen: torch.Tensor, l_sel: int, n_sel: int, scale: float,
) -> Triple:  # fmt: skip
    """As `cpu_selected.selected_backward`: dq a query at a time, dk and dv by the lists."""
    grad, q, k, v, chosen = (x.contiguous() for x in (grad, q, k, v, chosen))
    B, S, H, d_k = q.shape
    G, n_blocks, d_v = k.shape[2], chosen.shape[3], v.shape[-1]
    h = H // G
    lists, delta, widths = _lists(chosen, n_sel), _delta(grad, out), _widths(q, v)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    t = tiles("selected_dq", q, d_v)
    _launch(
        triton_selected.selected_dq, (S, B * G), q, q, k, v, lists.picks, grad, lse, delta, dq, S, H, G, n_sel, scale,
        L_SEL=l_sel, BH=_padded(h), BN=min(t.bn, _padded(l_sel)), **widths, **_meta(t),
    )  # fmt: skip
    t = tiles("selected_dkv", q, d_v)
    bn = min(t.bn, _padded(l_sel))
    block, starts = _cut(lists.offsets, h, SEGMENT, B * S * G * n_sel * h)
    part_k = q.new_empty(len(block) * l_sel, d_k, dtype=torch.float32)
    part_v = q.new_empty(len(block) * l_sel, d_v, dtype=torch.float32)
    _launch(
        triton_selected.selected_dkv, (len(block), triton.cdiv(l_sel, bn)), q, q, k, v, grad, lse, delta, lists.offsets,
        lists.queries, block, starts, part_k, part_v, S, H, G, n_blocks, scale, L_SEL=l_sel, SEGMENT=SEGMENT, BR=t.bm, BN=bn,
        **widths, **_meta(t),
    )  # fmt: skip
    for part, total, width in ((part_k, dk, d_k), (part_v, dv, d_v)):
        _launch(
            triton_selected.sum_segments, (B * G * n_blocks, triton.cdiv(l_sel, 16)), q, part, starts, total, S, G, n_blocks,
            L_SEL=l_sel, D=width, PD=_padded(width), BN=16, num_warps=2,
        )  # fmt: skip
    return dq, dk, dv


# --- the gates --------------------------------------------------------------------------------------------------------


def gated_sum(o_cmp: torch.Tensor, o_sel: torch.Tensor, o_win: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Eq. 5, from outputs [B, S, H, Dv] and gates [B, S, H, 3]."""
    outputs = [x.contiguous() for x in (o_cmp, o_sel, o_win)]
    out = torch.empty_like(outputs[0])
    rows, width = out.numel() // out.shape[-1], out.shape[-1]
    _launch(
        triton_gates.gated_sum, (triton.cdiv(rows, 32),), out, *outputs, gates.contiguous(), out, rows, D=width,
        PD=_padded(width), BLOCK=32,
    )  # fmt: skip
    return out


def gated_sum_backward(
    grad: torch.Tensor, o_cmp: torch.Tensor, o_sel: torch.Tensor, o_win: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the outputs and of the gates."""
    inputs = [x.contiguous() for x in (o_cmp, o_sel, o_win, gates)]
    found = [torch.empty_like(x) for x in inputs]
    rows, width = o_cmp.numel() // o_cmp.shape[-1], o_cmp.shape[-1]
    _launch(
        triton_gates.gated_sum_backward, (triton.cdiv(rows, 32),), grad, grad.contiguous(), *inputs, *found, rows, D=width,
        PD=_padded(width), BLOCK=32,
    )  # fmt: skip
    return found[0], found[1], found[2], found[3]
