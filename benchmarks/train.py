"""Training as a whole: tokens per second and peak memory of the model with NSA beside the same model with dense attention.

    python benchmarks/train.py --json benchmarks/results/train.json         # a CPU's size: 4 layers, 1,024 and 4,096 tokens
    python benchmarks/train.py --gpu --json benchmarks/results/train_gpu.json    # the 125M model, bf16, 2k to 64k tokens

Each way (attention, checkpointing, torch.compile, parallelism) is a run of `nsa.train`, in rounds that take turns. A figure is the
median over rounds of a run's median step after `WARM` steps. Parallel ways have two ranks.
"""

import json
import statistics
import sys
import time
from typing import Any

from figures import keep, parser_of, train

WARM, STEPS = 2, 5
CPU: dict[str, Any] = {
    "config": "m7c_125m_2k_test.yaml", "lengths": (1024, 4096),
    "sizes": {"model.n_layers": 4, "train.dtype": "fp32", "train.device": "cpu", "train.threads": 1, "train.batch_size": 1},
}  # fmt: skip
GPU: dict[str, Any] = {
    "config": "m7c_125m_2xa100_production.yaml", "lengths": (2048, 16384, 65536), "sizes": {},
}  # fmt: skip
GPU_TOKENS = 8192  # per step on a GPU, in as many sequences as that makes, at least one
# The most important first, as the time may not suffice for all. CUDA graphs need a GPU.
GPU_WAYS = (
    "step compiled",
    "step compiled, CUDA graphs",
    "plain",
    "checkpointing",
    "step compiled, checkpointing",
    "checkpointing, selection kept",
    "blocks compiled",
)
# Label: (ranks, overrides). Each is run with NSA and with dense attention, but a kept selection with NSA alone.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {"train.gradient_checkpointing": False}),
    "checkpointing": (1, {"train.gradient_checkpointing": True}),
    "checkpointing, selection kept": (1, {"train.gradient_checkpointing": True, "train.gc_keep_selection": True}),
    "blocks compiled": (1, {"train.gradient_checkpointing": False, "train.compile": "blocks"}),
    "step compiled": (1, {"train.gradient_checkpointing": False, "train.compile": "step"}),
    "step compiled, CUDA graphs": (
        1, {"train.gradient_checkpointing": False, "train.compile": "step", "train.cuda_graph": True},
    ),
    "step compiled, checkpointing": (1, {"train.gradient_checkpointing": True, "train.compile": "step"}),
    "ddp, 2 ranks": (2, {"train.gradient_checkpointing": False, "parallel.mode": "ddp"}),
    "fsdp, 2 ranks": (2, {"train.gradient_checkpointing": False, "parallel.mode": "fsdp"}),
    "averaged by hand, 2 ranks": (2, {"train.gradient_checkpointing": False, "parallel.mode": "average"}),
}  # fmt: skip


def measure(size: dict[str, Any], length: int, attention: str, way: str) -> dict[str, float]:
    """Measure one round of one way: tokens a second, rank 0's peak, and the seconds of the steps that start it."""
    ranks, overrides = WAYS[way]
    chosen = {
        **size["sizes"], **({"train.batch_size": max(1, GPU_TOKENS // length)} if size is GPU else {}),
        "data.dataset": "synthetic", "train.seq_len": length, "model.attention": attention,
        "trace.stats_every": 1000, "parallel.mode": "none", **overrides,
    }  # fmt: skip
    lines = train(size["config"], WARM + STEPS, chosen, ranks)
    seconds = [line["tokens"] / line["tokens_per_s"] for line in lines]  # the first gathers statistics, uncompiled
    return {
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines[WARM:]),
        "peak_mib": lines[-1]["peak_mib"],
        "start_s": sum(seconds[:WARM]),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gpu", action="store_true", help="production's size, on a GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all, on a GPU those in one process")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing after so many")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens of a sequence (default: two of the device's)")
    arguments = parser.parse_args()
    size = GPU if arguments.gpu else CPU
    on_cpu = [way for way in WAYS if "CUDA" not in way]
    ways, end = arguments.ways or (GPU_WAYS if arguments.gpu else on_cpu), time.monotonic() + 60 * arguments.minutes
    found: dict[str, dict[str, dict[str, list[dict[str, float]]]]] = {}
    for _ in range(arguments.rounds):
        for length in arguments.lengths or size["lengths"]:
            for way in ways:
                for attention in ("nsa", "dense"):
                    if (way == "checkpointing, selection kept" and attention == "dense") or time.monotonic() > end:
                        continue
                    try:
                        result = measure(size, length, attention, way)
                    except RuntimeError as error:
                        print(f"{length} {way} {attention}: {str(error)[-400:]}", file=sys.stderr)
                        continue
                    print(f"{length} {way} {attention}: {result}", file=sys.stderr, flush=True)
                    found.setdefault(str(length), {}).setdefault(way, {}).setdefault(attention, []).append(result)
                    if arguments.json:  # after each result: a run that is cut off leaves what it has
                        arguments.json.with_suffix(".partial").write_text(json.dumps(found, indent=1), encoding="utf-8")
    figures = {
        length: {
            way: {
                a: {name: statistics.median(r[name] for r in rounds) for name in rounds[0]} for a, rounds in by.items()
            }
            for way, by in ways.items()
        }
        for length, ways in found.items()
    }
    ratios = {
        length: {w: by["nsa"]["tokens_per_s"] / by["dense"]["tokens_per_s"] for w, by in ways.items() if len(by) == 2}
        for length, ways in figures.items()
    }
    if arguments.json:
        arguments.json.with_suffix(".partial").unlink(missing_ok=True)
    keep(
        {"ways": figures, "nsa_over_dense_speed": ratios, "rounds": arguments.rounds, "config": size["config"]},
        arguments.json,
    )


if __name__ == "__main__":
    main()
