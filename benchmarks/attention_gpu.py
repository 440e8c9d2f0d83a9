"""NSA attention on a GPU beside dense attention and peers: every branch, and the whole, forward and backward.

    python benchmarks/attention_gpu.py --json benchmarks/results/attention_gpu.json

Times are medians of CUDA events over interleaved runs. The roofline, a matrix product and a copy, is measured in the same run. A
branch's floor is what its products of visible pairs need at the one rate or its inputs and outputs at the other, whichever is more;
its share is the floor over the time that it took. Contenders: dense, torch's flash attention; flex, FlexAttention; flash_attn
and fla's NSA where they are installed and take the shape. Without a GPU `--dry-run` runs the same code in Triton's interpreter
(TRITON_INTERPRET=1), on a tiny shape, for its errors: its times say nothing, and are not kept.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from figures import environment

from nsa import nsa_attention
from nsa.kernels import blocks, ops, triton_launch, triton_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter has no bfloat16
SHAPES = {"paper": (64, 4, 192, 128), "125m": (12, 2, 64, 64)} if DEVICE == "cuda" else {"tiny": (2, 1, 16, 16)}
WARM_UP = 2 if DEVICE == "cuda" else 0  # calls that are not counted
SIZES = {"l": 32, "d": 16, "l_sel": 64, "n_sel": 16, "w": 512}
Call = Callable[[], Any]


def timed(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Milliseconds of each call, taking turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + WARM_UP):
        for name, call in calls.items():
            if DEVICE == "cuda":
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize()
                took = begin.elapsed_time(end)
            else:
                began = time.perf_counter()
                call()
                took = 1e3 * (time.perf_counter() - began)
            if number >= WARM_UP:
                found[name].append(took)
    return {name: statistics.median(values) for name, values in found.items()}


def roofline(size: int = 8192) -> dict[str, float]:
    """TFLOP/s of a product and TB/s of a copy, read and written."""
    a = torch.randn(size, size, device=DEVICE, dtype=DTYPE)
    b = torch.empty(8 * size * size, device=DEVICE, dtype=DTYPE)
    c = torch.empty_like(b)
    ms = timed({"product": lambda: a @ a, "copy": lambda: c.copy_(b)}, 10)
    return {"tflops": 2 * size**3 / ms["product"] / 1e9, "tbytes": 2 * b.numel() * 2 / ms["copy"] / 1e9}


def floors(S: int, H: int, G: int, d_k: int, d_v: int, rates: dict[str, float]) -> dict[str, float]:
    """Milliseconds that each branch needs at least, by the roofline; a backward has 2.5 times the products of a forward."""
    w, chosen = min(S, SIZES["w"]), min(S, SIZES["n_sel"] * SIZES["l_sel"])
    pairs = {
        "sliding": S * w - w**2 / 2, "compressed": S * S / 2 / SIZES["d"], "selected": S * chosen - chosen**2 / 2,
        "dense": S * S / 2,
    }  # fmt: skip
    queries, keys = S * H * (d_k + d_v) * 2, S * G * (d_k + d_v) * 2  # bytes of q and out, and of k and v
    found = {}
    for name, n in pairs.items():
        read = keys / SIZES["d"] if name == "compressed" else keys
        scores = S * G * (S / SIZES["l_sel"]) * 4 if name == "compressed" else 0
        for way, products, moved in (
            ("forward", 1.0, queries + read + scores),
            ("backward", 2.5, 2 * (queries + read)),
        ):
            flops = products * n * H * 2 * (d_k + d_v)
            found[f"{name} {way}"] = max(flops / rates["tflops"] / 1e9, moved / rates["tbytes"] / 1e9)
    return found


def with_backward(forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> tuple[Call, Call]:
    """The forward, without gradients; and the backward of one forward."""
    out = forward()
    grad = torch.randn_like(out)

    def only_forward() -> None:
        with torch.no_grad():
            forward()

    return only_forward, lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True, allow_unused=True)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention by torch's fused kernels."""
    if v.shape[-1] < q.shape[-1]:  # flash attention wants equal head dims
        v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    fused = [torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.CUDNN_ATTENTION]
    with torch.nn.attention.sdpa_kernel(fused) if DEVICE == "cuda" else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention by FlexAttention; compiled where there is a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    run = compiled(flex_attention) if DEVICE == "cuda" else flex_attention
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out: torch.Tensor = run(q, k, v, block_mask=causal_mask(q.shape[2]), scale=scale, enable_gqa=True)
    return out


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Once a function."""
    return torch.compile(function)


@functools.cache
def causal_mask(S: int) -> Any:
    """FlexAttention's."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device=DEVICE)


def flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention by the package of that name."""
    from flash_attn import flash_attn_func

    out: torch.Tensor = flash_attn_func(q, k, v, softmax_scale=scale, causal=True)
    return out


def fla(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: torch.Tensor, scale: float) -> torch.Tensor:
    """fla's NSA: one K and V for all branches, means as compression, blocks of l' tokens that do not overlap."""
    from fla.ops.nsa.parallel import parallel_nsa

    each = [gate.contiguous() for gate in gates.unbind(-1)]
    out: torch.Tensor = parallel_nsa(
        q, k, v, g_cmp=each[0], g_slc=each[1], g_swa=each[2], block_counts=SIZES["n_sel"], block_size=SIZES["l_sel"],
        window_size=SIZES["w"], scale=scale,
    )  # fmt: skip
    return out


def measure(shape: str, S: int, rounds: int, rates: dict[str, float]) -> dict[str, Any]:
    """All contenders at one length."""
    H, G, d_k, d_v = SHAPES[shape]
    n, scale = blocks.num_compressed(S, SIZES["l"], SIZES["d"]), d_k**-0.5
    n_sel = min(SIZES["n_sel"], blocks.num_selection(S, SIZES["l_sel"]))

    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(size, device=DEVICE, dtype=DTYPE).requires_grad_()

    q, k, v = leaf(1, S, H, d_k), leaf(1, S, G, d_k), leaf(1, S, G, d_v)
    k_cmp, v_cmp = leaf(1, n, G, d_k), leaf(1, n, G, d_v)
    gates = torch.rand(1, S, H, 3, device=DEVICE, dtype=DTYPE).requires_grad_()
    blocked = SIZES["l"], SIZES["d"], SIZES["l_sel"], scale, "triton"
    with torch.no_grad():
        importance = ops.compressed(q, k_cmp, v_cmp, *blocked)[2]
        chosen = ops.select(importance, SIZES["l_sel"], n_sel, "triton")
    selection = chosen, SIZES["l_sel"], n_sel, scale
    forwards: dict[str, tuple[Callable[[], torch.Tensor], list[torch.Tensor]]] = {
        "sliding": (lambda: ops.sliding(q, k, v, SIZES["w"], scale, "triton")[0], [q, k, v]),
        "compressed": (lambda: ops.compressed(q, k_cmp, v_cmp, *blocked)[0], [q, k_cmp, v_cmp]),
        "selected": (lambda: ops.selected(q, k, v, *selection, "triton")[0], [q, k, v]),
        "nsa": (
            lambda: nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, **SIZES, backend="triton"),
            [q, k_cmp, v_cmp, k, v, gates],
        ),
        "dense": (lambda: dense(q, k, v, scale), [q, k, v]),
        "flex": (lambda: flex(q, k, v, scale), [q, k, v]),
        "flash_attn": (lambda: flash_attn(q, k, v, scale), [q, k, v]),
        "fla": (lambda: fla(q, k, v, gates, scale), [q, k, v, gates]),
    }
    calls: dict[str, Call] = {"select": lambda: ops.select(importance, SIZES["l_sel"], n_sel, "triton")}
    absent = {}
    for name, (forward, inputs) in forwards.items():
        try:
            calls[f"{name} forward"], backward = with_backward(forward, inputs)
            backward()
            calls[f"{name} backward"] = backward
        except Exception as refused:  # a peer that is not installed, or does not take the shape: each has its own kind
            if name in ("sliding", "compressed", "selected", "nsa", "dense"):
                raise
            absent[name] = f"{type(refused).__name__}: {refused}"[:200]
    for form in (triton_ops.by_query, triton_ops.by_block):
        arguments = (q.detach(), k.detach(), v.detach(), *selection)
        calls[f"selected forward {form.__name__}"] = lambda form=form, arguments=arguments: form(*arguments)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = timed(calls, rounds)
    least = floors(S, H, G, d_k, d_v, rates)
    ways = ("forward", "backward")
    whole = {way: sum(least[f"{name} {way}"] for name in ("sliding", "compressed", "selected")) for way in ways}
    share = {name: floor / ms[name] for name, floor in (least | {f"nsa {way}": whole[way] for way in ways}).items()}
    others = [name for name in ("dense", "flex", "flash_attn", "fla") if name not in absent]
    return {
        "ms": ms, "share_of_roofline": share, "absent": absent,
        "over": {other: {way: ms[f"{other} {way}"] / ms[f"nsa {way}"] for way in ways} for other in others},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None,
    }  # fmt: skip


def main() -> None:
    """Measure, print, keep: each length as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768, 65536])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--dry-run", action="store_true", help="without a GPU, in Triton's interpreter; nothing is kept"
    )
    arguments = parser.parse_args()
    if DEVICE != "cuda" and not arguments.dry_run:
        sys.exit("attention_gpu.py: no GPU here; --dry-run with TRITON_INTERPRET=1 looks for errors without one")
    if arguments.dry_run and (DEVICE == "cuda" or not triton_launch.is_interpreted() or arguments.json):
        sys.exit(
            "attention_gpu.py: --dry-run is for a machine without a GPU, with TRITON_INTERPRET=1 and without --json"
        )
    import triton

    rates = roofline(256 if arguments.dry_run else 8192)
    figures: dict[str, Any] = {
        **environment(), "cuda": torch.version.cuda, "triton": triton.__version__, "roofline": rates, "sizes": SIZES,
        "tiles": triton_ops.measured(triton_ops.capability(0)) if DEVICE == "cuda" else {}, "shapes": {},
    }  # fmt: skip
    failed = False
    for shape in arguments.shapes:
        figures["shapes"][shape] = {}
        for S in arguments.lengths:
            try:
                found = measure(shape, S, arguments.rounds, rates)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                found, failed = {"error": f"{type(error).__name__}: {error}"[:500]}, True
            figures["shapes"][shape][str(S)] = found
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
            if arguments.json:
                arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
