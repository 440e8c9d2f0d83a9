"""Text files and JSON lines as data: the same documents in the same order, from any part on; refused in one line."""

import json
import random
from itertools import islice
from pathlib import Path

import pytest

from nsa.config import ConfigError, load_config
from nsa.data import open_source
from nsa.data.documents import FileDocuments, Place, ShuffledDocuments, files_of
from nsa.data.packing import PackedSource, Position
from nsa.data.parquet import ParquetDocuments
from nsa.data.plain import PlainDocuments

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny_cpu.yaml"


def lines_of(texts: list[str]) -> str:
    return "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts))


def texts_from(documents: PlainDocuments, place: Place) -> list[bytes | None]:
    return [text for _, texts in documents.read(place) for text in texts]


def test_lines_of_json_are_read_from_each_part_on(tmp_path: Path) -> None:
    texts = ["é" * random.randrange(200) + str(n) for n in range(700)]
    (tmp_path / "b.jsonl").write_text(lines_of(texts[400:]))
    (tmp_path / "a.jsonl").write_text(lines_of(texts[:400]) + "\n")
    documents = PlainDocuments(files_of(str(tmp_path))[0])
    whole = [text.encode() for text in texts]
    assert texts_from(documents, Place()) == whole
    read = 0
    for place, part in documents.read(Place()):
        assert texts_from(documents, place) == whole[read:]
        read += len(part)
    assert read == 700


def test_a_text_file_is_a_document_and_samples_are_the_stream(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "1.md").write_text("one\ntwo\n")
    (tmp_path / "deep" / "2.py").write_text("thrée")
    (tmp_path / "deep" / "3.so").write_bytes(b"\0binary")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    source = PackedSource(PlainDocuments(files_of(str(tmp_path))[0]), 4, 0)
    once = b"one\ntwo\n\0" + "thrée".encode() + b"\0"
    found = [bytes(sample.tokens.astype("uint8")) for sample in islice(source.samples(Position(), lambda n: True), 6)]
    assert found == [(once * 4)[4 * n : 4 * n + 5] for n in range(6)]


def test_lines_that_cannot_be_read_are_bad_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        lines_of(["good"]).encode() + b'{"text": 3}\n[]\n{"te\n{"text": "\xff"}\n' + lines_of(["too"]).encode()
    )
    assert texts_from(PlainDocuments([file]), Place()) == [b"good", None, None, None, None, b"too"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "the file is empty"),
        ("a.txt", b"", "the file is empty"),
        ("a.jsonl", b'{"content": "x"}\n', "line 1 is no JSON object with 'text'"),
        ("a.parquet", b"{}", "not a whole parquet file"),
        ("a.py", b"x = 1\0", "is not text; give parquet, JSON lines"),
        ("", b"", "no parquet, JSON lines or text in this folder"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        open_source(load_config(TINY, **{"data.dataset": str(tmp_path / name)}))
    assert len(str(error.value).splitlines()) == 1


def test_text_in_another_encoding_is_not_called_empty(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode("latin-1") * 9)
    source = PackedSource(PlainDocuments(files_of(str(tmp_path))[0]), 4, 100)
    with pytest.raises(
        ConfigError, match=r"dataset: 1 rows cannot be read \(no text in UTF-8\), and the others are empty"
    ):
        next(source.samples(Position(), lambda number: True))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_file_that_is_gone_in_the_next_pass_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".parquet":
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pytest.importorskip("pyarrow").table({"text": ["abc"] * 3}), path)
    else:
        path.write_text(lines_of(["abc"] * 3))
    source = open_source(load_config(TINY, dataset=str(path)))
    samples = source.samples(Position(), lambda number: True)
    next(samples)
    path.unlink()
    with pytest.raises(ConfigError, match=rf"dataset: a file cannot be read any more \(.*{name}.*\); put it back"):
        list(islice(samples, 9))


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet"])
def test_shuffled_documents_follow_from_seed_and_pass(tmp_path: Path, kind: str) -> None:
    texts = [f"document {n:03}" for n in range(100)]
    if kind == "txt":
        for n, text in enumerate(texts):
            (tmp_path / f"{n:03}.txt").write_text(text)
    elif kind == "jsonl":
        (tmp_path / "a.jsonl").write_text(lines_of(texts))
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=10)
    files, is_parquet = files_of(str(tmp_path))
    documents: FileDocuments = ParquetDocuments(files) if is_parquet else PlainDocuments(files)

    def read(seed: int, place: Place) -> list[tuple[Place, list[bytes | None]]]:
        return list(ShuffledDocuments(documents, seed).read(place))

    def order(seed: int, epoch: int) -> list[bytes | None]:
        return [text for _, some in read(seed, Place(epoch)) for text in some]

    orders = [order(1, 0), order(1, 1), order(2, 0)]
    assert all(sorted(filter(None, one)) == [text.encode() for text in texts] for one in orders)
    assert orders[0] == order(1, 0)
    assert len({tuple(one) for one in orders}) == 3
    whole = read(1, Place())
    assert read(1, whole[-2][0]) == whole[-2:]  # from the middle on, as a resumed run reads
