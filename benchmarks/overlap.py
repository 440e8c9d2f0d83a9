"""How far the picks of neighbouring queries agree: what reading blocks once for several queries could save.

python benchmarks/overlap.py --minutes 20 --json benchmarks/results/overlap.json

It trains the 125M model on the shipped text for so many minutes (sequences of 2,048 tokens, on a CPU). It measures the
model's picks on text that it has not seen, before and after, in a sequence of 8,192 tokens: the Jaccard index of the picks
of a query and the next one, and how many distinct blocks 4 and 8 queries have together, of 4 and 8 times n. Counted are
queries that have twice as many blocks to choose from as they pick, without the blocks that every query picks (the first, and
the two latest), as these agree by rule.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from figures import keep, parser_of

from nsa.config import load_config
from nsa.data import Position, batches, open_source
from nsa.kernels import blocks
from nsa.training.parallel import RankInfo
from nsa.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
TRAINED, MEASURED = 2048, 8192  # tokens of a sequence
HELD_BACK = 1_000  # samples; the text after them is not trained on


def agreement(chosen: torch.Tensor, l_sel: int, n_sel: int) -> dict[str, float]:
    """Return the Jaccard index and the distinct blocks of neighbours in a selection, bool [B, S, G, Ns]."""
    S, n_blocks = chosen.shape[1], chosen.shape[3]
    own = torch.arange(S) // l_sel
    free = torch.arange(n_blocks)[None, :] <= own[:, None] - blocks.NUM_LOCAL
    free[:, 0] = False
    picked = (chosen & free[:, None])[:, 2 * n_sel * l_sel :].transpose(1, 2).flatten(0, 1)  # [B * G, queries, Ns]
    both = (picked[:, :-1] & picked[:, 1:]).sum(-1)
    either = (picked[:, :-1] | picked[:, 1:]).sum(-1).clamp(min=1)
    found = {"jaccard": (both / either).mean().item()}
    for queries in (4, 8):
        runs = picked[:, : picked.shape[1] // queries * queries].unflatten(1, (-1, queries))
        found[f"distinct_of_{queries}"] = runs.any(2).sum(-1).float().mean().item()
        found[f"picks_of_{queries}"] = runs.sum((2, 3)).float().mean().item()
    return found


def measured(trainer: Trainer, length: int) -> dict[str, Any]:
    """Return the mean over layers, and each layer's Jaccard index, on one sequence of ``length`` tokens."""
    config = load_config(ROOT / "configs" / "m7c_125m_2xa100_production.yaml", **settings(length))
    model, by_layer = trainer.module, list[dict[str, float]]()
    batch = next(batches(open_source(config), Position(samples=HELD_BACK * TRAINED // length), 1, 0, 1))

    def note(chosen: torch.Tensor) -> None:
        by_layer.append(agreement(chosen, config.model.l_sel, config.model.n_sel))

    for block in model.blocks:
        block.attn.selection_listener = note
    with torch.no_grad():
        model(batch.tokens[:, :-1])
    for block in model.blocks:
        block.attn.selection_listener = None
    mean = {name: sum(layer[name] for layer in by_layer) / len(by_layer) for name in by_layer[0]}
    return {**mean, "jaccard_by_layer": [round(layer["jaccard"], 3) for layer in by_layer]}


def settings(length: int) -> dict[str, Any]:
    """Return the settings of the production model on this CPU."""
    return {
        "train.seq_len": length, "train.device": "cpu", "train.dtype": "fp32", "train.batch_size": 1, "parallel.mode": "none",
        "train.gradient_checkpointing": False, "train.steps": 2000, "trace.stats_every": 100_000,
        "data.dataset": str(ROOT / "examples" / "data" / "kjv.parquet"),
    }  # fmt: skip


def main() -> None:
    """Measure, train, measure, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="of training (default: 20)")
    arguments = parser.parse_args()
    config = load_config(ROOT / "configs" / "m7c_125m_2xa100_production.yaml", **settings(TRAINED))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, RankInfo(device=torch.device("cpu")), Path(folder))
        before = measured(trainer, MEASURED)
        print(before, flush=True)
        data, end, losses = (
            batches(open_source(config), Position(), 1, 0, 1),
            time.monotonic() + 60 * arguments.minutes,
            [],
        )
        while time.monotonic() < end and len(losses) < HELD_BACK:
            trainer.step([next(data)])
            losses.append(trainer.read()[0].loss)
            if len(losses) % 10 == 0:
                print(len(losses), losses[-1], flush=True)
        after = measured(trainer, MEASURED)
    keep(
        {
            "untrained": before, "trained": after, "steps": len(losses), "tokens": len(losses) * TRAINED,
            "loss": sum(losses[-10:]) / max(1, len(losses[-10:])),
        },
        arguments.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
