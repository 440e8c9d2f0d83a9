"""Secrets in what ranks printed and raised: masked in their files on request, before any report is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_nsa.evidence.snapshots import FILE
from pytest_nsa.system.room import where_there_is_room
from pytest_nsa.wire.files import parse, read_bytes, write_atomically

_TEXTS = ("output.log", "traces.log")
_LINES = ("events.jsonl", "reports.jsonl")


def mask_files(folder: Path, mask: Callable[[str], str]) -> None:
    """Rewrite what the ranks of a test have left, once they have ended."""
    for rank in folder.glob("rank*"):
        for name in (*_TEXTS, *_LINES):
            _rewrite(rank / name, mask, lines=name in _LINES)


def mask_snapshots(folder: Path, mask: Callable[[str], str]) -> None:
    """Rewrite what ranks compared with snapshots, once it is read: what the host writes has the values that the test gave."""
    for rank in folder.glob("rank*"):
        _rewrite(rank / FILE, mask, lines=True)


def _rewrite(path: Path, mask: Callable[[str], str], *, lines: bool) -> None:
    try:
        text = read_bytes(path, path.stat().st_size).decode(errors="replace")
    except OSError:  # it left none
        return
    masked = "".join(_mask_line(line, mask) for line in text.splitlines(keepends=True)) if lines else mask(text)
    if masked != text:
        with where_there_is_room():
            write_atomically(path, masked)


def _mask_line(line: str, mask: Callable[[str], str]) -> str:
    value = parse(line)
    return json.dumps(_mask_value(value, mask)) + "\n" if value is not None else mask(line)


def _mask_value(value: Any, mask: Callable[[str], str]) -> Any:
    """Return a value of JSON with its texts masked."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, list):
        return [_mask_value(v, mask) for v in value]
    if isinstance(value, dict):
        return {k: _mask_value(v, mask) for k, v in value.items()}
    return value
