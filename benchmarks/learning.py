"""Whether the model learns: NSA and dense attention on prose and on code.

    python benchmarks/learning.py --tokens 5e6 --json benchmarks/results/learning.json

Prose: the shipped text. Code: the standard library of this Python. Every tenth document is held out, and its loss is compared, of
models with as many parameters; by seed, each training a process of `nsa.train` with one thread. What the file has already is not
trained again, so that a run that was stopped goes on.
"""

import itertools
import json
import statistics
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from figures import ROOT, keep, parser_of, train

SEQ_LEN, BATCH = 512, 8
SHAPE = {
    "model.dim": 96, "model.n_layers": 4, "model.n_heads": 8, "model.n_kv_heads": 2, "model.head_dim": 16, "model.v_head_dim": 16,
    "model.compress_block": 16, "model.compress_stride": 8, "model.select_block": 32, "model.n_select": 4, "model.window": 64,
    "model.gate_hidden": 24, "train.seq_len": SEQ_LEN, "train.batch_size": BATCH, "train.lr": 3e-3, "train.min_lr": 3e-4,
    "train.warmup_steps": 50, "train.gradient_checkpointing": "false", "train.threads": 1, "trace.stats_every": 0,
    "data.shuffle": "true", "data.validation_samples": 128, "data.validate_every": 50, "data.workers": 0,
}  # fmt: skip
# As many parameters: a dense layer has fewer projections, and no gate.
MODELS = {"nsa": {"model.mlp_hidden": 256}, "dense": {"model.attention": "dense", "model.mlp_hidden": 310}}


def documents(task: str) -> list[str]:
    """Return the texts of a corpus."""
    if task == "prose":
        import pyarrow.parquet as parquet

        return list(parquet.read_table(ROOT / "examples" / "data" / "kjv.parquet")["text"].to_pylist())
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    sources = [path for path in sources if not {"site-packages", "test", "tests"} & set(path.parts)]
    return [path.read_text(encoding="utf-8", errors="replace") for path in sources]


def write_corpora(folder: Path) -> None:
    """Write the documents of each task, every tenth to another file."""
    for task in ("prose", "code"):
        texts = [text for text in documents(task) if text.strip()]
        for name, some in (("held", texts[::10]), ("train", [t for i, t in enumerate(texts) if i % 10])):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in some)
            (folder / f"{task}_{name}.jsonl").write_text(lines, encoding="utf-8")


def train_on_documents(corpora: Path, task: str, model: str, seed: int, tokens: int) -> dict[str, Any]:
    """Return the held-out losses by step, and the tokens per second."""
    data = {"data.dataset": corpora / f"{task}_train.jsonl", "data.validation": corpora / f"{task}_held.jsonl"}
    steps = tokens // (SEQ_LEN * BATCH)
    lines = train("tiny_cpu.yaml", steps, {**SHAPE, **MODELS[model], **data, "train.seed": seed})
    held = {line["step"]: round(line["validation_loss"], 4) for line in lines if "validation_loss" in line}
    return {
        "steps": steps,
        "held_out": held,
        "tokens_per_s": round(statistics.median(x["tokens_per_s"] for x in lines)),
    }


def main() -> None:
    """Train what is not there yet, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=float, default=5e6, help="of each training (default: 5e6)")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    path = arguments.json
    found = json.loads(path.read_text()) if path is not None and path.exists() else {}
    tokens, runs = int(arguments.tokens), found.get("trainings", {})
    with tempfile.TemporaryDirectory() as folder:
        write_corpora(Path(folder))
        for seed, task, model in itertools.product(range(arguments.seeds), ("prose", "code"), MODELS):
            name = f"{task}, {model}, {tokens} tokens, seed {seed}"
            if name not in runs:
                runs[name] = train_on_documents(Path(folder), task, model, seed, tokens)
                keep({**found, "shape": SHAPE, "models": MODELS, "trainings": runs}, path)


if __name__ == "__main__":
    main()
