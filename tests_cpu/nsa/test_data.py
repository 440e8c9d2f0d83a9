"""The real data path on small files of FineWeb-Edu's schema: order, packing, which rank gets what, resuming, and bad files."""

import json
import os
import signal
import subprocess
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.config import Config, ConfigError, load_config
from nsa.data import Position, batches, open_source
from nsa.data.documents import Place
from nsa.data.loader import Loader
from nsa.data.packing import PackedSource
from nsa.data.parquet import ParquetDocuments, check_parquet
from tests_cpu.warm import WarmPython

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "tiny_cpu.yaml"
SHIPPED = ROOT / "examples" / "data" / "kjv.parquet"
SCHEMA = ["text", "id", "dump", "url", "file_path", "language", "language_score", "token_count", "score", "int_score"]


def config(**overrides: object) -> Config:
    return load_config(TINY, **{"data.dataset": str(SHIPPED), **overrides})


def write(path: Path, texts: list[str | None], column: str = "text", group: int = 2) -> Path:
    pq.write_table(pa.table({column: pa.array(texts, pa.string())}), path, row_group_size=group)
    return path


def source(path: Path, seq_len: int = 16, max_bad_rows: int = 0) -> PackedSource:
    return PackedSource(ParquetDocuments([path]), seq_len, max_bad_rows)


def stream(texts: list[str], count: int) -> bytes:
    """Return the first ``count`` bytes of the texts in a cycle, with a zero byte after each text."""
    once = b"".join(text.encode() + b"\0" for text in texts if text)
    return (once * (count // len(once) + 1))[:count]


def test_the_shipped_file_has_the_public_schema_and_a_megabyte_of_text() -> None:
    table = pq.read_table(SHIPPED)
    assert table.schema.names == SCHEMA
    assert sum(len(t.encode()) for t in table["text"].to_pylist()) >= 1 << 20


def test_samples_are_the_stream_and_each_token_is_a_target_once(tmp_path: Path) -> None:
    texts = ["abc", "", "dé" * 40, "x", "y" * 100]
    path = write(tmp_path / "a.parquet", list(texts))
    samples = list(islice(source(path).samples(Position(), lambda number: True), 40))
    assert [s.number for s in samples] == list(range(40))
    targets = np.concatenate([s.tokens[1:] for s in samples])
    assert targets.tobytes() == stream(texts, 40 * 16 + 1)[1:]
    assert all(s.tokens[0] == stream(texts, 40 * 16)[16 * s.number] for s in samples)


@settings(deadline=None, max_examples=40)
@given(
    first=st.integers(0, 30), ranks=st.integers(1, 4), size=st.integers(1, 3), readers=st.integers(1, 3),
    cut=st.integers(0, 4), then=st.integers(1, 4),
)  # fmt: skip
def test_no_sample_is_lost_or_taken_twice_when_a_run_goes_on_with_other_ranks(
    tmp_path_factory: pytest.TempPathFactory, first: int, ranks: int, size: int, readers: int, cut: int, then: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "prose.parquet"
    if not path.exists():
        write(path, [f"document {i} " * (i % 7) for i in range(50)])

    def taken(position: Position, world_size: int, micro_steps: int) -> tuple[list[bytes], Position]:
        rows, after = [], position
        for rank in range(world_size):
            parts = [batches(source(path), position, size, rank, world_size, part, readers) for part in range(readers)]
            for step in range(micro_steps):
                batch = next(parts[step % readers])
                rows += [row.numpy().astype(np.uint8).tobytes() for row in batch.tokens]
                if rank == 0:
                    after = batch.position
        return rows, after

    def numbered(low: int, high: int) -> list[bytes]:
        samples = source(path).samples(Position(), lambda number: number >= low)
        return [s.tokens.tobytes() for s in islice(samples, high - low)]

    start = Position(samples=first)
    before, at = taken(start, ranks, cut)
    assert at.samples == first + cut * ranks * size
    after, end = taken(Position.from_json(json.loads(json.dumps(asdict(at)))), then, 2)
    assert end.samples == at.samples + 2 * then * size
    assert sorted(before + after) == sorted(numbered(first, end.samples))


def test_a_folder_of_files_is_read_by_name_and_from_the_middle(tmp_path: Path) -> None:
    write(tmp_path / "2.parquet", ["four"])
    write(tmp_path / "1.parquet", ["one", "two", "three"])
    documents = ParquetDocuments(sorted(tmp_path.iterdir()))
    everything = list(documents.read(Place()))
    assert everything == [
        (Place(0, 0, 0), [b"one", b"two"]), (Place(0, 0, 1), [b"three"]), (Place(0, 1, 0), [b"four"]),
    ]  # fmt: skip
    assert list(documents.read(Place(3, 0, 1))) == [(Place(3, 0, 1), [b"three"]), (Place(3, 1, 0), [b"four"])]


def test_rows_that_cannot_be_read_are_counted_skipped_and_limited(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array([b"good", None, b"\xff\xfe", b"fine"], pa.binary()).view(pa.binary())})
    text = table["text"].combine_chunks()
    broken = pa.StringArray.from_buffers(len(text), text.buffers()[1], text.buffers()[2], text.buffers()[0])
    pq.write_table(pa.table({"text": broken}), tmp_path / "a.parquet")
    sample = next(source(tmp_path / "a.parquet", 8, max_bad_rows=10).samples(Position(), lambda number: number == 1))
    assert sample.tokens.tobytes() == b"e\0good\0fi"
    with pytest.raises(ConfigError, match=r"2 rows cannot be read, the last in part 0 of file 0; data.max_bad_rows=1"):
        list(islice(source(tmp_path / "a.parquet", 8, max_bad_rows=1).samples(Position(), lambda number: True), 9))


def test_bad_rows_are_counted_anew_in_each_pass(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["some words", None, "and more"])
    samples = list(islice(source(path, 8, max_bad_rows=1).samples(Position(), lambda number: True), 20))
    assert samples[-1].position.place.epoch >= 5


def test_a_file_damaged_in_the_middle_loses_a_part(tmp_path: Path) -> None:
    path = tmp_path / "damaged.parquet"
    pq.write_table(
        pa.table({"text": ["some words " * 500] * 40}), path, row_group_size=1, compression="none", use_dictionary=False
    )
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle - 9000 : middle] = bytes(9000)
    path.write_bytes(data)
    check_parquet(path)  # the footer and the last rows are whole
    parts = [texts for _, texts in ParquetDocuments([path]).read(Place())]
    assert len(parts) == 40
    assert 1 <= sum(texts == [None] for texts in parts) <= 3


def test_bad_files_are_refused_in_one_line(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet", ["a" * 5000, "b" * 5000, "c"])
    (tmp_path / "truncated.parquet").write_bytes(whole.read_bytes()[:-100])
    (tmp_path / "empty.parquet").write_bytes(b"")
    write(tmp_path / "no_rows.parquet", [])
    write(tmp_path / "no_text.parquet", ["x"], column="content")
    pq.write_table(pa.table({"text": pa.array([1, 2])}), tmp_path / "numbers.parquet")
    pq.write_table(pa.table([pa.array(["x"]), pa.array(["y"])], names=["text", "text"]), tmp_path / "two_texts.parquet")
    for name, message in {
        "two_texts": "more than one column 'text'",
        "numbers": "column 'text' holds int64; it must hold strings",
        "truncated": "not a whole parquet file",
        "empty": "not a whole parquet file",
        "no_rows": "0 rows",
        "no_text": r"no column 'text' \(columns: content\)",
    }.items():
        with pytest.raises(ConfigError, match=rf"{name}\.parquet': {message}") as error:
            check_parquet(tmp_path / f"{name}.parquet")
        assert "\n" not in str(error.value)
    write(tmp_path / "empty_texts.parquet", ["", ""])
    with pytest.raises(ConfigError, match="all its documents are empty"):
        next(source(tmp_path / "empty_texts.parquet").samples(Position(), lambda number: True))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_reading_ahead_keeps_the_order_and_goes_on_where_it_was(workers: int) -> None:
    settings_ = config(workers=workers)
    expected = list(islice(batches(open_source(settings_), Position(), 4, 1, 2), 6))
    loader = Loader(settings_, open_source(settings_), Position(), 1, 2)
    found = [loader.take() for _ in range(4)]
    loader.close()
    again = Loader(settings_, open_source(settings_), found[-1].position, 1, 2)
    found += [again.take() for _ in range(2)]
    again.close()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert one.position.samples == other.position.samples


def test_what_a_reader_raises_reaches_the_training(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [None] * 5 + ["x"])
    settings_ = config(**{"data.dataset": str(path), "data.max_bad_rows": 1})
    loader = Loader(settings_, open_source(settings_), Position(), 0, 1)
    with pytest.raises(ConfigError, match="rows cannot be read"):
        loader.take()
    loader.close()


def test_made_sequences_are_the_same_for_any_number_of_ranks() -> None:
    def rows(dataset: str, ranks: int) -> list[list[int]]:
        settings_ = config(**{"data.dataset": dataset})
        found = [next(batches(open_source(settings_), Position(), 4, r, ranks)).tokens for r in range(ranks)]
        return sorted(torch.cat(found).tolist()[: 4 * ranks])

    for dataset in ("synthetic", "copy"):
        assert rows(dataset, 2)[0] != rows(dataset, 2)[1]
        one, two = rows(dataset, 1), rows(dataset, 2)
        assert all(row in two for row in one)
    copied = rows("copy", 1)[0]
    assert copied[:64] == copied[65 : 65 + 64]


def test_a_reader_that_is_killed_ends_the_training_with_its_name(warm: WarmPython, tmp_path: Path) -> None:
    command = ("-m", "nsa.train", "--config", str(TINY), "--dataset", str(SHIPPED), "--out", str(tmp_path))
    killed = warm.popen(*command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in killed.stdout:
        if "step 1/" in line:
            break
    (reader,) = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    os.kill(int(reader), signal.SIGKILL)
    _, errors = killed.communicate(timeout=60)
    assert killed.returncode == 1, errors
    done = warm.call("-m", "pytest_nsa", "diagnose", str(tmp_path), "--json")
    verdict = json.loads(done.stdout)
    assert (verdict["outcome"], verdict["cause"], verdict["ranks"]) == ("FAIL", "dataloader_stuck", [0])
