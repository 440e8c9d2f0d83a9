"""Which fields the lines of evidence must have: a folder may come from a stranger, from another version, or from a full disk.

A line that lacks a field of its kind is skipped, as an incomplete one is. Unknown kinds and fields are accepted, so that an older
reader reads a newer folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from pytest_nsa.wire.files import read_lines
from pytest_nsa.wire.messages import SCHEMA

Check = Callable[[Any], bool]
LARGEST = 1e18


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number below `LARGEST`, more than any clock or counter gives."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 0 on."""
    return _int(value) and value >= 0


def is_schema(value: Any) -> bool:
    """Return whether a value is the schema number of this version's files."""
    return _int(value) and value == SCHEMA


def is_text(value: Any) -> bool:
    """Return whether a value is a string."""
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    """Return whether a value is True or False."""
    return isinstance(value, bool)


def is_map(value: Any) -> bool:
    """Return whether a value is a JSON object."""
    return isinstance(value, dict)


def _number_or_none(value: Any) -> bool:
    return value is None or is_number(value)


def _check_list(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _check_fields(shape: Mapping[str, Check], *, may_be_empty: bool = False) -> Check:
    return lambda value: is_map(value) and ((may_be_empty and not value) or has(value, shape))


def _ranks(value: Any) -> bool:
    return is_text(value) or _check_list(_int)(value)


def _numbers_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_number_or_none, value.values()))


def _key_uses(value: Any) -> bool:
    """Return whether a value has rows that begin with a key and a line."""
    return isinstance(value, list) and all(
        isinstance(row, list) and len(row) >= 2 and all(map(is_text, row[:2])) for row in value
    )


def _places(value: Any) -> bool:
    """Return whether a value is a stack: file, line and function of each frame."""
    return isinstance(value, list) and all(
        isinstance(f, list) and len(f) == 3 and is_text(f[0]) and _int(f[1]) and is_text(f[2]) for f in value
    )


# A frame with the counters of its loops, the locations of its generators, and its exceptions.
is_counted = _check_fields(
    {
        "at": is_text, "counters": is_map, "streams?": _check_list(is_text),
        "errors?": _check_list(_check_fields({"name": is_text, "says": is_text, "at": is_text})),
    }
)  # fmt: skip
_STALL: dict[str, Check] = {
    "stalled_s?": is_number, "stood_still_s?": is_number,
    "moved?": is_flag, "moved_ranks?": _check_list(_int), "waits_s?": is_number, "reason?": is_text,
    "by?": is_text,
    "beat_age_s?": _numbers_by_name,
}  # fmt: skip
# The fields of each kind of event; those with a question mark are optional.
EVENTS: dict[str, dict[str, Check]] = {
    "refused": {"reason": is_text},
    "ended": {"duration_s": is_number},
    "exit": {"rank": _int, "code?": _int, "signal?": _int, "by_us?": is_flag, "oom_kills?": _int},
    "stop": _STALL,
    "stall": _STALL,
    "standing": _STALL,  # its name until verdict schema 2
    "sampled": {"beat_age_s?": _numbers_by_name},
    "native": {"rank": _int, "absent": is_text},
    "gpus": {"gpus": _check_list(is_map)},
    "xid": {"gpu": _int, "xid": _int}, "appeared": {"rank": _int, "path": is_text, "written": is_number},
    "gone": {"rank": _int},
    "told": {"of": _int, "kind": is_text, "file": is_text, "says": is_text},
    "process": {
        "rank": _int, "state": is_text, "rss_mib?": is_number,
        "cpu_share": is_number, "main_cpu_share?": is_number, "main_cpu_s?": is_number, "kernel_share?": is_number,
        "faults_per_s?": is_number,
        "below_cpu_share?": is_number,
        "written_per_s?": is_number, "gil_wait_ms?": is_number,
        "unread_bytes?": is_number, "unsent_bytes?": is_number, "sockets?": is_number, "wchan": is_text,
        "children?": _check_list(is_text), "ended?": _check_list(is_text),
        "wants_cpu?": is_flag, "held_by?": _check_list(_int), "locked_by?": _check_list(_int), "waits_for_lock?": is_text,
        "open_and_locked?": is_text, "holds_locks?": _check_list(is_text),
    },
    "start": {"notes?": _check_list(is_text), "machine?": is_text, "memory_mib?": is_number, "libraries?": _check_list(is_text)},
    "done": {"passed": is_flag, "pid?": _int, "peak_mib?": is_number, "added_mib?": is_number, "peak_gpu_mib?": is_number},
    "pytest_exit": {"reason": is_text, "returncode?": _int},
    "skipped": {"reason": is_text, "where?": is_text, "after?": is_text},
    "xfailed": {"reason": is_text, "where?": is_text, "after?": is_text},
    "exception": {
        "when": is_text, "type": is_text, "message": is_text, "file": is_text, "line": _int, "function": is_text,
        "module?": is_text,
        "raised_in?": is_text, "chain?": _check_list(_check_list(is_text)), "in_loader?": is_flag, "network?": is_text,
        "missing?": is_text, "stack?": _places, "counters?": _check_list(is_counted),
    },
    "thread_exception": {
        "whose": is_text, "type": is_text, "message": is_text, "where": is_text, "raised_in": is_text, "future": _int,
    },
    "future_asked": {"future": _int},
    "parameters": {"names": _check_list(is_text), "modules?": _check_list(is_text)},
    "warning": {"category?": is_text, "message?": is_text},
    "left_thread": {"name": is_text, "where": is_text},
    "left_running": {"command": is_text},
    "sends_signal": {"pid": _int, "signal": _int, "where": is_text},
    "parallel": {"kind": is_text, "needs_every_gradient?": is_flag},
    "gradients_missing": {"step": _int, "names": _check_list(is_text), "where": is_text},
    "wrapped": {"where": is_text, "ranks": _ranks, "parameters": _check_list(is_text)},
    "gradients_ready": {"step": _int, "order": _int},
    "anomaly": {"kind": is_text, "step": _int},
    "key_set": {"key": is_text, "where": is_text},
    "group": {"name": is_text, "ranks": _ranks, "number?": _int},
}  # fmt: skip
# What a stalled rank wrote of itself; `handles` and `asyncio` may be empty.
OWN_WORDS: dict[str, Check] = {
    "time": is_number, "stacks?": is_text, "beat_age_s?": is_number,
    "keys?": _key_uses, "lines?": _check_list(is_text),
    "handles?": _check_fields({"says": is_text, "at": is_text, "in": is_text}, may_be_empty=True),
    "asyncio?": _check_fields({
        "tasks": _check_list(is_text), "timers": _int, "files": _int,
        "failed?": _check_list(_check_fields({"says": is_text, "at": is_text})),
    }, may_be_empty=True),
}  # fmt: skip
XFAIL: dict[str, Check] = {"reason": is_text, "strict": is_flag, "any": is_flag, "expects": is_flag}
REPORT: dict[str, Check] = {"report": is_map, "text": is_text, "subtest?": is_flag, "xfail?": _check_fields(XFAIL)}
BEAT: dict[str, Check] = {
    "time": is_number, "step": _int, "phase": is_text, "rss_mib?": _number_or_none, "cuda_allocated_mib?": _number_or_none,
    "cuda_reserved_mib?": _number_or_none,
}  # fmt: skip


def has(record: Mapping[str, Any], shape: Mapping[str, Check]) -> bool:
    """Return whether a record has the required fields of a shape, and all fields that it has are of the right kind."""
    for name, check in shape.items():
        wanted = name.removesuffix("?")
        if wanted not in record:
            if wanted == name:
                return False
        elif not check(record[wanted]):
            return False
    return True


def read_events(path: Path, world_size: int, unread: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a file that have the fields of their kind, a time and, if any, the number of an existing rank.

    Adds a text to ``unread`` per kind of which lines were skipped.
    """
    odd: dict[str, int] = {}
    for record in read_lines(path):
        kind = record.get("event")
        is_whole = isinstance(kind, str) and is_number(record.get("time")) and has(record, EVENTS.get(kind, {}))
        if is_whole and ("rank" not in record or (_int(record["rank"]) and 0 <= record["rank"] < world_size)):
            yield record
        else:
            name = str(kind)[:40]
            odd[name] = odd.get(name, 0) + 1
    unread += [f"{path.name}: {n} {'line' if n == 1 else 'lines'} of kind {name!r}" for name, n in odd.items()]


def read_beats(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the heartbeats of a file."""
    return (record for record in read_lines(path) if has(record, BEAT))


def read_reports(path: Path) -> Iterator[dict[str, Any]]:
    """Yield pytest's own reports of a rank."""
    return (record for record in read_lines(path) if has(record, REPORT))
