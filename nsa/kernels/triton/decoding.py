"""New tokens against a cache on a GPU: the launches of `decode`, and when they serve."""

import torch
import triton

from nsa.kernels import blocks
from nsa.kernels.triton import decode
from nsa.kernels.triton.block_schedule import steps_of
from nsa.kernels.triton.branches import Pair
from nsa.kernels.triton.launch import LOG2E, head_dims, launch
from nsa.kernels.triton.selection_schedule import Selection
from nsa.sizes import Sizes

MOST_TOKENS = 16  # at once: beyond, tokens have more in common than one program's rows hold
KEYS, FEW_KEYS = 64, 32  # of a tile; fewer where they are float32
MOST_SCORES = 8192  # of blocks and heads that a program holds at once
PROGRAMS = 512  # enough for every GPU; a batch that has more tiles gives several to each


def serves(q: torch.Tensor, d_v: int, sizes: Sizes) -> bool:
    """Return whether so many new tokens q [B, T, H, Dk], and such blocks, are what the kernels were made for."""
    l, d, l_sel = sizes[:3]
    fits = (q.shape[-1] + d_v) * q.element_size() <= 1024  # in the shared memory of an A100
    return q.shape[1] <= MOST_TOKENS and fits and steps_of(keys_for(q), l // d, l_sel // d).is_clear


def keys_for(q: torch.Tensor) -> int:
    """Return the keys of a tile."""
    return FEW_KEYS if q.element_size() == 4 else KEYS


def attend(
    q: torch.Tensor, cmp: Pair, sel: Pair, win: Pair, gates: torch.Tensor, start: int, l: int, d: int, l_sel: int, n_sel: int,
    w: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output [B, T, H, Dv] of the T tokens from position ``start`` on, and their picks int32 [B * T, G, n].

    ``cmp``, ``sel`` and ``win`` are (key, value) as `nsa.model.decoding.KVCache` returns them, the new tokens' among them.
    """
    q, gates = q.contiguous(), gates.contiguous()
    cmp, sel, win = ((_rows_together(k), _rows_together(v)) for k, v in (cmp, sel, win))
    B, T, H, d_k = q.shape
    G, d_v = sel[0].shape[2], sel[1].shape[3]
    h, rows = H // G, T * (H // G)
    # As many picks at any length, -1 behind the last: little is compiled again as the cache grows.
    selection = Selection.of(start + T, l_sel, n_sel, q, d_v)
    keys = keys_for(q)
    steps = steps_of(keys, l // d, l_sel // d)
    n_cmp, n_win = cmp[0].shape[1], win[0].shape[1]
    # As far as the last key's strides reach, the last of which may be in another block.
    cmp_tiles = triton.cdiv(n_cmp + l // d - 1, steps.blocks * (l_sel // d)) if n_cmp else 0
    win_tiles = triton.cdiv(n_win, keys)
    each = max(1, (cmp_tiles + win_tiles) * B * G // PROGRAMS)
    cmp_programs, win_programs = triton.cdiv(cmp_tiles, each), triton.cdiv(win_tiles, each)
    parts = cmp_programs + win_programs + selection.parts
    bj = max(16, triton.next_power_of_2(steps.blocks))
    part = q.new_empty(B * G * parts * rows, d_v, dtype=torch.float32)
    part_lse = q.new_empty(B * G * parts * rows, dtype=torch.float32)
    scores = q.new_empty(max(1, B * G * cmp_tiles * rows), bj, dtype=torch.float32)
    tops = q.new_empty(max(1, B * G * cmp_tiles * rows), dtype=torch.float32)
    picks = q.new_empty(B * T, G, selection.n_sel, dtype=torch.int32)
    out = q.new_empty(B, T, H, d_v)
    dims, bm = head_dims(d_k, d_v), max(16, min(64, triton.next_power_of_2(rows)))
    first_part = cmp_programs + win_programs
    launch(
        decode.scan_keys, (first_part, triton.cdiv(rows, bm), B * G), q, q, *cmp, *win, part, part_lse, scores, tops, T, H, G,
        start, n_cmp, n_win, cmp_tiles, win_tiles, cmp_programs, win_programs, each, parts, cmp[0].stride(0), cmp[1].stride(0),
        win[0].stride(0), win[1].stride(0), w, scale * LOG2E, STRIDE=d, OFFSET=l - 1, A=l // d, R=l_sel // d, h=h,
        STEP=steps.blocks, BJ=bj, GROUPS=G, BM=bm, BN=keys, **dims, num_warps=4,
        num_stages=1 if q.element_size() == 4 or each == 1 else 2,  # a single tile has nothing to load ahead
    )  # fmt: skip
    pad = max(16, triton.next_power_of_2(max(selection.n_blocks, selection.n_sel)))
    launch(
        decode.pick_blocks, (T, B * G), q, part_lse, scores, tops, picks, T, G, start, cmp_tiles, cmp_programs, parts,
        selection.n_blocks, n_sel=selection.n_sel, L_SEL=l_sel, LOCAL=blocks.NUM_LOCAL, h=h, STEP=steps.blocks, BJ=bj, PAD=pad,
        PP=max(16, triton.next_power_of_2(cmp_programs)), HB=max(1, min(triton.next_power_of_2(h), MOST_SCORES // pad)),
        num_warps=8 if pad > 512 else 4,
    )  # fmt: skip
    launch(
        decode.read_blocks, (selection.parts, T, B * G), q, q, *sel, picks, part, part_lse, T, H, G, start, first_part, parts,
        sel[0].stride(0), sel[1].stride(0), scale * LOG2E, **selection.settings(), h=h, **dims, GROUPS=G,
        BM=max(16, triton.next_power_of_2(h)), BN=selection.sub_block, num_warps=4, num_stages=1,
    )  # fmt: skip
    launch(
        decode.sum_parts, (B * T, H), q, part, part_lse, gates, out, T, H, G, cmp_programs, first_part, parts, h=h,
        DV=dims["DV"], BP=64, NP=max(128, triton.next_power_of_2(parts)), num_warps=4,
    )  # fmt: skip
    return out, picks


def _rows_together(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, N, G, D] itself where a sequence's keys lie one behind the other, as in a cache; else a copy."""
    G, D = x.shape[2:]
    return x if x.stride()[1:] == (G * D, D, 1) else x.contiguous()
