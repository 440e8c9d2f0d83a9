"""Secrets in what ranks have left: masked in their files on request, before any report is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from pytest_nsa.evidence.snapshots import FILE
from pytest_nsa.system.disk_space import ignore_full_disk
from pytest_nsa.wire.files import parse, read_bytes, write_atomically
from pytest_nsa.wire.masking import Mask, mask_with, masked_value
from pytest_nsa.wire.messages import plain_nodeid

_TEXTS = ("output.log", "traces.log", "stacks.txt", "fatal.txt", "native.txt")
_LINES = ("events.jsonl", "reports.jsonl", "checksums.jsonl")
_WHOLE = ("stall.json", "standing.json", "counters.json")


def mask_all() -> None:
    """Mask what this process writes from now on."""
    from nsa.trace.secrets import masked, masked_source  # not before a session requests it

    mask_with(masked, masked_source)


def mask_files(folder: Path) -> None:
    """Rewrite what the ranks of a test have left, once they have ended."""
    from nsa.trace.secrets import masked, masked_in_place

    for rank in folder.glob("rank*"):
        (rank / "cold.json").unlink(missing_ok=True)  # which gave a rank its job
        for name in _TEXTS:
            _rewrite(rank / name, masked)
        for name in (*_LINES, *_WHOLE):
            _rewrite(rank / name, _by_line(masked))
        # A board's fields have fixed sizes: the mask keeps the length.
        _rewrite(rank / "board.bin", masked_in_place, encoding="latin-1")


def mask_text(path: Path) -> None:
    """Rewrite a file of text."""
    from nsa.trace.secrets import masked

    _rewrite(path, masked)


def mask_snapshots(folder: Path) -> None:
    """Rewrite what ranks compared with snapshots. Called after the host has read it: snapshots keep the test's values."""
    from nsa.trace.secrets import masked

    for rank in folder.glob("rank*"):
        _rewrite(rank / FILE, _by_line(masked))


def _rewrite(path: Path, mask: Callable[[str], str], encoding: str = "utf-8") -> None:
    try:
        text = read_bytes(path, path.stat().st_size).decode(encoding, errors="replace")
    except OSError:  # it left none
        return
    masked = mask(text)
    if masked != text:
        with ignore_full_disk():
            write_atomically(path, masked.encode(encoding, errors="backslashreplace"))


def _by_line(mask: Mask) -> Mask:
    return lambda text: "".join(_mask_line(line, mask) for line in text.splitlines(keepends=True))


def _mask_line(line: str, mask: Mask) -> str:
    value = parse(line)
    return json.dumps(masked_value(value, mask)) + "\n" if value is not None else mask(line)


def shown_ids(nodeids: Iterable[str]) -> dict[str, str]:
    """Return each test's id with secrets masked, by its id; ids that masking makes equal get a number."""
    from nsa.trace.secrets import masked

    found: dict[str, str] = {}
    counts: dict[str, int] = {}
    for nodeid in map(plain_nodeid, nodeids):
        shown = masked(nodeid)
        if shown != nodeid:
            counts[shown] = counts.get(shown, 0) + 1
            shown += f"-{counts[shown]}" if counts[shown] > 1 else ""
        found[nodeid] = shown
    return found
