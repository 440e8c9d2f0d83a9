"""What the always-on tracers cost a training step of the 195-tensor model: processes with and without them, taking turns.

    python benchmarks/tracing.py --rounds 8 --json benchmarks/results/tracing.json

A round is a fresh process each way, DDP on one gloo rank, CPU seconds of a step (median of its steps). ``noise`` is how far the
rounds without tracers lie apart. The last way has the checksums of `check_divergence` too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("bare", "traced", "checksums")
WARM, STEPS = 4, 16


def step_seconds(way: str) -> float:
    """In a process of its own: the median CPU seconds of a step."""
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    from nsa import build_model, load_config

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = load_config(ROOT / "configs" / "tiny_cpu.yaml")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        session = None
        if way != "bare":
            from nsa.trace.session import installed

            session = installed()
            session.begin(folder, 0, 1, checksums=way == "checksums")
        module = build_model(config)
        assert len(list(module.parameters())) == 195
        model = DistributedDataParallel(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.randint(0, config.model.vocab_size, (1, config.train.seq_len + 1))
        times = []
        for _ in range(WARM + STEPS):
            began = time.process_time()
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            times.append(time.process_time() - began)
        if session is not None:
            session.end()
    return statistics.median(times[WARM:])


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="how often the ways take turns (default: 8)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(step_seconds(arguments.way))
        return
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(arguments.rounds):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            done = subprocess.run(
                [sys.executable, __file__, "--way", way], capture_output=True, text=True, check=True, cwd=ROOT
            )
            times[way].append(float(done.stdout.splitlines()[-1]))
    bare = statistics.median(times["bare"])
    figures: dict[str, object] = {
        "step_ms": {way: 1e3 * statistics.median(found) for way, found in times.items()},
        "cost": {way: statistics.median(found) / bare - 1 for way, found in times.items() if way != "bare"},
        "noise": (max(times["bare"]) - min(times["bare"])) / bare,
        "rounds": arguments.rounds, "tensors": 195, "torch": torch.__version__, "python": platform.python_version(),
        "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
