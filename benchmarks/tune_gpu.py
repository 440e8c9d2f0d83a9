"""Which tile sizes are fastest on this GPU; merged into a table such as nsa/kernels/tiles.json, which the kernels read.

    python benchmarks/tune_gpu.py --json nsa/kernels/tiles.json

Of each kernel, in the shapes of attention_gpu.py: from what it has now, one field (rows, keys, warps, stages) at a time is halved
and doubled, and what is faster by more than `GAIN` is kept, until nothing is. A size that the compiler or the GPU refuses is passed
over, as is one whose result is another. Without a GPU it looks for errors alone, as attention_gpu.py's --dry-run does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from attention_gpu import DEVICE, SHAPES, SIZES, timed
from nsa.kernels.triton_ops import Tiles

from nsa.kernels import blocks, triton_ops

GAIN = 0.02
LIMITS = Tiles(256, 128, 16, 5)
LEAST = Tiles(16, 16, 1, 1)
Call = Callable[[], Any]


def jobs(shape: str, S: int, dtype: torch.dtype) -> dict[str, Call]:
    """By kernel, something that launches it."""
    H, G, d_k, d_v = SHAPES[shape]
    n, scale = blocks.num_compressed(S, SIZES["l"], SIZES["d"]), d_k**-0.5
    q, k, v, k_cmp, v_cmp, do = (
        torch.randn(size, device=DEVICE, dtype=dtype)
        for size in ((1, S, H, d_k), (1, S, G, d_k), (1, S, G, d_v), (1, n, G, d_k), (1, n, G, d_v), (1, S, H, d_v))
    )
    blocked = SIZES["l"], SIZES["d"], SIZES["l_sel"], scale
    out_win, lse_win = triton_ops.sliding_forward(q, k, v, SIZES["w"], scale)
    out_cmp, lse_cmp, importance = triton_ops.compressed_forward(q, k_cmp, v_cmp, *blocked)
    chosen = triton_ops.select(importance, SIZES["l_sel"], min(SIZES["n_sel"], importance.shape[-1]))
    selection = chosen, SIZES["l_sel"], min(SIZES["n_sel"], importance.shape[-1]), scale
    out_sel, lse_sel = triton_ops.selected_forward(q, k, v, *selection)

    def backward() -> Any:
        return (
            *triton_ops.sliding_backward(do, q, k, v, out_win, lse_win, SIZES["w"], scale),
            *triton_ops.compressed_backward(do, q, k_cmp, v_cmp, out_cmp, lse_cmp, SIZES["l"], SIZES["d"], scale),
        )

    def forward() -> Any:
        return (*triton_ops.sliding_forward(q, k, v, SIZES["w"], scale), *compressed())

    def compressed() -> Any:
        return triton_ops.compressed_forward(q, k_cmp, v_cmp, *blocked)

    def selected_backward() -> Any:
        return triton_ops.selected_backward(do, q, k, v, out_sel, lse_sel, *selection)

    return {
        "forward": forward, "importance": compressed, "dq": backward, "dkv": backward,
        "by_query": lambda: triton_ops.by_query(q, k, v, *selection),
        "by_block": lambda: triton_ops.by_block(q, k, v, *selection), "selected_dq": selected_backward,
        "selected_dkv": selected_backward,
    }  # fmt: skip


def neighbours(now: Tiles) -> list[Tiles]:
    """``now`` with one field halved or doubled; stages by one."""
    found = []
    for field, value in now._asdict().items():
        others = (value - 1, value + 1) if field == "stages" else (value // 2, value * 2)
        least, most = getattr(LEAST, field), getattr(LIMITS, field)
        found += [now._replace(**{field: other}) for other in others if value and least <= other <= most]
    return found


def tune(kernel: str, call: Call, start: Tiles, rounds: int, tolerance: float) -> tuple[Tiles, dict[str, float]]:
    """The fastest that a walk from ``start`` meets, and the milliseconds of all that were tried."""
    tried: dict[Tiles, float] = {}
    shipped = triton_ops.tiles

    def with_tiles(sizes: Tiles) -> Call:
        def run() -> Any:
            with mock.patch.object(
                triton_ops, "tiles", lambda name, q, d_v: sizes if name == kernel else shipped(name, q, d_v)
            ):
                return call()

        return run

    wanted = with_tiles(start)()
    best = start
    tried[start] = timed({"": with_tiles(start)}, rounds)[""]
    while True:
        for sizes in neighbours(best):
            if sizes in tried:
                continue
            tried[sizes] = float("inf")
            try:
                found = with_tiles(sizes)()
            except (
                Exception
            ) as refused:  # too much shared memory, too few rows for a product: as many kinds as compilers have
                print(f"  {kernel} {tuple(sizes)}: {type(refused).__name__}", flush=True)
                continue
            if all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in zip(found, wanted, strict=True)):
                tried[sizes] = timed({"": with_tiles(sizes)}, rounds)[""]
        fastest = min(tried, key=lambda sizes: tried[sizes])
        if tried[fastest] > tried[best] * (1 - GAIN):
            return best, {str(tuple(sizes)): round(ms, 4) for sizes, ms in tried.items() if ms < float("inf")}
        best = fastest


def main() -> None:
    """Tune, print, merge: after each kernel, so that a run that is cut off leaves what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="merge the table into this file")
    parser.add_argument("--length", type=int, default=8192, help="tokens (default: 8192)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--kernels", nargs="+", help="of these alone")
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter has no bfloat16
    gpu = triton_ops.capability(0) if DEVICE == "cuda" else "interpreter"
    table = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    known = table.setdefault(gpu, {})
    todo = []
    for shape in arguments.shapes:
        _, _, d_k, d_v = SHAPES[shape]
        for kernel, call in jobs(shape, arguments.length, dtype).items():
            if not arguments.kernels or kernel in arguments.kernels:
                todo.append(
                    (triton_ops.tile_name(kernel, d_k, d_v, 2), triton_ops.fitting(kernel, d_k, d_v, 2), kernel, call)
                )
    # What the table has comes last: a run that was cut off goes on where it was.
    for name, fitting, kernel, call in sorted(todo, key=lambda job: job[0] in known):
        start = Tiles(*known[name]) if name in known else fitting
        best, tried = tune(kernel, call, start, arguments.rounds, tolerance=0.1)
        print(json.dumps({"gpu": gpu, "kernel": name, "best": best, "ms": tried}), flush=True)
        known[name] = list(best)
        if arguments.json:
            arguments.json.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
