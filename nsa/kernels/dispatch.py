"""Which backend of the table (`backends`) serves an attention call: each choice explained and counted."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from nsa.kernels import blocks, flash, reference
from nsa.kernels.backends import BACKENDS, Backend, Listener
from nsa.kernels.checks import check_inputs, pack_ends
from nsa.sizes import BRANCHES, KV, Branch, Sizes

# (requested, used, reason) -> calls; written to fallback_counters.csv by the telemetry.
counters: Counter[tuple[str, str, str]] = Counter()


def check_backend(backend: str) -> None:
    """Raise ValueError for a name that is not a backend's."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of auto, {', '.join(BACKENDS)}")


def explain(
    backend: str, dtype: torch.dtype, device: torch.device, head_dim: int = 64, v_head_dim: int | None = None
) -> tuple[str, str]:
    """Return the backend that would serve a call, and why.

    ``auto`` takes what is fastest and can serve: on a GPU triton, else sdpa; on a CPU cpu; for float64 reference, which
    serves to check against the equations. Raises ValueError for an unknown name, and for a backend that was requested by
    name and cannot serve; the message has the reason.
    """
    check_backend(backend)
    d_k, d_v = head_dim, head_dim if v_head_dim is None else v_head_dim
    if backend != "auto":
        reason = BACKENDS[backend].why_not(dtype, device, d_k, d_v)
        if reason:
            raise ValueError(f"backend={backend!r}: {reason}; use backend='auto'")
        if backend == "flash" and not flash.is_there():
            return backend, "asked for; flash-attn is not installed, so the window is torch's own fused attention"
        return backend, "asked for"
    if dtype == torch.float64:
        return "reference", "float64 is for checking against the equations"
    if device.type == "cpu":
        return "cpu", f"our tiles serve {dtype} on cpu"
    reason = BACKENDS["triton"].why_not(dtype, device, d_k, d_v)
    return ("sdpa", reason) if reason else ("triton", f"our kernels serve {dtype} on {device.type}")


def choose(backend: str, dtype: torch.dtype, device: torch.device, d_k: int, d_v: int) -> Backend:
    """Return the backend; the choice is counted, in a compiled graph once, as it is traced."""
    return BACKENDS[_counted(backend, dtype, device, d_k, d_v)]


@blocks.constant_in_graphs
def _counted(backend: str, dtype: torch.dtype, device: torch.device, d_k: int, d_v: int) -> str:
    name, why = explain(backend, dtype, device, d_k, d_v)
    counters[backend, name, why] += 1
    return name


def zero_times(*tensors: torch.Tensor) -> torch.Tensor:
    """Return a zero that depends on every tensor: each gets a zero gradient instead of none, so DDP reduces it."""
    return torch.stack([(t * 0).sum() for t in tensors]).sum()


def _is_empty(q: torch.Tensor) -> bool:
    return q.shape[0] == 0 or q.shape[1] == 0


def nothing(q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return the output where no query sees a token, zeros [B, S, H, Dv], in the graph of all inputs. ``others`` end with v."""
    return q.new_zeros(*q.shape[:3], others[-1].shape[-1]) + zero_times(q, *others)


def _run_branches(
    kernels: Any, q: torch.Tensor, cmp: KV, sel: KV, win: KV, sizes: Sizes, scale: float, branches: tuple[Branch, ...]
) -> tuple[dict[Branch, torch.Tensor], torch.Tensor | None]:
    """Return the outputs of ``branches``, and the selection bool [B, S, G, Ns] where one was made.

    Another branch is not computed, and leaves no node in the autograd graph.
    """
    l, d, l_sel, n_sel, w = sizes
    out: dict[Branch, torch.Tensor] = {}
    chosen = None
    if "cmp" in branches or "sel" in branches:
        with torch.set_grad_enabled(torch.is_grad_enabled() and "cmp" in branches):
            o_cmp, importance = kernels.compressed(q, *cmp, l=l, d=d, l_sel=l_sel, scale=scale)
        if "cmp" in branches:
            out["cmp"] = o_cmp
    if "sel" in branches:
        chosen = kernels.select(importance, l_sel, n_sel)
        out["sel"] = kernels.selected(q, *sel, chosen, l_sel=l_sel, n_sel=n_sel, scale=scale)
    if "win" in branches:
        out["win"] = kernels.sliding(q, *win, w=w, scale=scale)
    return out, chosen


def attend(
    q: torch.Tensor, cmp: KV, sel: KV, win: KV, gates: torch.Tensor, sizes: Sizes, *, scale: float, backend: str,
    ends: Sequence[int] | None = None, listener: Listener | None = None, forced: Branch | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute all three branches, weighted and summed (Eq. 5), or the ``forced`` one: [B, S, H, Dv]. Shapes as in `nsa_attention`.

    ``ends``: of a pack (B = 1), where its sequences begin and end, 0 first and S last. ``listener`` is given the selection of each
    sequence, bool [B, S, G, Ns].
    """
    if _is_empty(q):
        return nothing(q, *cmp, *win, gates, *sel)
    row = choose(backend, q.dtype, q.device, q.shape[-1], sel.v.shape[-1])
    if ends is None or (forced is None and row.whole is not None and row.takes_packs):
        return _attend(row, q, cmp, sel, win, gates, sizes, scale, ends, listener, forced)
    parts = []
    for s0, s1, c0, c1 in spans(ends, sizes.compress_block, sizes.compress_stride):
        keys = cmp.between(c0, c1), sel.between(s0, s1), win.between(s0, s1)
        parts.append(_attend(row, q[:, s0:s1], *keys, gates[:, s0:s1], sizes, scale, None, listener, forced))
    return torch.cat(parts, dim=1)


def _attend(
    row: Backend, q: torch.Tensor, cmp: KV, sel: KV, win: KV, gates: torch.Tensor, sizes: Sizes, scale: float,
    ends: Sequence[int] | None, listener: Listener | None, forced: Branch | None,
) -> torch.Tensor:  # fmt: skip
    if forced is None and row.whole is not None:
        return row.whole(q, cmp, sel, win, gates, sizes, scale, ends, listener)
    out, found = _run_branches(row.branches, q, cmp, sel, win, sizes, scale, (forced,) if forced else BRANCHES)
    if found is not None and listener is not None:
        listener(found)
    return out[forced] if forced else sum_branches(out, gates)


def attend_densely(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, backend: str) -> torch.Tensor:
    """Plain causal attention: q [B, S, H, Dk], k [B, S, G, Dk], v [B, S, G, Dv] -> [B, S, H, Dv].

    By the backend's window of all tokens; on a GPU by torch's fused attention, which is faster there than our window.
    """
    if _is_empty(q):
        return nothing(q, k, v)
    row = choose(backend, q.dtype, q.device, q.shape[-1], v.shape[-1])
    if row.dense is not None:
        return row.dense(q, k, v, scale=scale)
    return row.branches.sliding(q, k, v, w=q.shape[1], scale=scale)


def sum_branches(out: dict[Branch, torch.Tensor], gates: torch.Tensor) -> torch.Tensor:
    """Eq. 5: gates [B, S, H, 3] times the branches' outputs [B, S, H, Dv], summed."""
    return reference.gated_sum(out, gates.to(out["cmp"].dtype))


def nsa_attention(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    k_sel: torch.Tensor,
    v_sel: torch.Tensor,
    k_win: torch.Tensor,
    v_win: torch.Tensor,
    gates: torch.Tensor,
    *,
    sizes: Sizes,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Native Sparse Attention, the gated sum of three branches (arXiv 2502.11089, Eq. 5).

    Args:
        q: [B, S, H, Dk]; query head i belongs to KV group i // (H/G).
        k_cmp, v_cmp: [B, Nc, G, Dk] and [B, Nc, G, Dv], already compressed, Nc = max(0, (S - l) // d + 1)
            with l, d = compress_block, compress_stride.
        k_sel, v_sel, k_win, v_win: [B, S, G, Dk] and [B, S, G, Dv].
        gates: [B, S, H, 3], after the sigmoid, in the order cmp, sel, win. None is below zero: triton makes its gradient NaN.
        sizes: of the blocks and the window, as `Sizes(window=256)`; what is not named is the paper's.
        scale: of the scores, above 0; 1/sqrt(Dk) when None.
        cu_seqlens: int [n + 1] or a list, for B = 1: token offsets of packed sequences, 0 first and S last. Nc is then the
            sum over the sequences.
        backend: ``auto``, or one of `BACKENDS` by name; `explain` names the one that would serve, and the reason.

    Returns: [B, S, H, Dv]. Raises ValueError naming the argument that does not fit.
    """
    l, d = sizes.check()[:2]
    if scale is not None and scale <= 0:
        raise ValueError(f"scale={scale}: must be above 0")
    pairs = KV(k_cmp, v_cmp), KV(k_sel, v_sel), KV(k_win, v_win)
    check_inputs(q, *pairs, gates)
    ends = None if cu_seqlens is None else pack_ends(cu_seqlens, q.shape[0], q.shape[1])
    lengths = [q.shape[1]] if ends is None else [b - a for a, b in pairwise(ends)]
    if k_cmp.shape[1] != sum(blocks.num_compressed(length, l, d) for length in lengths):
        raise ValueError(
            f"k_cmp has {k_cmp.shape[1]} blocks: S={q.shape[1]}, compress_block={l}, compress_stride={d} make another number"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend(q, *pairs, gates, sizes, scale=scale, backend=backend, ends=ends)


def reference_attention(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    k_sel: torch.Tensor,
    v_sel: torch.Tensor,
    k_win: torch.Tensor,
    v_win: torch.Tensor,
    gates: torch.Tensor,
    **settings: Any,
) -> torch.Tensor:
    """Return `nsa_attention` by the equations (``nsa.kernels.reference``); same arguments and shapes, any float dtype."""
    return nsa_attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, **{**settings, "backend": "reference"})


def spans(ends: Sequence[int], l: int, d: int) -> list[tuple[int, int, int, int]]:
    """Return (first token, end, first compressed block, end) of each packed sequence; an empty one is skipped."""
    found, at = [], 0
    for start, end in pairwise(ends):
        count = blocks.num_compressed(end - start, l, d)
        if end > start:
            found.append((start, end, at, at + count))
        at += count
    return found
