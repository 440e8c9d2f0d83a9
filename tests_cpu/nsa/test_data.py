"""The real data path on small files of FineWeb-Edu's schema."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nsa.config import Config, ConfigError, load_config
from nsa.data import ParquetSource, Prefetcher, SyntheticSource, check_parquet

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "tiny_cpu.yaml"
SHIPPED = ROOT / "examples" / "data" / "kjv.parquet"
SCHEMA = ["text", "id", "dump", "url", "file_path", "language", "language_score", "token_count", "score", "int_score"]


def config(**overrides: object) -> Config:
    return load_config(TINY, **overrides)


def write(path: Path, texts: list[str], column: str = "text") -> Path:
    pq.write_table(pa.table({column: pa.array(texts, pa.string())}), path, row_group_size=2)
    return path


def test_the_shipped_file_has_the_public_schema_and_a_megabyte_of_text() -> None:
    table = pq.read_table(SHIPPED)
    assert table.schema.names == SCHEMA
    assert sum(len(t.encode()) for t in table["text"].to_pylist()) >= 1 << 20


def test_every_document_reaches_exactly_one_rank(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(7)]
    path = write(tmp_path / "a.parquet", texts)
    shards = [list(ParquetSource(config(), str(path), rank, 3).documents()) for rank in range(3)]
    assert sorted(text for shard in shards for text in shard) == sorted(texts)
    assert [len(s) for s in shards] == [3, 2, 2]


def test_bytes_are_packed_in_order_with_a_separator(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["abc", "", "dé" * 200])
    source = ParquetSource(config(batch_size=2, seq_len=64), str(path), 0, 1)
    first = next(iter(source))
    assert first.shape == (2, 65)
    assert first.dtype == torch.int64
    assert bytes(first.flatten().tolist()).startswith(b"abc\0" + "dédé".encode())


def test_a_folder_of_files_is_read_by_name(tmp_path: Path) -> None:
    write(tmp_path / "2.parquet", ["second"])
    write(tmp_path / "1.parquet", ["first"])
    assert list(ParquetSource(config(), str(tmp_path), 0, 1).documents()) == ["first", "second"]


def test_bad_files_are_refused_in_one_line(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet", ["a" * 5000, "b" * 5000, "c"])
    (tmp_path / "truncated.parquet").write_bytes(whole.read_bytes()[:-100])
    (tmp_path / "empty.parquet").write_bytes(b"")
    write(tmp_path / "no_rows.parquet", [])
    write(tmp_path / "no_text.parquet", ["x"], column="content")
    pq.write_table(pa.table({"text": pa.array([1, 2])}), tmp_path / "numbers.parquet")
    expected = {
        "numbers": "column 'text' holds int64; it must hold strings",
        "truncated": "not a whole parquet file",
        "empty": "the file is empty (0 bytes)",
        "no_rows": "0 rows",
        "no_text": "no column 'text' (columns: content)",
    }
    for name, message in expected.items():
        with pytest.raises(ConfigError) as error:
            check_parquet(tmp_path / f"{name}.parquet")
        assert message in str(error.value)
        assert f"{name}.parquet" in str(error.value)
        assert "\n" not in str(error.value)


def test_a_file_damaged_in_the_middle_ends_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "damaged.parquet"
    pq.write_table(
        pa.table({"text": ["some words " * 500] * 40}), path, row_group_size=1, compression="none", use_dictionary=False
    )
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle - 9000 : middle] = bytes(9000)
    path.write_bytes(data)
    check_parquet(path)  # the footer and the last rows are whole
    prefetcher = Prefetcher(ParquetSource(config(), str(path), 0, 1), depth=1)
    with pytest.raises(ConfigError, match=r"cannot be read any further .*; copy it again"):
        list(iter(prefetcher.take, None))
    prefetcher.close()


def test_prefetching_keeps_order_skips_and_passes_errors_on(tmp_path: Path) -> None:
    batches = list(islice(SyntheticSource(config(), 0), 5))
    prefetcher = Prefetcher(SyntheticSource(config(), 0), depth=2, skip=2)
    assert [torch.equal(prefetcher.take(), b) for b in batches[2:]] == [True] * 3
    prefetcher.close()
    path = write(tmp_path / "empty_texts.parquet", ["", ""])
    failing = Prefetcher(ParquetSource(config(), str(path), 0, 1), depth=1)
    with pytest.raises(ConfigError, match="rank 0 has only empty documents"):
        failing.take()
    failing.close()


def test_ranks_see_different_synthetic_data() -> None:
    first, second = (next(iter(SyntheticSource(config(), rank))) for rank in (0, 1))
    assert not torch.equal(first, second)
