"""The head's loss, forward and backward: all logits at once, and by chunks of rows (`nsa.model.loss`).

    python benchmarks/loss.py --dim 128 --tokens 2048 --json benchmarks/results/loss.json

Each figure is of a process that does nothing else; the ways take turns, and medians count. Memory is the peak above what the inputs
hold. On a GPU the tensors are bfloat16, as under autocast, else float32 with one thread.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from figures import keep, parser_of

from nsa.model.loss import LOGITS_BYTES, linear_cross_entropy

WAYS = {"all at once": 1 << 62, "by chunks": LOGITS_BYTES}


def one(tokens: int, dim: int, vocabulary: int, way: str) -> dict[str, float]:
    """Return the milliseconds and the peak MiB of a forward and backward, after a small one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(tokens, dim, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, dim, device=device, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    linear_cross_entropy(x[:8], weight[:8], targets[:8] % 8).backward()
    x.grad = weight.grad = None
    before = _held(device)
    began = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = linear_cross_entropy(x, weight, targets, WAYS[way])
    loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    return {"ms": 1e3 * took, "mib": _held(device) - before}


def _held(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(tokens: int, dim: int, vocabularies: list[int], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the medians, by vocabulary and way."""
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for vocabulary in vocabularies:
            for way in WAYS:
                shape = ["--tokens", str(tokens), "--dim", str(dim)]
                command = [sys.executable, __file__, *shape, "--one", str(vocabulary), way]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found.setdefault((vocabulary, way), []).append(json.loads(done.stdout))
    return {
        str(vocabulary): {
            way: {name: statistics.median(r[name] for r in found[vocabulary, way]) for name in ("ms", "mib")}
            for way in WAYS
        }
        for vocabulary in vocabularies
    }


def main() -> None:
    """Measure, print, and keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[256, 50_257])
    parser.add_argument("--rounds", type=int, default=3, help="how often the ways take turns (default: 3)")
    parser.add_argument("--one", nargs=2, metavar=("VOCABULARY", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.tokens, arguments.dim, int(arguments.one[0]), arguments.one[1])))
        return
    found = measure(arguments.tokens, arguments.dim, arguments.vocabularies, arguments.rounds)
    print("| vocabulary | way | ms | peak MiB |\n| ---: | --- | ---: | ---: |")
    for vocabulary, by_way in found.items():
        for way, figures in by_way.items():
            print(f"| {vocabulary} | {way} | {figures['ms']:.0f} | {figures['mib']:.0f} |")
    keep({"tokens": arguments.tokens, "dim": arguments.dim, "vocabularies": found}, arguments.json)


if __name__ == "__main__":
    main()
