"""Whether the model learns: with NSA and with dense attention on prose, and with NSA and with its window alone on copying.

    python benchmarks/learning.py --json benchmarks/results/learning.json

Prose: the shipped text, `--steps` steps of configs/tiny_cpu.yaml, three seeds; compared is the mean loss of the last tenth.
Copying: a random sequence and then the same again, 64 tokens later, so far back that a window of 16 tokens in two layers does
not reach it; compared is the loss on the second half. Each training is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from figures import keep, parser_of

ROOT = Path(__file__).resolve().parents[1]
COPY = {
    "model.n_layers": 2, "model.window": 16, "model.compress_block": 8, "model.compress_stride": 4,
    "model.select_block": 8, "model.n_select": 4, "train.seq_len": 127,
    "train.batch_size": 16, "train.lr": 2e-3, "model.vocab_size": 256,
}  # fmt: skip
TRAININGS: dict[str, dict[str, dict[str, Any]]] = {
    "prose": {"nsa": {}, "dense": {"model.attention": "dense"}},
    "copy": {"nsa": COPY, "window": {**COPY, "model.force_branch": "win"}},
}


def train(task: str, way: str, seed: int, steps: int) -> list[float]:
    """Return the loss of each step; for copying, that of the second half."""
    from nsa.config import load_config
    from nsa.data import Position, batches, open_source
    from nsa.training.parallel import RankInfo
    from nsa.training.trainer import Trainer

    torch.set_num_threads(1)
    dataset = "fineweb_edu" if task == "prose" else "copy"
    overrides = {
        "data.dataset": dataset, "train.steps": steps, "train.seed": seed, "train.gradient_checkpointing": False,
        "trace.stats_every": steps, **TRAININGS[task][way],
    }  # fmt: skip
    config = load_config(ROOT / "configs" / "tiny_cpu.yaml", **overrides)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, RankInfo(), Path(folder))
        if task == "copy":
            trainer.loss = lambda batch: _second_half(trainer, batch)  # type: ignore[method-assign]
        data = batches(open_source(config), Position(), config.train.batch_size, 0, 1)
        for _ in range(steps):
            trainer.step([next(data)])
            losses += [result.loss for result in trainer.read()]
    return losses


def _second_half(trainer: Any, batch: Any) -> torch.Tensor:
    """Return the cross-entropy of what can be predicted: the second half."""
    half = batch.tokens.shape[1] // 2
    logits = trainer.model(batch.tokens[:, :-1])[:, half - 1 :]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.tokens[:, half:].flatten())


def apart(task: str, way: str, seed: int, steps: int) -> list[float]:
    """Run `train` in a process of its own."""
    command = [sys.executable, __file__, "--one", task, way, str(seed), str(steps)]
    return list(json.loads(subprocess.run(command, text=True, capture_output=True, check=True, cwd=ROOT).stdout))


def main() -> None:
    """Train, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of prose (default: 400)")
    parser.add_argument("--copy-steps", type=int, default=1000, help="of copying (default: 1000)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time (default: 2)")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        task, way, seed, steps = arguments.one
        print(json.dumps(train(task, way, int(seed), int(steps))))
        return
    steps = {"prose": arguments.steps, "copy": arguments.copy_steps}
    jobs = [
        (t, way, seed, steps[t]) for t, ways in TRAININGS.items() for seed in range(arguments.seeds) for way in ways
    ]
    with ThreadPoolExecutor(arguments.workers) as pool:
        found = dict(zip(jobs, pool.map(lambda job: apart(*job), jobs), strict=True))
    curves = {
        t: {way: [found[t, way, seed, steps[t]] for seed in range(arguments.seeds)] for way in ways}
        for t, ways in TRAININGS.items()
    }
    last = {
        t: {way: [statistics.fmean(losses[-len(losses) // 10 :]) for losses in runs] for way, runs in ways.items()}
        for t, ways in curves.items()
    }
    prose, copied = last["prose"], last["copy"]
    ratios = [a / b for a, b in zip(prose["nsa"], prose["dense"], strict=True)]
    keep(
        {
            "prose": {"steps": steps["prose"], "last_tenth": prose, "nsa_over_dense": ratios},
            "copy": {"steps": steps["copy"], "last_tenth": copied, "chance": math.log(256)},
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
