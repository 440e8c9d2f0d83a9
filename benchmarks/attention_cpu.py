"""NSA attention on a CPU beside its alternatives: forward and backward of the module, time and peak memory.

    python benchmarks/attention_cpu.py --json benchmarks/results/attention_cpu.json

A contender's round is a process of its own, with one thread; contenders take turns. A time is the best of a round's steps, and
the median of the rounds; it is CPU time, which other programs change less than time by the clock. Memory is the process's peak
above what it had with the module and its input. Contenders: nsa, our module; dense, causal scaled_dot_product_attention with the
same heads; masked, NSA by the equations over dense masks; lucidrains, the package native-sparse-attention-pytorch where it is
installed, up to 2048 tokens.
"""

import contextlib
import multiprocessing
import statistics
import time
from pathlib import Path

import torch
from figures import keep, parser_of
from torch import nn

from nsa.sizes import Sizes

CONTENDERS = ("nsa", "dense", "masked", "lucidrains")
LONGEST = {"masked": 2048, "lucidrains": 2048}
DIM, HEADS, GROUPS, WIDTH = 768, 12, 2, 64
SIZES = Sizes()


class Dense(nn.Module):
    """Causal attention by torch's own kernel, with the projections and the rotation that NSA has."""

    def __init__(self) -> None:
        super().__init__()
        from nsa.model.attention import Rotary

        self.q = nn.Linear(DIM, HEADS * WIDTH, bias=False)
        self.k, self.v = nn.Linear(DIM, GROUPS * WIDTH, bias=False), nn.Linear(DIM, GROUPS * WIDTH, bias=False)
        self.out = nn.Linear(HEADS * WIDTH, DIM, bias=False)
        self.rotary = Rotary(WIDTH, 10000.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = torch.arange(x.shape[1])
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH)) for p in (self.q, self.k, self.v))
        q, k, v = (y.transpose(1, 2) for y in (self.rotary(q, t), self.rotary(k, t), v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(-2))


def build(contender: str) -> nn.Module:
    """Return the contender's module. Raise ImportError where it is not installed."""
    if contender == "dense":
        return Dense()
    if contender == "lucidrains":
        from native_sparse_attention_pytorch import SparseAttention

        return SparseAttention(
            dim=DIM, dim_head=WIDTH, heads=HEADS, kv_heads=GROUPS, causal=True, sliding_window_size=SIZES.window,
            compress_block_size=SIZES.compress_block, compress_block_sliding_stride=SIZES.compress_stride,
            selection_block_size=SIZES.select_block, num_selected_blocks=SIZES.n_select,
        )  # fmt: skip
    from nsa import NSAAttention

    backend = "sdpa" if contender == "masked" else "auto"
    return NSAAttention(DIM, HEADS, GROUPS, WIDTH, **SIZES._asdict(), backend=backend)


def memory(field: str) -> float:
    """Return the MiB of a field of this process's status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def measure(contender: str, length: int, steps: int) -> dict[str, float]:
    """Return milliseconds of a step and peak MiB; runs in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = build(contender)
    module(torch.randn(1, 64, DIM)).square().mean().backward()  # what a first call imports is not attention's memory
    x = torch.randn(1, length, DIM, requires_grad=True)
    before = memory("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    seconds = []
    for _ in range(steps + 1):
        module.zero_grad()
        began = time.process_time()
        module(x).square().mean().backward()
        seconds.append(time.process_time() - began)
    return {"ms": 1e3 * min(seconds[1:] or seconds), "peak_mib": memory("VmHWM") - before}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a process (default: 3)")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    arguments = parser.parse_args()
    absent = []
    contenders = []
    for contender in arguments.contenders:
        try:
            build(contender)
            contenders.append(contender)
        except ImportError as error:
            absent.append(f"{contender}: {error}")
    found: dict[str, dict[int, list[dict[str, float]]]] = {c: {n: [] for n in arguments.lengths} for c in contenders}
    for length in arguments.lengths:
        for _ in range(arguments.rounds):
            for contender in contenders:
                if length > LONGEST.get(contender, length):
                    continue
                steps = 1 if contender == "lucidrains" else arguments.steps
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    found[contender][length].append(pool.apply(measure, (contender, length, steps)))
    table = {
        c: {
            str(n): {name: round(statistics.median(f[name] for f in rounds), 1) for name in ("ms", "peak_mib")}
            for n, rounds in by_length.items() if rounds
        }
        for c, by_length in found.items()
    }  # fmt: skip
    ratios = {
        f"{other} / nsa": {n: round(figures["ms"] / table["nsa"][n]["ms"], 2) for n, figures in table[other].items()}
        for other in contenders if other != "nsa"
    }  # fmt: skip
    figures = {
        "forward_and_backward": table, "time_ratio": ratios, "absent": absent,
        "shape": {"dim": DIM, "heads": HEADS, "groups": GROUPS, "width": WIDTH, **SIZES._asdict()}, "threads": 1,
        "rounds": arguments.rounds,
    }  # fmt: skip
    keep(figures, arguments.json)


if __name__ == "__main__":
    main()
