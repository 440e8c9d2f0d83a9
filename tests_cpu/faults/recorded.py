"""Archives of the evidence that tests with faults have left, from which the rules are tested in milliseconds.

A line of evidence/rows.jsonl names each test and its archive (`rows.py`). The program is in the archive's source.jsonl. `pytest
tests_cpu/faults -k NAME --record` runs a live program and writes an archive of it. Paths of the recording machine are replaced:
the folder of the tests becomes /tests, the repository /repo.
"""

from __future__ import annotations

import getpass
import io
import json
import lzma
import platform
import re
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHIVES = Path(__file__).with_name("evidence")
GENERATED = ARCHIVES / "generated"  # of the programs that benchmarks generate, with their labels
# The files that `evidence.load` reads, of a test and of each rank.
FILES = (
    "job.json", "host.jsonl", "source.jsonl", "heartbeat_rank*.jsonl", "rank*/events.jsonl", "rank*/board.bin",
    "rank*/stacks.txt", "rank*/fatal.txt", "rank*/native.txt", "rank*/stall.json", "rank*/standing.json",
    "rank*/counters.json", "rank*/reports.jsonl",
    "rank*/checksums.jsonl", "rank*/output.log", "asked.json",
)  # fmt: skip
HEALTHY = ARCHIVES / "healthy"  # of healthy programs, at the moment of their longest pause
MOST_LINES = 200  # the latest of a rank's reports, heartbeats and checksums


def unpack_healthy(module: str, folder: Path) -> dict[str, Path]:
    """Return the recorded moments of a module's healthy tests, by test."""
    extract(HEALTHY / f"{module}.tar.xz", folder)
    return {path.name: path for path in sorted(folder.iterdir())}


def folders_of(run: Path) -> dict[str, Path]:
    """Return the folders of a run's tests, by the tests' names."""
    verdicts = map(json.loads, (run / "verdicts.jsonl").read_text(encoding="utf-8").splitlines())
    return {verdict["nodeid"].partition("::")[2]: run / verdict["folder"] for verdict in verdicts}


def pack(path: Path, folders: Mapping[str, Path], tests: Path, labels: Mapping[str, object] | None = None) -> Path:
    """Write the evidence of tests below ``tests`` as an archive, with ``labels`` as labels.json; paths are replaced.

    Raise ValueError for a path too short to replace.
    """
    replaced = {str(tests): "/tests", str(ROOT): "/repo", sys.base_prefix: "/usr", sys.prefix: "/repo/.venv"}
    replaced |= {str(Path(tempfile.gettempdir()) / f"pytest-of-{getpass.getuser()}"): "/tests/tmp"}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with tarfile.open(partial, "w:xz", preset=9) as archive:
        if labels is not None:
            _add(archive, "labels.json", json.dumps(labels, indent=1).encode())
        for name, folder in folders.items():
            for file in sorted({f for pattern in FILES for f in folder.glob(pattern)}):
                data = _replace(file.read_bytes(), replaced, is_padded=file.name == "board.bin")
                if file.name == "events.jsonl":
                    data = data.replace(f'"machine": "{platform.node()}'.encode(), b'"machine": "node')
                if file.suffix == ".jsonl" and file.name not in ("events.jsonl", "host.jsonl", "source.jsonl"):
                    data = b"\n".join(data.split(b"\n")[-MOST_LINES:])
                _add(archive, f"{name}/{file.relative_to(folder)}", data)
    partial.replace(path)
    return path


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def _replace(data: bytes, replaced: dict[str, str], *, is_padded: bool) -> bytes:
    """Return ``data`` with other paths; a board's fields keep their size, as texts in them end in zeros."""
    for old, new in sorted(replaced.items(), key=lambda pair: -len(pair[0])):
        if old == new:
            continue
        if is_padded and len(new) > len(old):
            raise ValueError(f"{old}: too short to become {new} in a board; record in a longer folder")
        if is_padded:
            pad = b"\0" * (len(old) - len(new))
            data = re.sub(re.escape(old.encode()) + rb"([^\0]*)", lambda m, n=new, p=pad: n.encode() + m[1] + p, data)  # type: ignore[misc]
        else:
            data = data.replace(old.encode(), new.encode())
    return data


def unpack(archive: str, folder: Path, only: str = "") -> dict[str, Path]:
    """Return the recorded folders of an archive, by test: of all tests, or of the test ``only``."""
    extract(ARCHIVES / f"{archive}.tar.xz", folder, only)
    return {path.name: path for path in sorted(folder.iterdir())}


def extract(path: Path, folder: Path, only: str = "") -> None:
    """Write the files of an archive, all or those below ``only``, without times and owners, which take tarfile most of its time."""
    with lzma.open(path) as packed:
        data = packed.read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for entry in archive:
            if entry.isfile() and only in ("", entry.name.partition("/")[0]):
                file = folder / tarfile.data_filter(entry, str(folder)).name  # refuses a path outside of the folder
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data[entry.offset_data : entry.offset_data + entry.size])
