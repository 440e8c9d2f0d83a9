"""Token-by-token decoding: a cache of keys and values, and attention of the newest tokens to it.

Shapes: B batch, T new tokens after ``start`` earlier ones, H query heads, G KV groups.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch

from nsa.kernels import blocks
from nsa.kernels.blocks import without_autocast
from nsa.kernels.dispatch import explain, sum_branches
from nsa.kernels.reference import probabilities, weighted
from nsa.kernels.triton.operators import selection_mask
from nsa.sizes import BRANCHES, KV, Branch, Sizes

QUERIES = 64  # at once: each gathers its own keys and values


class _Growing:
    """Tensors joined along dimension 1, in a buffer that doubles: to append costs what is appended."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._used = 0

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Return all so far, ``new`` the last; a view."""
        end = self._used + new.shape[1]
        if self._buffer is None or self._buffer.shape[1] < end:
            # The next call may come under no_grad, which may not write to such tensors.
            with torch.inference_mode(False):
                shape = (new.shape[0], max(64, 2 * end), *new.shape[2:])
                grown = torch.empty(shape, dtype=new.dtype, device=new.device)
            if self._buffer is not None:
                grown[:, : self._used] = self._buffer[:, : self._used]
            self._buffer = grown
        self._buffer[:, self._used : end] = new
        self._used = end
        return self._buffer[:, :end]

    def shorten(self, used: int) -> None:
        """Forget what was appended after the first ``used``."""
        self._used = used

    def reorder(self, index: torch.Tensor) -> None:
        """Make sequence i the former ``index[i]``."""
        if self._buffer is not None:
            with torch.inference_mode(False):  # as in `append`
                self._buffer = self._buffer.index_select(0, index)


class KVCache:
    """What one NSA layer keeps of the tokens it has seen; for inference, so without gradients.

    The selected branch keeps every token, the window the last w - 1, the compressed branch its blocks and the tokens that no
    whole block covers yet. ``length`` is the number of tokens seen. ``spare``: how many of the last tokens `crop` can take back,
    as speculative decoding needs; they are kept as well. A larger ``spare`` holds for tokens that come after it is set.
    After an exception in a call, the caches of all layers are of no more use.
    """

    def __init__(self, *, spare: int = 0) -> None:
        self.spare = operator.index(spare)
        if spare < 0:
            raise ValueError(f"spare={spare}: must be 0 or a number of tokens")
        self.length = 0
        self._room = 0  # tokens that `crop` can take back now
        self._compressed = (_Growing(), _Growing())
        self._selected = (_Growing(), _Growing())
        self._window: KV | None = None
        self._tail: KV | None = None  # the last tokens, ``_ahead`` of them before the first block that is not whole
        self._ahead = 0
        self._owner: dict[str, Any] = {}  # what the layer of its first call has
        self._sizes = Sizes()

    @property
    def batch(self) -> int:
        """How many sequences it has; 0 before the first call."""
        return 0 if self._tail is None else self._tail.k.shape[0]

    @property
    def device(self) -> torch.device:
        """Where its tensors are; the CPU before the first call."""
        return torch.device("cpu") if self._tail is None else self._tail.k.device

    def reorder(self, index: torch.Tensor) -> None:
        """Make sequence i of the batch the former sequence ``index[i]``: int32 or int64 [B'], in any order, repeated or dropped.

        So a beam search keeps its best beams, and a batch drops the sequences that have ended.
        """
        if index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"index: must be int32 or int64 of one dimension, got {index.dtype} {list(index.shape)}")
        for one in (*self._compressed, *self._selected):
            one.reorder(index)
        self._window, self._tail = (
            kv and KV(kv.k.index_select(0, index), kv.v.index_select(0, index)) for kv in (self._window, self._tail)
        )

    def crop(self, length: int) -> None:
        """Forget the tokens behind the first ``length``. Raises ValueError for more than the cache keeps (``spare``)."""
        length = operator.index(length)
        less = self.length - length
        if less < 0 or length < 0:
            raise ValueError(f"crop({length}): the cache has seen {self.length} tokens; give 0 to {self.length}")
        if less > self._room:
            raise ValueError(
                f"crop({length}): the last {self._room} tokens can be taken back; for more, KVCache(spare={less})"
            )
        if not less:
            return
        assert self._window is not None
        assert self._tail is not None
        d = self._sizes.compress_stride
        n_blocks = blocks.num_compressed(length, self._sizes.compress_block, d)
        first = self.length - self._tail.k.shape[1]  # token of the tail
        for one in self._compressed:
            one.shorten(n_blocks)
        for one in self._selected:
            one.shorten(length)
        self._ahead = n_blocks * d - first
        self._tail, self._window = (kv.between(0, kv.k.shape[1] - less) for kv in (self._tail, self._window))
        self.length, self._room = length, self._room - less

    def tail(self, new: KV, sizes: Sizes) -> KV:
        """Return the tokens of which further compressed blocks are made, ``new`` the last. ValueError for another layer's."""
        width, v_width = new.k.shape[3], new.v.shape[3]
        owner = {
            **sizes._asdict(),
            "n_kv_heads": new.k.shape[2],
            "head_dim": width,
            "v_head_dim": v_width,
            "dtype": new.k.dtype,
        }
        other = [f"{name}={kept} (here {owner[name]})" for name, kept in self._owner.items() if kept != owner[name]]
        if other:
            raise ValueError(f"cache: is of a layer with {', '.join(other)}; each layer needs its own KVCache()")
        self._owner, self._sizes = owner, sizes
        if self._tail is None:
            return new
        batch, kept = new.k.shape[0], self._tail.k.shape[0]
        if batch != kept:
            raise ValueError(
                f"x has batch {batch}: the cache has {kept} sequences; cache.reorder(index) repeats or drops them, and others "
                "need a new KVCache()"
            )
        return _joined(self._tail.between(self._ahead, self._tail.k.shape[1]), new)

    def append(self, cmp: KV, sel: KV, win: KV, tail: KV) -> tuple[KV, KV, KV]:
        """Take in new tokens, and the blocks ``cmp`` that `tail` made; return all keys that the new tokens may see, by branch."""
        n, l_w = sel.k.shape[1], self._sizes.window - 1
        done = self._ahead + cmp.k.shape[1] * self._sizes.compress_stride
        kept = tail if self._tail is None or not self._ahead else _joined(self._tail.between(0, self._ahead), tail)
        first = max(0, done - -(-self.spare // self._sizes.compress_stride) * self._sizes.compress_stride)
        # Copies: a view would keep all tokens of the call.
        self._tail, self._ahead = KV(kept.k[:, first:].clone(), kept.v[:, first:].clone()), done - first
        seen = win if self._window is None else _joined(self._window, win)
        self._window = KV(_last(seen.k, l_w + self.spare), _last(seen.v, l_w + self.spare))
        self.length += n
        self._room = min(self.spare, self._room + n)
        return (
            KV(self._compressed[0].append(cmp.k), self._compressed[1].append(cmp.v)),
            KV(self._selected[0].append(sel.k), self._selected[1].append(sel.v)),
            seen.between(max(0, seen.k.shape[1] - l_w - n), seen.k.shape[1]),
        )


def _joined(a: KV, b: KV) -> KV:
    return KV(torch.cat((a.k, b.k), 1), torch.cat((a.v, b.v), 1))


def _last(x: torch.Tensor, n: int) -> torch.Tensor:
    return x[:, max(0, x.shape[1] - n) :].clone()


def attend_gated(
    q: torch.Tensor, cmp: KV, sel: KV, win: KV, gates: torch.Tensor, start: int, sizes: Sizes, *, scale: float,
    backend: str, listener: Callable[[torch.Tensor], None] | None = None, forced: Branch | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return `attend` and the gated sum, [B, T, H, Dv]; by its own kernels for a few tokens on a GPU, where triton serves.

    ``listener`` receives the selection, bool [B, T, G, Ns]. A ``forced`` branch is returned alone, without its gate.
    """
    n_blocks = blocks.num_selection(start + q.shape[1], sizes.select_block)
    if forced is None and explain(backend, q.dtype, q.device, q.shape[-1], sel[1].shape[-1])[0] == "triton":
        from nsa.kernels.triton import decoding as on_gpu

        if on_gpu.serves(q, sel[1].shape[-1], sizes):
            y, picks = on_gpu.attend(q, cmp, sel, win, gates, start, *sizes, scale)
            if listener is not None:
                listener(selection_mask(picks, n_blocks).unflatten(0, q.shape[:2]))
            return y
    out, chosen = attend(q, cmp, sel, win, start, sizes, scale=scale, branches=(forced,) if forced else BRANCHES)
    if chosen is not None and listener is not None:
        listener(chosen)
    return out[forced] if forced else sum_branches(out, gates)


def attend(
    q: torch.Tensor, cmp: KV, sel: KV, win: KV, start: int, sizes: Sizes, *, scale: float, branches: tuple[Branch, ...],
) -> tuple[dict[Branch, torch.Tensor], torch.Tensor | None]:  # fmt: skip
    """As `dispatch.attend`, before the gated sum, for queries q [B, T, H, Dk] that follow ``start`` tokens.

    ``cmp`` and ``sel`` are (key, value) of all blocks and tokens, ``win`` of the last tokens, as `KVCache` returns them.
    """
    l, d, l_sel, n_sel, w = sizes
    total = start + q.shape[1]
    t = torch.arange(start, total, device=q.device)
    out: dict[Branch, torch.Tensor] = {}
    chosen = None
    if "cmp" in branches or "sel" in branches:
        p = probabilities(q, cmp[0], blocks.compressed_visible(total, cmp[0].shape[1], l, d, q.device, start), scale)
        out["cmp"] = weighted(p, cmp[1])
        if "sel" in branches:
            importance = _importance(p.sum(2), blocks.num_selection(total, l_sel), l // d, l_sel // d).transpose(1, 2)
            chosen = blocks.select(importance, l_sel, n_sel, first=start)
            parts = zip(q.split(QUERIES, 1), chosen.split(QUERIES, 1), t.split(QUERIES), strict=True)
            out["sel"] = torch.cat([_selected(some, *sel, c, at, l_sel, n_sel, scale) for some, c, at in parts], 1)
    if "win" in branches:
        back = t[:, None] - torch.arange(total - win[0].shape[1], total, device=q.device)[None, :]
        out["win"] = weighted(probabilities(q, win[0], (back >= 0) & (back < w), scale), win[1])
    return {branch: out[branch] for branch in branches}, chosen


def _importance(p: torch.Tensor, n_blocks: int, a: int, r: int) -> torch.Tensor:
    """Block scores [..., Ns] of probabilities [..., Nc] (Eq. 9), where a compressed block has a strides and a selection block r.

    As `blocks.overlap` weighs them, in O(Nc) time: the mass of each stride, then of each block's strides.
    """
    n_cmp, strides = p.shape[-1], n_blocks * r
    mass = p.new_zeros(*p.shape[:-1], strides)
    for i in range(a if n_cmp else 0):
        mass[..., i : i + n_cmp] += p[..., : strides - i]
    return mass.unflatten(-1, (n_blocks, r)).sum(-1)


def _selected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chosen: torch.Tensor,
    t: torch.Tensor,
    l_sel: int,
    n_sel: int,
    scale: float,
) -> torch.Tensor:
    """Attend to the chosen blocks' tokens, gathered per query: [B, T, H, Dv] in v's dtype. chosen bool [B, T, G, Ns].

    In float32 for the half types, under autocast too: q k^T exceeds float16's range before it is scaled.
    """
    B, _, H, _ = q.shape
    G, wide = k.shape[2], blocks.wide(q.dtype)
    picked = chosen.to(torch.uint8).sort(dim=-1, descending=True, stable=True)
    n = min(n_sel, chosen.shape[3])
    tokens = picked.indices[..., :n, None] * l_sel + torch.arange(l_sel, device=q.device)  # [B, T, G, n, l_sel]
    seen = (picked.values[..., :n, None] > 0) & (tokens <= t[None, :, None, None, None])
    tokens, seen = tokens.clamp(max=k.shape[1] - 1).flatten(3), seen.flatten(3)
    b = torch.arange(B, device=q.device)[:, None, None, None]
    g = torch.arange(G, device=q.device)[None, None, :, None]
    with without_autocast(q.device):
        scores = torch.einsum("btghd,btgnd->btghn", q.unflatten(2, (G, H // G)).to(wide), k[b, tokens, g].to(wide))
        p = (scores * scale).masked_fill(~seen[:, :, :, None], float("-inf")).softmax(-1)
        return torch.einsum("btghn,btgnd->btghd", p, v[b, tokens, g].to(wide)).flatten(2, 3).to(v.dtype)
