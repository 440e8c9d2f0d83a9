"""The file of a rank's checksums, ``checksums.jsonl``: a line of JSON per record, the names of a model's tensors once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from nsa.trace.divergence.sampling import Seen, norms_of
from nsa.trace.events import ignore_full_disk
from nsa.trace.files import close, open_to_append, write
from nsa.trace.strict_json import to_json

MAX_BYTES = 64 << 20  # then no more is written: models that diverge do so early


class Report:
    """Writes records. Fields of a model are repeated only if they have changed."""

    def __init__(self, folder: Path) -> None:
        self._file = open_to_append(folder / "checksums.jsonl")
        self._size = 0
        self._named: set[int] = set()  # models with names that are written already
        self._written: dict[int, dict[str, object]] = {}  # by model, the fields that were last written

    @property
    def is_full(self) -> bool:
        """Whether no more is written."""
        return self._size > MAX_BYTES

    def changes(self, model: int, now: Mapping[str, object]) -> dict[str, object]:
        """Return the fields of a model that have changed since they were last written, and remember them as written."""
        written = self._written.setdefault(model, {})
        news = {name: value for name, value in now.items() if written.get(name) != value}
        written.update(news)
        return news

    def append(self, kind: str, seen: Seen, joins: int = 0, news: Mapping[str, object] = MappingProxyType({})) -> None:
        """Write the norms of the tensors in ``seen``. Reads the numbers, on a GPU with a synchronisation."""
        found = iter(norms_of([t for t in seen.tensors if t is not None and not t.is_sparse]))
        values = [next(found) if t is not None and not t.is_sparse else None for t in seen.tensors]
        record: dict[str, object] = {
            "kind": kind, "step": seen.step, "model": seen.model, "ranks": seen.ranks, "norms": values, "site": seen.site,
            **({"joins": joins} if joins else {}), **news,
        }  # fmt: skip
        if seen.model not in self._named:
            self._named.add(seen.model)
            record["names"] = seen.names
        with ignore_full_disk():
            self._size += write(self._file, to_json(record, as_text=True).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        close(self._file)
