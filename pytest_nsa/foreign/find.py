"""Find out by their content what files are, and read all of them as one job."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_nsa.foreign.dumps import LARGEST, add_dump, complete_met_calls, is_dump, parse_dump, read_rank
from pytest_nsa.foreign.logs import add_log, read_marked_lines
from pytest_nsa.foreign.stacks import is_stack_text, read_stacks
from pytest_nsa.foreign.texts import find_world_size, is_analysis, read_analysis
from pytest_nsa.foreign.values import ForeignJob
from pytest_nsa.wire.files import open_to_read

MOST_FILES = 1 << 14
TEXT = 16 << 20  # bytes of a text that is read as a whole
_RANK_IN_NAME = re.compile(r"(?:rank|proc|worker|default|stderr|stdout|log|stack|dump)[_.-]?(\d+)", re.I)
_PLURALS = re.compile(r"^(log|text)\b|dump$")


def read_job(paths: Iterable[Path]) -> ForeignJob:
    """Return what the files of some paths show of a job; ``kinds`` is empty where no file has evidence of a known kind."""
    job = ForeignJob()
    counts: Counter[str] = Counter()
    versions: set[str] = set()
    for path in _files(paths):
        try:
            counts.update(_read(job, path, versions))
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError) as error:
            job.unread.append(f"{path}: {str(error)[:200] or type(error).__name__}")
    complete_met_calls(job)
    for kind, number in sorted(counts.items()):
        noun = kind if number == 1 else _PLURALS.sub(r"\g<0>s", kind)
        job.kinds.append(f"{number} {noun}{_detail(job, kind, versions)}")
    return job


def _detail(job: ForeignJob, kind: str, versions: set[str]) -> str:
    if kind != "flight recorder dump":
        return ""
    ranks = sorted(rank for rank, values in job.ranks.items() if values.has_dump)
    has_frames = any(call.frames for values in job.ranks.values() for call in values.calls)
    version = f", version {', '.join(sorted(versions))}" if versions else ""
    numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{version}, {numbers}, {'with' if has_frames else 'without'} stacks"


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    found = 0
    for path in paths:
        below = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and not p.is_symlink())
        for file in below:
            found += 1
            if found > MOST_FILES:
                raise ValueError(f"{path}: more than {MOST_FILES} files; give the folder of one job")
            yield file


def _read(job: ForeignJob, path: Path, versions: set[str]) -> list[str]:
    """Add a file to a job; return its kinds of evidence."""
    number = _find_number(path)
    descriptor, size = open_to_read(path, follow=True)
    with os.fdopen(descriptor, "rb") as file:
        head = file.read(4096)
        if is_dump(head) and size <= LARGEST:
            dump = parse_dump(head + file.read(LARGEST))
            if dump is None:
                return []
            rank = read_rank(path, dump)
            if rank is None:
                raise ValueError("no rank is in its name: rename it, as dump_0")
            add_dump(job, rank, dump)
            versions.add(str(dump.get("version", "?")))
            job.backend = "gloo" if "gloo:" in str(dump.get("entries", ""))[:20_000] else job.backend
            return ["flight recorder dump"]
        if b"\0" in head:
            return []
        if size <= TEXT:
            text = (head + file.read(TEXT)).decode("utf-8", "replace")
            kinds = _read_text(job, path, text, number)
            if kinds:
                return kinds
        file.seek(0)
        return [f"log with {kind}" for kind in sorted(add_log(job, read_marked_lines(file), number))]


def _read_text(job: ForeignJob, path: Path, text: str, number: int | None) -> list[str]:
    kinds = []
    if is_stack_text(text):
        for rank, frames in read_stacks(text):
            of = rank if rank is not None else number if number is not None else _last_number(path)
            if of is not None and frames:
                job.rank(of).stack = frames
                kinds.append("text of stacks")
    elif is_analysis(text):
        job.statements += read_analysis(text)
        job.world_size = max(job.world_size, find_world_size(text))
        kinds.append("text of an analyzer")
    return kinds


def _find_number(path: Path) -> int | None:
    found = _RANK_IN_NAME.search(path.name) or _RANK_IN_NAME.search(path.parent.name)
    return int(found[1]) if found else int(path.stem) if path.stem.isdecimal() else None


def _last_number(path: Path) -> int | None:
    found = re.findall(r"\d+", path.stem)
    return int(found[-1]) if found else None
