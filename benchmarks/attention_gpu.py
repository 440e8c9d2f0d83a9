"""NSA attention on a GPU beside dense attention and peers: every branch, and the whole, forward and backward.

python benchmarks/attention_gpu.py --json benchmarks/results/attention_gpu.json

Times are medians, of CUDA graph replays (``graph``, no launch gaps) and by CUDA events around plain calls (``events``), one
contender after another in one run. A backward is a forward and backward less the forward. The roofline, a matrix product and
a copy, is measured in the same run. A branch's floor is what its products of visible pairs need at the one rate or its inputs
and outputs at the other, whichever is more; its share is the floor over the time that it took. Dense contenders are torch's
flash (V padded to K's width, as it requires), cuDNN, FlexAttention and the package flash-attn; the figures are over the
fastest of them, by name. fla's NSA is measured beside ours where it is installed and takes the shape (groups of 16 heads; no
window without flash-attn), and so is the selected branch of nvidia-cudnn-frontend, forward only. Random queries and keys give
picks that share little between neighbours, so the selected branch is also timed on picks that change slowly (their mean Jaccard
index is in its name). Without a GPU, `--dry-run` runs the same code in Triton's interpreter
(TRITON_INTERPRET=1), on a tiny shape, to find errors: its times mean nothing, and are not kept.
"""

import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from ahead import compile_ahead
from attention_peers import cudnn_nsa, fla, flash_attn, flex, fused
from figures import environment, parser_of

from nsa import Sizes, nsa_attention
from nsa.kernels import blocks, ops
from nsa.kernels.triton import sequences, support, tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter has no bfloat16
SHAPES = {  # heads, groups, head dims
    "paper": (64, 4, 192, 128), "128": (64, 4, 128, 128), "125m": (12, 2, 64, 64), "blocks of 128": (64, 4, 128, 128),
}  # fmt: skip
SHAPES = SHAPES if DEVICE == "cuda" else {"tiny": (2, 1, 16, 16)}
OURS = ("sliding", "compressed", "selected", "nsa")
AGREEMENT = (0.87, 0.94)  # Jaccard indices of neighbours' picks, as trained models have them
DENSE = ("flash", "cudnn", "flex", "flash_attn")
FEWEST, PATIENCE_S = 3, 2.0  # fewest calls that are counted; seconds after which no more than these are made
WARM_UP = 3 if DEVICE == "cuda" else 0  # calls that are not counted
SIZES = Sizes()
OTHER_SIZES = {"blocks of 128": SIZES._replace(select_block=128)}  # by shape
Call = Callable[[], Any]


def get_sizes(shape: str) -> Sizes:
    return OTHER_SIZES.get(shape, SIZES)


def captured(call: Call) -> Call:
    """Return a replay of ``call`` as a CUDA graph. Raise what torch raises where it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def timed(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each call; calls take turns. Slow ones are made less often, `FEWEST` times at least."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    started, counted = time.monotonic(), 0
    warm_ups = WARM_UP
    while counted < rounds and (counted < FEWEST or time.monotonic() - started < PATIENCE_S):
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
            if not warm_ups:
                found[name].append(took)
        if warm_ups:
            warm_ups = 0 if time.monotonic() - started > PATIENCE_S / 4 else warm_ups - 1
        else:
            counted += 1
    return {name: statistics.median(values) for name, values in found.items()}


def roofline(size: int = 8192) -> dict[str, float]:
    """Return TFLOP/s of a product and TB/s of a copy, read and written."""
    a = torch.randn(size, size, device=DEVICE, dtype=DTYPE)
    b = torch.empty(8 * size * size, device=DEVICE, dtype=DTYPE)
    c = torch.empty_like(b)
    ms = timed({"product": lambda: a @ a, "copy": lambda: c.copy_(b)}, 10)
    return {"tflops": 2 * size**3 / ms["product"] / 1e9, "tbytes": 2 * b.numel() * 2 / ms["copy"] / 1e9}


def floors(S: int, shape: str, rates: dict[str, float]) -> dict[str, float]:
    """Return the milliseconds that each branch needs at least, by the roofline; a backward has 2.5 times a forward's products."""
    (H, G, d_k, d_v), sizes = SHAPES[shape], get_sizes(shape)
    w, chosen = min(S, sizes.window), min(S, sizes.n_select * sizes.select_block)
    pairs = {
        "sliding": S * w - w**2 / 2, "compressed": S * S / 2 / sizes.compress_stride, "selected": S * chosen - chosen**2 / 2,
        "dense": S * S / 2,
    }  # fmt: skip
    queries, keys = S * H * (d_k + d_v) * 2, S * G * (d_k + d_v) * 2  # bytes of q and out, and of k and v
    found = {}
    for name, n in pairs.items():
        read = keys / sizes.compress_stride if name == "compressed" else keys
        scores = S * G * (S / sizes.select_block) * 4 if name == "compressed" else 0
        for way, products, moved in (
            ("forward", 1.0, queries + read + scores),
            ("backward", 2.5, 2 * (queries + read)),
        ):
            flops = products * n * H * 2 * (d_k + d_v)
            found[f"{name} {way}"] = max(flops / rates["tflops"] / 1e9, moved / rates["tbytes"] / 1e9)
    return found


def both_ways(forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> dict[str, Call]:
    """Return the forward without gradients, and, of ``inputs``, a forward with its backward."""
    grad = torch.randn_like(forward())

    def only_forward() -> None:
        with torch.no_grad():
            forward()

    if not inputs:
        return {"forward": only_forward}
    return {"forward": only_forward, "both": lambda: torch.autograd.grad(forward(), inputs, grad, allow_unused=True)}


def slow_picks(S: int, G: int, n_sel: int, jaccard: float, l_sel: int = SIZES.select_block) -> torch.Tensor:
    """Return a selection, bool [1, S, G, Ns], in which the picks of neighbours have this Jaccard index.

    A query picks the first block, the two latest, and others, of which one at a time is drawn again.
    """
    n_blocks = blocks.num_selection(S, l_sel)
    chosen = torch.zeros(1, S, G, n_blocks, dtype=torch.bool, device=DEVICE)
    t, free = torch.arange(S, device=DEVICE), max(1, n_sel - 3)
    stay = round(free / (n_sel * (1 - jaccard) / (1 + jaccard)))  # queries for which a pick stays
    drawn_at = (t[:, None] + torch.arange(free, device=DEVICE) * stay // free) // stay  # [S, free]
    for g in range(G):
        numbers = torch.rand(int(drawn_at.max()) + 1, free, device=DEVICE).gather(0, drawn_at)
        chosen[0, :, g].scatter_(1, (numbers * (drawn_at * stay - stay).clamp(min=0) / l_sel).long(), True)
    for forced in (t * 0, t // l_sel, (t // l_sel - 1).clamp(min=0)):
        chosen[0, t, :, forced] = True
    return chosen


def jaccard_of(chosen: torch.Tensor) -> float:
    """Return the mean Jaccard index of neighbours, over queries and groups of a selection [B, S, G, Ns]."""
    one, other = chosen[:, :-1], chosen[:, 1:]
    return ((one & other).sum(-1) / (one | other).sum(-1)).mean().item()


def contenders(shape: str, S: int) -> dict[str, tuple[Callable[[], torch.Tensor], list[torch.Tensor]]]:
    """Return, by name, a forward and the inputs whose gradients are computed."""
    (H, G, d_k, d_v), sizes = SHAPES[shape], get_sizes(shape)
    n, scale = blocks.num_compressed(S, sizes.compress_block, sizes.compress_stride), d_k**-0.5
    n_sel = min(sizes.n_select, blocks.num_selection(S, sizes.select_block))

    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(size, device=DEVICE, dtype=DTYPE).requires_grad_()

    q, k, v = leaf(1, S, H, d_k), leaf(1, S, G, d_k), leaf(1, S, G, d_v)
    k_cmp, v_cmp = leaf(1, n, G, d_k), leaf(1, n, G, d_v)
    gates = torch.rand(1, S, H, 3, device=DEVICE, dtype=DTYPE).requires_grad_()
    blocked = sizes.compress_block, sizes.compress_stride, sizes.select_block, scale, "triton"
    with torch.no_grad():
        chosen = ops.select(ops.compressed(q, k_cmp, v_cmp, *blocked)[2], sizes.select_block, n_sel, "triton")
    selection = sizes.select_block, n_sel, scale, "triton"
    selected_by_cudnn = functools.cache(lambda: cudnn_nsa(q.detach(), k.detach(), v.detach(), chosen, scale, sizes))
    alike = {}
    for wanted in AGREEMENT:
        slow = slow_picks(S, G, n_sel, wanted, sizes.select_block)
        name = f"selected at {jaccard_of(slow):.2f}"

        def selected(slow: torch.Tensor = slow) -> torch.Tensor:
            return ops.selected(q, k, v, slow, *selection)[0]

        alike[name] = selected, [q, k, v]
    return {
        "sliding": (lambda: ops.sliding(q, k, v, sizes.window, scale, "triton")[0], [q, k, v]),
        "compressed": (lambda: ops.compressed(q, k_cmp, v_cmp, *blocked)[0], [q, k_cmp, v_cmp]),
        "selected": (lambda: ops.selected(q, k, v, chosen, *selection)[0], [q, k, v]),
        **alike,
        "nsa": (
            lambda: nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, sizes=sizes, backend="triton"),
            [q, k_cmp, v_cmp, k, v, gates],
        ),
        "flash": (lambda: fused("flash", q, k, v, scale), [q, k, v]),
        "cudnn": (lambda: fused("cudnn", q, k, v, scale), [q, k, v]),
        "flex": (lambda: flex(q, k, v, scale), [q, k, v]),
        "flash_attn": (lambda: flash_attn(q, k, v, scale), [q, k, v]),
        "cudnn_nsa": (lambda: selected_by_cudnn()(), []),  # its selected branch, on the same random picks
        "fla": (lambda: fla(q, k, v, gates, scale, sizes), [q, k, v, gates]),
    }


def measure(
    shape: str, S: int, rounds: int, rates: dict[str, float], said: dict[str, Any], names: Callable[[str], bool]
) -> dict[str, Any]:
    """Measure the contenders that ``names`` allows, at one length; return the figures with those of others in ``said``."""
    events: dict[str, float] = dict(said.get("ms", {}).get("events", {}))
    graph: dict[str, float] = dict(said.get("ms", {}).get("graph", {}))
    absent: dict[str, str] = dict(said.get("absent", {}))
    peak = said.get("peak_gb")
    # One after another: the graphs of all at 64k tokens would not fit a GPU.
    for name, (forward, inputs) in contenders(shape, S).items():
        if not names(name):
            continue
        began = time.monotonic()
        try:
            calls = both_ways(forward, inputs)
            events |= {f"{name} {way}": ms for way, ms in timed(calls, rounds).items()}
        except Exception as refused:  # a peer that is not installed, or refuses the shape: each raises its own type
            if name.startswith(OURS):
                raise
            absent[name] = f"{type(refused).__name__}: {refused}"[:200]
            continue
        if DEVICE == "cuda":
            if name == "nsa":
                torch.cuda.reset_peak_memory_stats()
                calls["both"]()
                peak = torch.cuda.max_memory_allocated() / 1e9
            try:
                replays = {way: captured(call) for way, call in calls.items()}
                graph |= {f"{name} {way}": ms for way, ms in timed(replays, rounds).items()}
                del replays
            except Exception as refused:  # as above
                absent[f"{name} as a graph"] = f"{type(refused).__name__}: {refused}"[:200]
                torch.cuda.synchronize()
            del calls
            torch.cuda.empty_cache()
        print(f"{shape} {S} {name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    events, graph = ways_of(events), ways_of(graph)
    ms = {name: graph.get(name, time_) for name, time_ in events.items()}
    least = floors(S, shape, rates)
    ways = ("forward", "backward")
    whole = {way: sum(least[f"{name} {way}"] for name in ("sliding", "compressed", "selected")) for way in ways}
    floor = {**least, **{f"nsa {way}": whole[way] for way in ways}}
    return {
        "ms": {"graph": graph, "events": events}, "absent": absent, "peak_gb": peak,
        "share_of_roofline": {name: floor[name] / ms[name] for name in floor if name in ms},
        "over_fastest_dense": {way: over_fastest(way, graph if f"nsa {way}" in graph else events) for way in ways},
        "over_fla": {way: ms[f"fla {way}"] / ms[f"nsa {way}"] for way in ways if f"fla {way}" in ms},
    }  # fmt: skip


def ways_of(ms: dict[str, float]) -> dict[str, float]:
    """Return ``ms`` with the backward, which is both less the forward."""
    found = dict(ms)
    for name in ms:
        both = name.replace(" forward", " both")
        if name.endswith(" forward") and both in ms:
            found[name.replace(" forward", " backward")] = ms[both] - ms[name]
    return found


def over_fastest(way: str, ms: dict[str, float]) -> dict[str, Any]:
    """Return the fastest dense attention measured the same way, and how many times our time it took."""
    dense = {name: ms[f"{name} {way}"] for name in DENSE if f"{name} {way}" in ms}
    if not dense:
        return {}
    fastest = min(dense, key=lambda name: dense[name])
    return {"dense": fastest, "ms": dense[fastest], "times": dense[fastest] / ms[f"nsa {way}"]}


def main() -> None:
    """Measure, print, keep: each length as it is known."""
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 65536, 2048, 32768])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[""], help="measure the contenders that begin with one of these")
    parser.add_argument(
        "--parts", type=int, metavar="MIB", help="of the selected branch that exist at once (default: 3072)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="without a GPU, in Triton's interpreter; nothing is kept"
    )
    arguments = parser.parse_args()
    if DEVICE != "cuda" and not arguments.dry_run:
        sys.exit("attention_gpu.py: no GPU here; --dry-run with TRITON_INTERPRET=1 looks for errors without one")
    if arguments.dry_run and (DEVICE == "cuda" or not support.is_interpreted() or arguments.json):
        sys.exit(
            "attention_gpu.py: --dry-run is for a machine without a GPU, with TRITON_INTERPRET=1 and without --json"
        )
    import triton

    if arguments.parts:
        sequences.PARTS = arguments.parts << 20
    rates = roofline(256 if arguments.dry_run else 8192)
    figures: dict[str, Any] = {
        **environment(), "cuda": torch.version.cuda, "triton": triton.__version__, "roofline": rates,
        "sizes": {name: sizes._asdict() for name, sizes in {"": SIZES, **OTHER_SIZES}.items()}, "parts_mib": sequences.PARTS >> 20,
        "tiles": tiles.measured(tiles.capability(torch.device(DEVICE))), "shapes": {},
    }  # fmt: skip
    if DEVICE == "cuda":
        began = time.monotonic()
        shapes, on = (
            [(SHAPES[name], get_sizes(name)) for name in arguments.shapes],
            tiles.capability(torch.device(DEVICE)),
        )
        compile_ahead(shapes, arguments.lengths, DTYPE, on)
        print(f"compiled in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    failed, only = False, tuple(arguments.only)
    # Ours and dense first; fla last, as it tunes itself for minutes: a run that is cut off keeps what came before.
    for names in (
        lambda name: name.startswith(only) and name != "fla",
        lambda name: name.startswith(only) and name == "fla",
    ):
        for shape, S in itertools.product(arguments.shapes, arguments.lengths):
            by_length = figures["shapes"].setdefault(shape, {})
            before = by_length.get(str(S), {})
            if "error" in before:
                continue
            try:
                found = measure(shape, S, arguments.rounds, rates, before, names)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                found, failed = {**before, "error": f"{type(error).__name__}: {error}"[:500]}, True
            by_length[str(S)] = found
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
            if arguments.json:
                arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
