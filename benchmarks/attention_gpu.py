"""NSA attention on a GPU beside dense attention: every branch, and the whole, forward and backward.

    python benchmarks/attention_gpu.py --json benchmarks/results/attention_gpu.json

Times are medians of CUDA events over interleaved runs. `roofline` measures a copy and a matrix product in the same run; a branch's
share is the time that the products of its visible pairs need at that rate, over the time that it took.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nsa import nsa_attention
from nsa.kernels import blocks, ops, triton_ops

SHAPES = {"paper": (64, 4, 192, 128), "125m": (12, 2, 64, 64)}
SIZES = {"l": 32, "d": 16, "l_sel": 64, "n_sel": 16, "w": 512}
Call = Callable[[], Any]


def timed(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Milliseconds of each call, taking turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if number >= 2:
                found[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in found.items()}


def roofline() -> dict[str, float]:
    """TFLOP/s of a bf16 product and TB/s of a copy, read and written."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.empty(1 << 29, device="cuda", dtype=torch.bfloat16)
    c = torch.empty_like(b)
    ms = timed({"product": lambda: a @ a, "copy": lambda: c.copy_(b)}, 10)
    return {"tflops": 2 * 8192**3 / ms["product"] / 1e9, "tbytes": 2 * b.numel() * 2 / ms["copy"] / 1e9}


def products(S: int, H: int, d_k: int, d_v: int) -> dict[str, float]:
    """Floating point operations of each branch's forward, of visible pairs alone; backward has 2.5 times as many."""
    pairs = {
        "sliding": S * min(S, SIZES["w"]) - min(S, SIZES["w"]) ** 2 / 2,
        "compressed": S * S / 2 / SIZES["d"],
        "selected": S * min(S, SIZES["n_sel"] * SIZES["l_sel"]) - min(S, SIZES["n_sel"] * SIZES["l_sel"]) ** 2 / 2,
        "dense": S * S / 2,
    }
    return {name: n * H * 2 * (d_k + d_v) for name, n in pairs.items()}


def with_backward(forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> tuple[Call, Call]:
    """The forward, without gradients; and the backward of one forward."""
    out = forward()
    grad = torch.randn_like(out)

    def only_forward() -> None:
        with torch.no_grad():
            forward()

    return only_forward, lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True, allow_unused=True)


def measure(shape: str, S: int, rounds: int, rates: dict[str, float]) -> dict[str, Any]:
    """All contenders at one length."""
    H, G, d_k, d_v = SHAPES[shape]
    n, scale = blocks.num_compressed(S, SIZES["l"], SIZES["d"]), d_k**-0.5

    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_()

    q, k, v, k_cmp, v_cmp = (
        leaf(1, S, H, d_k),
        leaf(1, S, G, d_k),
        leaf(1, S, G, d_v),
        leaf(1, n, G, d_k),
        leaf(1, n, G, d_v),
    )
    gates = torch.rand(1, S, H, 3, device="cuda", dtype=torch.bfloat16).requires_grad_()
    with torch.no_grad():
        importance = ops.compressed(q, k_cmp, v_cmp, SIZES["l"], SIZES["d"], SIZES["l_sel"], scale, "triton")[2]
        chosen = ops.select(importance, SIZES["l_sel"], SIZES["n_sel"])
    forwards: dict[str, tuple[Callable[[], torch.Tensor], list[torch.Tensor]]] = {
        "sliding": (lambda: ops.sliding(q, k, v, SIZES["w"], scale, "triton")[0], [q, k, v]),
        "compressed": (
            lambda: ops.compressed(q, k_cmp, v_cmp, SIZES["l"], SIZES["d"], SIZES["l_sel"], scale, "triton")[0],
            [q, k_cmp, v_cmp],
        ),
        "selected": (
            lambda: ops.selected(q, k, v, chosen, SIZES["l_sel"], SIZES["n_sel"], scale, "triton")[0], [q, k, v],
        ),
        "nsa": (
            lambda: nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, **SIZES, backend="triton"),
            [q, k_cmp, v_cmp, k, v, gates],
        ),
        "dense": (lambda: _dense(q, k, v, scale), [q, k, v]),
    }  # fmt: skip
    calls: dict[str, Call] = {"select": lambda: ops.select(importance, SIZES["l_sel"], SIZES["n_sel"])}
    for name, (forward, inputs) in forwards.items():
        calls[f"{name} forward"], calls[f"{name} backward"] = with_backward(forward, inputs)
    for form in (triton_ops.by_query, triton_ops.by_block):
        arguments = (q.detach(), k.detach(), v.detach(), chosen, SIZES["l_sel"], SIZES["n_sel"], scale)
        calls[f"selected forward {form.__name__}"] = lambda form=form, arguments=arguments: form(*arguments)
    ms = timed(calls, rounds)
    share = {}
    for name, flops in products(S, H, d_k, d_v).items():
        for way, factor in (("forward", 1.0), ("backward", 2.5)):
            share[f"{name} {way}"] = flops * factor / rates["tflops"] / 1e9 / ms[f"{name} {way}"]
    return {
        "ms": ms, "share_of_product_rate": share,
        "over_dense": {way: ms[f"dense {way}"] / ms[f"nsa {way}"] for way in ("forward", "backward")},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    if v.shape[-1] < q.shape[-1]:  # flash attention wants equal head dims
        v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with torch.nn.attention.sdpa_kernel(
        [torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.CUDNN_ATTENTION]
    ):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def main() -> None:
    """Measure, print, keep: each length as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768, 65536])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    rates = roofline()
    figures: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "python": platform.python_version(), "roofline": rates, "sizes": SIZES, "shapes": {},
    }  # fmt: skip
    import triton

    figures["triton"] = triton.__version__
    for shape in SHAPES:
        figures["shapes"][shape] = {}
        for S in arguments.lengths:
            torch.cuda.reset_peak_memory_stats()
            try:
                found = measure(shape, S, arguments.rounds, rates)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                found = {"error": f"{type(error).__name__}: {error}"[:500]}
            figures["shapes"][shape][str(S)] = found
            torch.cuda.empty_cache()
            if arguments.json:
                arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
