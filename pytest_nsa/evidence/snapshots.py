"""The comparisons of a test's ranks with syrupy snapshots, as they are recorded. The host keeps syrupy's files."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_nsa.evidence.shapes import has, is_flag, is_text
from pytest_nsa.wire.files import read_lines

FILE = "snapshots.jsonl"


def _is_base64(value: Any) -> bool:
    try:
        return is_text(value) and base64.b64decode(value, validate=True) is not None
    except ValueError:
        return False


_SHAPE = {
    "name": is_text, "location": is_text, "index": lambda value: isinstance(value, int | str), "extension": is_text,
    "where": is_text, "matched": is_flag, "is_new": is_flag, "text?": is_text, "base64?": _is_base64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A comparison with a snapshot, on one rank. ``location`` is its file, ``index`` its number or name in the test, ``extension``
    the class that writes it ('module:name'), ``where`` the line of the comparison. ``value`` is what is to be written; None if
    the snapshot ``matched``, or the comparison failed.
    """

    name: str
    location: str
    index: int | str
    extension: str
    where: str
    matched: bool
    is_new: bool
    value: str | bytes | None


def as_record(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as a JSON object, which `read_snapshots` reads."""
    record = {name: getattr(snapshot, name) for name in Snapshot.__dataclass_fields__ if name != "value"}
    if isinstance(snapshot.value, bytes):
        return {**record, "base64": base64.b64encode(snapshot.value).decode()}
    return record if snapshot.value is None else {**record, "text": snapshot.value}


def read_snapshots(path: Path) -> Iterator[Snapshot]:
    """Yield the comparisons of a rank, in their order."""
    for record in read_lines(path):
        if has(record, _SHAPE):
            encoded = record.get("base64")
            value = base64.b64decode(encoded) if encoded is not None else record.get("text")
            fields = {name: record[name] for name in Snapshot.__dataclass_fields__ if name != "value"}
            yield Snapshot(**fields, value=value)


def by_snapshot(snapshots: Mapping[int, Iterable[Snapshot]]) -> dict[tuple[str, str], dict[int, Snapshot]]:
    """Return the last comparison of each rank, by file and name of the snapshot. A comparison that matches a value which the same
    rank has given before does not replace that value.
    """
    found: dict[tuple[str, str], dict[int, Snapshot]] = {}
    for rank, theirs in snapshots.items():
        for snapshot in theirs:
            of_ranks = found.setdefault((snapshot.location, snapshot.name), {})
            if not (snapshot.matched and rank in of_ranks):
                of_ranks[rank] = snapshot
    return found
