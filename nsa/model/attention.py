"""The NSA layer, read in the paper's order: project, compress, attend in three branches, gate, sum.

Shapes: B batch, S tokens, H query heads, G KV groups, Nc compressed blocks, Ns selection blocks.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from nsa.config import ModelConfig
from nsa.kernels.checks import check_hidden, pack_ends
from nsa.kernels.compression import mean_of_blocks, tokens_of_blocks
from nsa.kernels.derivatives import has_tangent, is_transformed
from nsa.kernels.dispatch import attend, attend_densely, check_backend, zero_times
from nsa.kernels.triton import support
from nsa.kernels.triton.operators import rotate
from nsa.model import decoding
from nsa.model.decoding import KVCache
from nsa.sizes import BRANCHES, KV, Branch, Sizes

Table = tuple[torch.Tensor, torch.Tensor]  # cosines and signed sines
Compression = Callable[..., torch.Tensor]


class Rotary(nn.Module):
    """Rotary position embedding (arXiv 2104.09864), angles computed for the positions requested."""

    def __init__(self, d: int, theta: float) -> None:
        super().__init__()
        self.d, self.theta = d, theta

    def table(self, positions: torch.Tensor, dtype: torch.dtype) -> Table:
        """Return what turns x [B, N, heads, d] to ``positions`` [N]: two factors [1, N, 1, d], once for all tensors that share
        positions.
        """
        # No buffer: `model.bfloat16()` would round the frequencies, and with them every angle.
        wide = torch.promote_types(dtype, torch.float32)
        frequencies = self.theta ** (-torch.arange(0, self.d, 2, device=positions.device, dtype=wide) / self.d)
        angles = positions.to(wide)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        # (a cos - b sin, b cos + a sin) of the halves a and b, in two products.
        both, crossed = (torch.cat(pair, -1)[None, :, None].to(dtype) for pair in ((cos, cos), (-sin, sin)))
        return both, crossed

    def turn(self, x: torch.Tensor, table: Table) -> torch.Tensor:
        """Rotate x [B, N, heads, d] by a `table`; same shape and dtype. One kernel on a GPU, unless a compiler joins them, or
        other derivatives than a backward may be asked of it.
        """
        by_torch = not x.is_cuda or torch.compiler.is_compiling() or is_transformed(x)
        if not by_torch and not support.why_not(x.dtype, x.device, self.d, self.d):
            return rotate(x, *table, False)
        return torch.addcmul(x * table[0], x.roll(x.shape[-1] // 2, -1), table[1])

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [B, N, heads, d] rotated to ``positions`` [N]; same shape and dtype."""
        return self.turn(x, self.table(positions, x.dtype))


def _positions(tokens: int, start: int, ends: Sequence[int] | None, device: torch.device) -> torch.Tensor:
    """Return each token's place in its sequence, int64 [tokens]: from ``start`` on, or of a pack with these ``ends``.

    In a pack each sequence begins at 0, as the error of a float32 angle grows with the position.
    """
    if ends is None:
        return torch.arange(start, start + tokens, device=device)
    bounds, t = torch.tensor(ends, device="cpu"), torch.arange(tokens, device="cpu")
    return (t - bounds[torch.searchsorted(bounds, t, right=True) - 1]).to(device, non_blocking=True)


class MLPCompression(nn.Module):
    """phi as a learnable MLP over a block, with a position code inside the block (paper, Eq. 7). Shapes as `mean_of_blocks`."""

    def __init__(self, l: int, d: int, width: int) -> None:
        super().__init__()
        self.l, self.d = l, d
        self.position = nn.Parameter(torch.randn(l, width) * 0.02)
        self.fc1 = nn.Linear(l * width, 2 * width, bias=False)
        self.fc2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        B, S, G, D = x.shape
        if tokens is not None:
            windows = x[:, tokens].transpose(2, 3)  # [B, Nc, G, l, D]
        elif self.l > S:
            # None, and in the graph all the same: every parameter gets a gradient.
            windows = x[:, :0, :, None].expand(B, 0, G, self.l, D)
        else:
            windows = x.unfold(1, self.l, self.d).transpose(-1, -2)  # [B, Nc, G, l, D]
        return self.fc2(F.silu(self.fc1((windows + self.position).flatten(-2))))


class Gate(nn.Module):
    """The gate (paper, Eq. 5): a sigmoid MLP, x [..., dim] -> gates [..., H, 3] in (0, 1), in the order cmp, sel, win.

    H is that of as many outputs as fc2 has.
    """

    def __init__(self, dim: int, n_heads: int, hidden: int, *, stop_gradient: bool = False) -> None:
        super().__init__()
        self.stop_gradient = stop_gradient
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, n_heads * len(BRANCHES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = torch.sigmoid(self.fc2(F.silu(self.fc1(x))))
        if self.stop_gradient:
            # The branches keep training; the gate's own parameters get zero gradients, not none.
            gates = gates.detach() + gates * 0
        return gates.unflatten(-1, (gates.shape[-1] // len(BRANCHES), len(BRANCHES)))


def _side_by_side(x: torch.Tensor, linears: Sequence[nn.Module]) -> Sequence[torch.Tensor]:
    """Return what each of several Linears makes of x [N, dim], in one product; one by one where one is another kind, or is
    hooked.
    """
    if not all(_is_plain(one) for one in linears):
        return [one(x) for one in linears]
    weights = [one.weight for one in linears]
    return F.linear(x, torch.cat(weights)).split([len(w) for w in weights], -1)


def _is_plain(linear: nn.Module) -> bool:
    """Return whether it is a product with its weight and nothing else, without hooks or changes of the user's.

    torch's global hooks (`register_module_forward_hook`) are hooks of every module.
    """
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return (
        type(linear) is nn.Linear
        and linear.bias is None
        and type(linear.weight)
        in (nn.Parameter, torch.Tensor)  # a quantised weight, for example, may not be joined to others
        and "forward" not in linear.__dict__
        and not any(getattr(linear, name) or getattr(torch.nn.modules.module, f"_global{name}") for name in hooks)
    )


class NSAAttention(nn.Module):
    """Native Sparse Attention (arXiv 2502.11089), causal. x [B, S, dim] -> [B, S, dim].

    The sizes of blocks and window are in tokens, as in `Sizes`. ``v_head_dim`` is ``head_dim`` when None. ``force_branch`` runs
    one branch alone with gate 1; the other branches' parameters and the gate's then get zero gradients. A projection that a
    plan of tensor parallelism has split by heads is taken with the heads that it returns. Raises ValueError for sizes that do
    not fit each other.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        compress_block: int = 32,
        compress_stride: int = 16,
        select_block: int = 64,
        n_select: int = 16,
        window: int = 512,
        compression: str = "mean",
        gate_hidden: int | None = None,
        force_branch: Branch | None = None,
        stop_gate_gradient: bool = False,
        rope_theta: float = 10000.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        gate_hidden = max(16, dim // 4) if gate_hidden is None else gate_hidden
        counts = {
            "dim": dim,
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "v_head_dim": v_head_dim,
        }
        for name, value in {**counts, "gate_hidden": gate_hidden}.items():
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if n_heads % n_kv_heads:
            raise ValueError(f"n_heads={n_heads}: must be a multiple of n_kv_heads={n_kv_heads}")
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim}: must be even, as the rotation turns pairs")
        if not 0 < rope_theta < math.inf:
            raise ValueError(f"rope_theta={rope_theta}: must be a finite number above 0")
        if force_branch not in (None, *BRANCHES):
            raise ValueError(f"force_branch={force_branch!r}: must be {', '.join(BRANCHES)} or None")
        check_backend(backend)
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.sizes = Sizes(compress_block, compress_stride, select_block, n_select, window).check()
        self.force_branch, self.backend = force_branch, backend
        # Receives each selection, bool [B, S, G, Ns]; set by nsa.training.statistics.
        self.selection_listener: Callable[[torch.Tensor], None] | None = None
        self.w_q = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.k_sel = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.v_sel = nn.Linear(dim, n_kv_heads * v_head_dim, bias=False)
        self.k_win = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.v_win = nn.Linear(dim, n_kv_heads * v_head_dim, bias=False)
        self.k_cmp = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.v_cmp = nn.Linear(dim, n_kv_heads * v_head_dim, bias=False)
        self.gate = Gate(dim, n_heads, gate_hidden, stop_gradient=stop_gate_gradient)
        self.out = nn.Linear(n_heads * v_head_dim, dim, bias=False)
        self.rotary = Rotary(head_dim, rope_theta)
        if compression == "mlp":
            self.compress_k: Compression = MLPCompression(compress_block, compress_stride, head_dim)
            self.compress_v: Compression = MLPCompression(compress_block, compress_stride, v_head_dim)
        elif compression == "mean":
            self.compress_k = self.compress_v = functools.partial(mean_of_blocks, l=compress_block, d=compress_stride)
        else:
            raise ValueError(f"compression={compression!r}: must be mean or mlp")

    @classmethod
    def from_config(cls, m: ModelConfig) -> Self:
        """Return the layer that a model configuration describes."""
        return cls(
            m.dim, m.n_heads, m.n_kv_heads, m.head_dim, v_head_dim=m.v_head_dim, **m.sizes._asdict(),
            compression=m.compression, gate_hidden=m.gate_hidden, force_branch=m.force_branch,
            stop_gate_gradient=m.stop_gate_gradient, rope_theta=m.rope_theta, backend=m.backend,
        )  # fmt: skip

    def forward(
        self, x: torch.Tensor, cache: KVCache | None = None, cu_seqlens: torch.Tensor | Sequence[int] | None = None
    ) -> torch.Tensor:
        """x [B, S, dim] -> [B, S, dim].

        With a ``cache``, x are the tokens after those that it has seen; RuntimeError where gradients are enabled, and for
        tangents of forward mode. With ``cu_seqlens`` (int [n + 1] or a list, B = 1) x are packed sequences, of which none sees
        another. ValueError for what does not fit.
        """
        check_hidden(x, self.w_q.in_features)
        if cache is not None and not isinstance(cache, KVCache):
            raise ValueError(f"cache is {type(cache).__name__}: must be a nsa.KVCache")
        B, S, _ = x.shape
        start = 0 if cache is None else cache.length
        if cache is not None and torch.is_grad_enabled():
            raise RuntimeError("a KVCache keeps no gradients: decode under torch.no_grad() or torch.inference_mode()")
        # Once: a Linear of three dimensions does it for itself, with two nodes of the graph each.
        flat = x.flatten(0, 1)

        def by_head(found: torch.Tensor, width: int) -> torch.Tensor:
            return found.unflatten(1, (found.shape[1] // width, width)).unflatten(0, (B, S))

        if cu_seqlens is not None and cache is not None:
            raise ValueError("cu_seqlens: a KVCache is of sequences that are not packed")
        ends = None if cu_seqlens is None else pack_ends(cu_seqlens, B, S)
        q = by_head(self.w_q(flat), self.head_dim)
        positions = _positions(S, start, ends, x.device)
        table = self.rotary.table(positions, q.dtype)
        linears = (self.k_sel, self.k_win, self.k_cmp, self.v_sel, self.v_win, self.v_cmp)
        # For one token, joining the weights costs more than it saves.
        found = _side_by_side(flat, linears) if cache is None else [one(flat) for one in linears]
        k_sel, k_win, k_cmp = (by_head(one, self.head_dim) for one in found[:3])
        v_sel, v_win, v_cmp = (by_head(one, self.v_head_dim) for one in found[3:])
        # Kept for the backward as they are, and views would keep all six.
        v_sel, v_win = v_sel.contiguous(), v_win.contiguous()
        q, k_sel, k_win = (self.rotary.turn(one, table) for one in (q, k_sel, k_win))
        gates = self.gate(flat).unflatten(0, (B, S))
        pairs = KV(k_cmp, v_cmp), KV(k_sel, v_sel), KV(k_win, v_win)
        y = self._attend(q, *pairs, gates, positions, start=start, cache=cache, ends=ends)
        return self.out(y.reshape(B * S, y.shape[2] * y.shape[3])).unflatten(0, (B, S))

    def _attend(
        self, q: torch.Tensor, cmp: KV, sel: KV, win: KV, gates: torch.Tensor, positions: torch.Tensor, *, start: int,
        cache: KVCache | None, ends: list[int] | None,
    ) -> torch.Tensor:  # fmt: skip
        """Tokens at ``positions`` [S], after ``start`` in a cache, or of a pack with these ``ends``; ``cmp`` [B, S, G, D] are not
        compressed yet.
        """
        if cache is not None and has_tangent(q, *cmp, *sel, *win, gates):
            raise RuntimeError(
                "a KVCache keeps no tangents: call the layer without a cache for forward-mode derivatives"
            )
        S, sizes = q.shape[1], self.sizes
        l, d = sizes.compress_block, sizes.compress_stride
        tail = cmp if cache is None else cache.tail(cmp, sizes)
        if ends is None:
            k_cmp, v_cmp = self.compress_k(tail[0]), self.compress_v(tail[1])
            last = torch.arange(k_cmp.shape[1], device=q.device) * d + (start + S - tail[0].shape[1] + l - 1)
        else:
            tokens = tokens_of_blocks(ends, l, d, q.device)
            k_cmp, v_cmp = self.compress_k(tail[0], tokens=tokens), self.compress_v(tail[1], tokens=tokens)
            last = positions[tokens[:, -1]]
        # Rotated after compression, to the block's last token: the mean of rotated keys would cancel itself.
        cmp = KV(self.rotary(k_cmp, last), v_cmp)
        if cache is not None:
            cmp, sel, win = cache.append(cmp, sel, win, tail)
        options: dict[str, Any] = {
            "scale": self.head_dim**-0.5,
            "backend": self.backend,
            "listener": self.selection_listener,
            "forced": self.force_branch,
        }
        if cache is not None and start and q.numel():
            return decoding.attend_gated(q, cmp, sel, win, gates, start, sizes, **options)
        y = attend(q, cmp, sel, win, gates, sizes, ends=ends, **options)
        return y + zero_times(*cmp, *sel, *win, gates) if self.force_branch else y


class DenseAttention(nn.Module):
    """Plain causal attention with the same heads: the control that passes where NSA hangs."""

    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.v_head_dim, self.backend = m.head_dim, m.v_head_dim, m.backend
        self.w_q = nn.Linear(m.dim, m.n_heads * m.head_dim, bias=False)
        self.w_k = nn.Linear(m.dim, m.n_kv_heads * m.head_dim, bias=False)
        self.w_v = nn.Linear(m.dim, m.n_kv_heads * m.v_head_dim, bias=False)
        self.out = nn.Linear(m.n_heads * m.v_head_dim, m.dim, bias=False)
        self.rotary = Rotary(m.head_dim, m.rope_theta)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, dim] -> [B, S, dim]."""
        check_hidden(x, self.w_q.in_features)
        q, k, v = (
            one.unflatten(-1, (one.shape[-1] // width, width))
            for one, width in (
                (self.w_q(x), self.head_dim),
                (self.w_k(x), self.head_dim),
                (self.w_v(x), self.v_head_dim),
            )
        )
        table = self.rotary.table(_positions(x.shape[1], 0, None, x.device), q.dtype)
        q, k = self.rotary.turn(q, table), self.rotary.turn(k, table)
        return self.out(attend_densely(q, k, v, q.shape[-1] ** -0.5, self.backend).flatten(-2))
