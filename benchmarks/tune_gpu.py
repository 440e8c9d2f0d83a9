"""Which tiles are fastest on this GPU; merged into a table such as nsa/kernels/triton/tiles.json, which the kernels read.

python benchmarks/tune_gpu.py --json nsa/kernels/triton/tiles.json

For each kernel, in the shapes of attention_gpu.py, the search starts from the tile that it has now. One field (rows, keys,
warps, stages, loops, TMA, registers) at a time is changed, and a tile that is faster by more than `GAIN` is kept, until none is,
or `--minutes` are over. All cores but one compile candidates beforehand, on tensors without memory. A candidate that the
compiler or the GPU refuses is passed over, and so is one with another result. Without a GPU the program only looks for
errors, as attention_gpu.py's --dry-run does.
"""

import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from ahead import compiling
from attention_gpu import DEVICE, DTYPE, OTHER_SIZES, SHAPES, SIZES, timed
from figures import parser_of

from nsa.kernels import blocks
from nsa.kernels.triton import block_schedule, branches, selection_schedule, tiles, whole
from nsa.kernels.triton.tiles import Tile

GAIN = 0.02
TOLERANCE = 0.02  # of the norm, between the results of two tiles; rounding may change a few picks
CHOICES: dict[str, tuple[Any, ...]] = {
    "bm": (16, 32, 64, 128), "bn": (32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3, 4), "loops": (1, 2), "tma": (False, True),
    "registers": (0, 168, 128),
}  # fmt: skip
# Fields that a kernel's program does not read.
IGNORED = {
    "importance": {"loops"}, "selected": {"bn", "loops", "tma", "registers"},
    "selected_backward": {"bn", "loops", "tma", "registers"},
    "compressed_dkv": {"tma"}, "sliding_dkv": {"tma"},
}  # fmt: skip
Call = Callable[[], Any]


def whole_call(shape: str, S: int, device: str) -> Call:
    """Return a call of a forward and its backward, whose results are compared; on 'meta' nothing is computed."""
    H, G, d_k, d_v = SHAPES[shape]
    n = blocks.num_compressed(S, SIZES.compress_block, SIZES.compress_stride)

    def tensor(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=DTYPE)

    pairs = [(tensor(1, m, G, d_k), tensor(1, m, G, d_v)) for m in (n, S, S)]
    q, gates, grad = tensor(1, S, H, d_k), tensor(1, S, H, 3).abs(), tensor(1, S, H, d_v)
    sizes, scale = SIZES, d_k**-0.5

    def run() -> list[torch.Tensor]:
        out, kept = whole.forward(q, *pairs, gates, None, sizes, scale)
        return [out, *whole.backward(grad, q, *pairs, gates, kept, None, sizes, scale)]

    return run


@contextlib.contextmanager
def replaced(name: str, by: Any) -> Iterator[None]:
    """Replace a name in the modules that launch kernels."""
    with contextlib.ExitStack() as stack:
        for module in (branches, block_schedule, selection_schedule):
            stack.enter_context(mock.patch.object(module, name, by))
        yield


def choosing(kernel: str, sizes: Tile, note: Callable[[], Any] = lambda: None) -> Callable[..., Tile]:
    """Return what replaces `tile` so that ``kernel`` has these sizes; ``note`` is called where they are asked for."""
    shipped = branches.tile

    def tile(name: str, *arguments: Any) -> Tile:
        if name != kernel:
            return shipped(name, *arguments)
        note()
        return sizes

    return tile


def with_sizes(kernel: str, sizes: Tile, call: Call) -> Call:
    """Return ``call``, in which ``kernel`` has these sizes."""
    by = choosing(kernel, sizes)

    def run() -> Any:
        with replaced("tile", by):
            return call()

    return run


def is_tuned(kernel: Any) -> bool:
    """Return whether a kernel has tiles."""
    return not kernel.__name__.startswith(("count", "scan", "place", "cut", "select_", "picks"))


def alone(kernel: str, sizes: Tile, call: Call) -> tuple[Any, Call]:
    """Return the results of ``call`` with these sizes, and the launch of ``kernel`` that it made, to be timed by itself.

    Of several launches, one per range of queries, it is the second: a launch keeps the parts of its range in memory.
    """
    launched: list[Call] = []
    start, is_next = branches.launch, False

    def note() -> None:
        nonlocal is_next
        is_next = True

    def noted(*arguments: Any, **settings: Any) -> None:
        nonlocal is_next
        if is_next and is_tuned(arguments[0]):
            if len(launched) < 2:
                launched.append(lambda: start(*arguments, **settings))
            is_next = False
        start(*arguments, **settings)

    by = choosing(kernel, sizes, note)
    with replaced("tile", by), replaced("launch", noted):
        found = call()
    del launched[:-1]
    return found, launched[0]


def is_near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether the difference is within `TOLERANCE` of the norm of ``wanted``; not for a NaN."""
    return bool((found.float() - wanted.float()).norm() <= TOLERANCE * wanted.float().norm())


def neighbours(kernel: str, now: Tile) -> list[Tile]:
    """Return ``now`` with one field changed to the choice before it or after it; a limit of registers, to any other."""
    found: list[Tile] = []
    for field, choices in CHOICES.items():
        if field in IGNORED.get(kernel, ()):
            continue
        at = choices.index(getattr(now, field)) if getattr(now, field) in choices else 0
        steps = range(len(choices)) if field == "registers" else range(max(0, at - 1), min(len(choices), at + 2))
        found += [now._replace(**{field: choices[i]}) for i in steps if i != at]
    return found


def compile_one(job: tuple[str, int, str, Tile, str]) -> None:
    """Fill Triton's cache with what a kernel with this tile compiles to; runs in a process of its own."""
    shape, S, kernel, sizes, on = job

    try:
        with compiling(on, is_tuned):
            with_sizes(kernel, sizes, whole_call(shape, S, "meta"))()
    except Exception as refused:  # timing meets it again, and passes it over
        print(f"  {kernel} {tuple(sizes)}: {type(refused).__name__}", flush=True)


def tune(
    kernel: str, shape: str, S: int, call: Call, start: Tile, rounds: int, deadline: float, pool: Any
) -> tuple[Tile, dict[str, float]]:
    """Return the fastest sizes that a walk from ``start`` meets, and the milliseconds of all that were tried."""
    on = tiles.capability(torch.device(DEVICE))
    found, launches = alone(kernel, start, call)
    wanted = [x.clone() for x in found]  # some kernels add to their results, each time that they are timed
    best: Tile = start
    tried: dict[Tile, float] = {start: timed({"": launches}, rounds)[""]}
    while time.monotonic() < deadline:
        candidates = [sizes for sizes in neighbours(kernel, best) if sizes not in tried]
        if pool is not None:
            pool.map(compile_one, [(shape, S, kernel, sizes, on) for sizes in candidates])
        for sizes in candidates:
            tried[sizes] = float("inf")
            found = launches = None  # frees the memory of the last one
            if time.monotonic() > deadline:
                continue
            try:
                found, launches = alone(kernel, sizes, call)
            except Exception as refused:  # too much shared memory, too few rows: compilers raise many types
                print(f"  {kernel} {tuple(sizes)}: {type(refused).__name__}", flush=True)
                continue
            if all(is_near(a, b) for a, b in zip(found, wanted, strict=True)):
                tried[sizes] = timed({"": launches}, rounds)[""]
        fastest = min(tried, key=lambda sizes: tried[sizes])
        if tried[fastest] > tried[best] * (1 - GAIN):
            break
        best = fastest
    return best, {str(tuple(sizes)): round(ms, 4) for sizes, ms in tried.items() if ms < float("inf")}


def main() -> None:
    """Tune, print, merge: after each kernel, so that a run that is cut off leaves what it found."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--length", type=int, default=65536, help="tokens (default: 65536); below 32768 for short sequences"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (default: 8)")
    parser.add_argument(
        "--shapes", nargs="+", default=[s for s in SHAPES if s not in OTHER_SIZES], choices=list(SHAPES)
    )
    parser.add_argument("--kernels", nargs="+", default=list(tiles.KERNELS), choices=tiles.KERNELS)
    arguments = parser.parse_args()
    gpu = tiles.capability(torch.device(DEVICE)) or "interpreter"
    table = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    known = table.setdefault(gpu, {})
    end = time.monotonic() + 60 * arguments.minutes
    todo = [(shape, kernel) for kernel in arguments.kernels for shape in arguments.shapes]
    context = multiprocessing.get_context("spawn")
    pool = context.Pool(max(1, (os.cpu_count() or 2) - 1)) if DEVICE == "cuda" else None
    for left, (shape, kernel) in zip(range(len(todo), 0, -1), todo, strict=True):
        _, _, d_k, d_v = SHAPES[shape]
        call = whole_call(shape, arguments.length, DEVICE)
        like = torch.empty(1, 1, d_k, device=DEVICE, dtype=DTYPE)
        start = tiles.tile(kernel, like, d_v, arguments.length)
        deadline = min(end, time.monotonic() + max(0.0, end - time.monotonic()) / left * 2)
        best, tried = tune(kernel, shape, arguments.length, call, start, arguments.rounds, deadline, pool)
        name = tiles.name_of(kernel, d_k, d_v, 2) + (" short" if arguments.length < tiles.LONG else "")
        print(json.dumps({"gpu": gpu, "kernel": name, "best": best, "ms": tried}), flush=True)
        known[name] = list(best)
        if arguments.json:
            arguments.json.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if pool is not None:
        pool.terminate()


if __name__ == "__main__":
    main()
