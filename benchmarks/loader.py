"""Tokens per second that the data pipeline delivers by itself: reading, packing, processes, batches of int64.

    python benchmarks/loader.py --json benchmarks/results/loader.json

Batches are 8 x 2048, from a parquet file of 64 MiB that is made from the shipped prose, by 0, 1 and 2 reading processes, in
rounds that take turns. Where the `tokenizers` library is installed, a tokenizer that is trained here is measured too.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import keep, parser_of

ROOT = Path(__file__).resolve().parents[1]
PROSE = ROOT / "examples" / "data" / "kjv.parquet"
SECONDS = 4.0


def make_file(folder: Path) -> tuple[Path, list[str]]:
    """Write a parquet file that repeats the prose; return it, and the texts."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    texts = parquet.read_table(PROSE, columns=["text"])["text"].to_pylist()
    times = (64 << 20) // sum(len(text) for text in texts) + 1
    path = folder / "prose.parquet"
    parquet.write_table(pa.table({"text": texts * times}), path, row_group_size=1000)
    return path, texts


def make_tokenizer(folder: Path, texts: list[str]) -> str:
    """Train a byte-level BPE of 4,096 tokens; return its path, '' where the library is missing."""
    try:
        import tokenizers
    except ImportError:
        return ""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(texts, vocab_size=4096, special_tokens=["<|endoftext|>"], show_progress=False)
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def rate(path: Path, workers: int, tokenizer: str) -> float:
    """Return tokens per second, after the first batch."""
    from nsa.config import load_config
    from nsa.data import Position, open_source
    from nsa.data.loader import Loader

    config = load_config(
        ROOT / "configs" / "tiny_cpu.yaml",
        **{"data.dataset": str(path), "data.workers": workers, "data.tokenizer": tokenizer, "data.prefetch": 8,
           "train.batch_size": 8, "train.seq_len": 2048, "model.vocab_size": 4096},
    )  # fmt: skip
    loader = Loader(config, open_source(config), Position(), 0, 1)
    loader.take()
    began, tokens = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        tokens += loader.take().tokens[:, 1:].numel()
    seconds = time.perf_counter() - began
    loader.close()
    return tokens / seconds


def main() -> None:
    """Measure, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        path, texts = make_file(Path(name))
        tokenizer = make_tokenizer(Path(name), texts)
        ways = [(f"byte, {n} processes", n, "byte") for n in (0, 1, 2)]
        ways += [(f"BPE, {n} processes", n, tokenizer) for n in (1, 2) if tokenizer]
        for _ in range(arguments.rounds):
            for label, workers, chosen in ways:
                found.setdefault(label, []).append(rate(path, workers, chosen))
    figures: dict[str, Any] = {
        "tokens_per_s": {label: statistics.median(rates) for label, rates in found.items()},
        "min_max": {label: [min(rates), max(rates)] for label, rates in found.items()},
        "rounds": arguments.rounds,
    }
    keep(figures, arguments.json)


if __name__ == "__main__":
    main()
