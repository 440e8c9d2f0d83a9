"""What the recording of a rank's control flow costs: a step of DDP, a step of configs/tiny_cpu.yaml, and Python alone.

    python benchmarks/flow_cost.py --json benchmarks/results/flow_cost.json

Each workload runs with the recording and without it, in turn; the ratio is the median of the pairs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from figures import keep, parser_of
from torch import nn
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import nsa  # noqa: E402
from nsa.trace.flow.recorder import FlowRecorder  # noqa: E402
from nsa.trace.session import installed  # noqa: E402


def ddp_step() -> Callable[[], None]:
    """Return a function that runs 20 steps of a model of 12 layers under DDP."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run() -> None:
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()

    return run


def training_step() -> Callable[[], None]:
    """Return a function that runs a step of the smallest transformer."""
    config = nsa.load_config(ROOT / "configs" / "tiny_cpu.yaml")
    model = nsa.build_model(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, config.model.vocab_size, (1, 257))

    def run() -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return run


def python_alone() -> None:
    """Count words, as code that prepares data does."""
    counts: dict[str, int] = {}
    for number in range(60_000):
        word = str(number % 997)
        if len(word) > 1:
            counts[word] = counts.get(word, 0) + 1


def ratio(run: Callable[[], None], folder: Path, pairs: int) -> dict[str, float]:
    """Return seconds of a workload without the recording and with it, and the median of their ratios."""
    run()
    without, recorded = [], []
    session = installed()
    for number in range(pairs):
        began = time.perf_counter()
        run()
        without.append(time.perf_counter() - began)
        recorder = FlowRecorder(folder / f"{number}.bin")
        session.recorder.on_call = recorder.call
        recorder.start()
        began = time.perf_counter()
        run()
        recorded.append(time.perf_counter() - began)
        recorder.stop()
        session.recorder.on_call = None
    ratios = [with_it / bare for bare, with_it in zip(without, recorded, strict=True)]
    return {
        "seconds": statistics.median(without),
        "recorded": statistics.median(recorded),
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    """Measure, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        dist.init_process_group("gloo", store=dist.FileStore(f"{name}/store", 1), rank=0, world_size=1)
        installed()
        workloads = {"ddp_step": ddp_step(), "tiny_cpu_step": training_step(), "python_alone": python_alone}
        figures = {key: ratio(run, Path(name), arguments.pairs) for key, run in workloads.items()}
        dist.destroy_process_group()
    keep(figures, arguments.json)


if __name__ == "__main__":
    main()
