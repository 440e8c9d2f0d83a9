"""Secrets in what ranks have left: masked in their files on request, before any report is made of them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from nsa.trace import secrets
from nsa.trace.secrets import masked, masked_value
from pytest_nsa.evidence.board import masked_board
from pytest_nsa.system.disk_space import ignore_full_disk
from pytest_nsa.wire.files import parse, read_bytes, write_atomically
from pytest_nsa.wire.masking import mask_with
from pytest_nsa.wire.messages import plain_nodeid

_TEXTS = ("output.log", "traces.log", "stacks.txt", "fatal.txt", "native.txt")
_LINES = ("events.jsonl", "reports.jsonl", "checksums.jsonl")
_WHOLE = ("stall.json", "standing.json", "counters.json")


def mask_all() -> None:
    """Mask what this process writes from now on."""
    mask_with(secrets)


def mask_files(folder: Path) -> None:
    """Rewrite what the ranks of a test have left, once they have ended."""
    for rank in folder.glob("rank*"):
        (rank / "cold.json").unlink(missing_ok=True)  # which gave a rank its job
        for name in _TEXTS:
            _rewrite(rank / name, masked)
        for name in (*_LINES, *_WHOLE):
            _rewrite(rank / name, _mask_lines)
        _rewrite_bytes(rank / "board.bin", lambda board: masked_board(board, masked))


def mask_text(path: Path) -> None:
    """Rewrite a file of text."""
    _rewrite(path, masked)


def _rewrite(path: Path, mask: Callable[[str], str]) -> None:
    _rewrite_bytes(path, lambda data: mask(data.decode(errors="replace")).encode(errors="backslashreplace"))


def _rewrite_bytes(path: Path, mask: Callable[[bytes], bytes]) -> None:
    try:
        data = read_bytes(path, path.stat().st_size)
    except OSError:  # it left none
        return
    changed = mask(data)
    if changed != data:
        with ignore_full_disk():
            write_atomically(path, changed)


def _mask_lines(text: str) -> str:
    values = [(line, parse(line)) for line in text.splitlines(keepends=True)]
    return "".join(masked(line) if value is None else json.dumps(masked_value(value)) + "\n" for line, value in values)


def shown_ids(nodeids: Iterable[str]) -> dict[str, str]:
    """Return each test's id with secrets masked, by its id; ids that masking makes equal get a number."""
    found: dict[str, str] = {}
    counts: dict[str, int] = {}
    for nodeid in map(plain_nodeid, nodeids):
        shown = masked(nodeid)
        if shown != nodeid:
            counts[shown] = counts.get(shown, 0) + 1
            shown += f"-{counts[shown]}" if counts[shown] > 1 else ""
        found[nodeid] = shown
    return found
