"""What the always-on tracers cost a training step of configs/tiny_cpu.yaml, 195 tensors: steps with and without them take turns.

    python benchmarks/tracing.py --rounds 5 --json benchmarks/results/tracing.json

A process has two equal models under DDP (one gloo rank), one traced and one not, whose steps alternate; a step's cost is the
ratio of neighbours, in CPU seconds of the main thread, where all hooks run. A model's place in memory alone changes a percent,
so a round is two processes, each tracing a different one of the two, and their geometric mean. The heartbeat's thread is
measured by itself. `noise` is the same ratio of two models without tracers. `checksums` are those of `check_divergence`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from figures import keep, parser_of

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("noise", "traced", "checksums")
WARM, PAIRS = 4, 30


def ratio(way: str, which_is_traced: int) -> dict[str, float]:
    """Return the median ratio of a traced step's time to its neighbour's; runs in a process of its own."""
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    from nsa import build_model, load_config
    from nsa.trace.session import installed

    torch.set_num_threads(1)
    config = load_config(ROOT / "configs" / "tiny_cpu.yaml")
    tokens = torch.randint(0, config.model.vocab_size, (config.train.batch_size, config.train.seq_len + 1))

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        began = time.thread_time()
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        return time.thread_time() - began

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        bare = torch.nn.Module.__call__, torch.autograd.backward
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            model = DistributedDataParallel(build_model(config))
            models.append((model, torch.optim.AdamW(model.parameters(), lr=1e-4)))
        assert len(list(models[0][0].parameters())) == 195
        session = installed()
        session.begin(folder, 0, 1, checksums=way == "checksums")
        traced = torch.nn.Module.__call__, torch.autograd.backward

        def switch(on: bool) -> None:
            torch.nn.Module.__call__, torch.autograd.backward = traced if on else bare

        gc.collect()
        gc.freeze()  # as ranks do: else a collection of everything falls into some steps
        ratios, seconds = [], []
        for number in range(WARM + PAIRS):
            pair = {}
            for which in (0, 1) if number % 2 else (1, 0):
                switch(on=which == which_is_traced and way != "noise")
                pair[which] = step(*models[which])
            if number >= WARM:
                ratios.append(pair[which_is_traced] / pair[1 - which_is_traced])
                seconds.append(pair[1 - which_is_traced])
        began, beats = time.thread_time(), 200
        for _ in range(beats):
            session.heartbeat.beat()
        beat_s = (time.thread_time() - began) / beats
        session.end()
    return {
        "ratio": statistics.median(ratios),
        "step_ms": 1e3 * statistics.median(seconds),
        "heartbeat": beat_s / 0.05,
    }


def _measured_apart(way: str, which_is_traced: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, "--which-is-traced", str(which_is_traced)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of processes for each way (default: 5)")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--which-is-traced", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(ratio(arguments.way, arguments.which_is_traced)))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            pair = [_measured_apart(way, which) for which in (0, 1)]
            found[way].append({name: statistics.geometric_mean(f[name] for f in pair) for name in pair[0]})
    costs = {way: [f["ratio"] - 1 for f in rounds] for way, rounds in found.items()}
    figures: dict[str, object] = {
        "cost": {way: statistics.median(rounds) for way, rounds in costs.items()},
        "cost_min_max": {way: [min(rounds), max(rounds)] for way, rounds in costs.items()},
        "heartbeat": statistics.median(f["heartbeat"] for f in found["traced"]),
        "step_ms": statistics.median(f["step_ms"] for f in found["traced"]),
        "rounds": arguments.rounds, "pairs": PAIRS, "tensors": 195,
    }  # fmt: skip
    keep(figures, arguments.json)


if __name__ == "__main__":
    main()
