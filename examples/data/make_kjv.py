"""Make kjv.parquet from the output of Debian's ``bible`` command: ``bible -f gen1:1-rev22:21 | python make_kjv.py``.

One document a chapter, in the public schema of FineWeb-Edu. Nobody scored this text, so the scores are null.
"""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("text", pa.string()), ("id", pa.string()), ("dump", pa.string()), ("url", pa.string()),
        ("file_path", pa.string()), ("language", pa.string()), ("language_score", pa.float64()),
        ("token_count", pa.int64()), ("score", pa.float64()), ("int_score", pa.int64()),
    ]
)  # fmt: skip
VERSE = re.compile(r"(\w+?)(\d+):(\d+) (.*)")


def main() -> None:
    """Read verses on standard input, write kjv.parquet beside this file."""
    verses = [match.groups() for line in sys.stdin if (match := VERSE.match(line))]
    rows = []
    for (book, chapter), lines in groupby(verses, key=lambda verse: verse[:2]):
        text = "\n".join(line[3] for line in lines) + "\n"
        rows.append(
            {
                "text": text, "id": f"kjv:{book}:{chapter}", "dump": "bible-kjv-text", "url": None,
                "file_path": None, "language": "en", "language_score": None,
                "token_count": len(text.split()), "score": None, "int_score": None,
            }
        )  # fmt: skip
    target = Path(__file__).with_name("kjv.parquet")
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    pq.write_table(table, target, compression="zstd", compression_level=19, row_group_size=128)
    print(f"{target}: {len(rows)} documents, {sum(len(row['text'].encode()) for row in rows)} bytes of text")


if __name__ == "__main__":
    main()
