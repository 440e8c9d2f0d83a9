"""Read the dump of a flight recorder, a pickle or JSON of torch 2.4 and later, of any backend, with one file per rank."""

import io
import json
import math
import pickle
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.foreign.values import MOST_CALLS, Counts, ForeignCall, ForeignJob

LARGEST = 1 << 29  # bytes of a dump
_HOOK = "c10d"  # the prefix of what torch's FlightRecorderHook records: calls as they are begun, of any backend
_RANK_IN_NAME = re.compile(r"(\d+)(?!.*\d)")
_PEERS = re.compile(r"(?:send|recv) -?\d+(?:->|<-)(?P<other>-?\d+)")
_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16", "int": "int32", "long": "int64",
    "short": "int16", "byte": "uint8", "char": "int8", "bool": "bool",
}  # fmt: skip
_OPS = {
    "all_reduce": "allreduce", "all_gather": "allgather", "all_gather_base": "allgather", "all_gather_into_tensor": "allgather",
    "allgather": "allgather", "allgather_base": "allgather", "reduce_scatter_base": "reduce_scatter",
    "alltoall_base": "all_to_all", "alltoall": "all_to_all",
}  # fmt: skip


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries. It refuses everything that a pickle could execute."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which a dump does not have")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside of it")


def is_dump(head: bytes) -> bool:
    """Return whether a file begins as a pickle or a JSON object."""
    return head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05") or head.lstrip()[:1] == b"{"


def parse_dump(data: bytes) -> dict[str, Any] | None:
    """Return the object of a dump; None where it is another pickle or JSON. Raise ValueError for what cannot be read."""
    try:
        if data[:1] == b"\x80":
            found = _PlainUnpickler(io.BytesIO(data)).load()
        else:
            found = json.loads(data)
    except Exception as error:  # a pickle of unknown origin raises anything
        raise ValueError(f"{type(error).__name__}: {str(error)[:200]}") from None
    is_one = isinstance(found, dict) and ("entries" in found or "pg_status" in found)
    return found if is_one else None


def read_rank(path: Path, dump: dict[str, Any]) -> int | None:
    """Return a dump's rank: as it states, else the last number in the file's name, else in its folder's; None without any."""
    if isinstance(dump.get("rank"), int):
        return int(dump["rank"])
    for name in (path.name.partition(".")[0], path.parent.name):
        if found := _RANK_IN_NAME.search(name):
            return int(found[1])
    return None


def add_dump(job: ForeignJob, number: int, dump: dict[str, Any]) -> None:
    """Add a rank's dump. Raise ValueError, TypeError or KeyError for one of another form."""
    rank = job.rank(number)
    if rank.has_dump and rank.calls:
        return  # the same dump in another form
    rank.has_dump = True
    for config in _objects(list(_object(dump.get("pg_config")).values())):
        members = json.loads(str(config.get("ranks") or "[]"))
        if members and all(isinstance(m, int) for m in members):
            job.groups[_group_name(config.get("name"), config.get("desc"))] = tuple(members)
    entries = _drop_repeated(_objects(dump.get("entries"))[-MOST_CALLS:])
    latest = {entry.get("thread_id"): entry for entry in entries}
    names: dict[str, str] = {}  # the counters name a group by a number that only entries map
    for entry in entries:
        group = _get_group(entry)
        names[str(entry.get("pg_id"))] = group
        peer = _find_peer(job, entry, group, number)
        call = _call(entry, group, peer) if peer is not None else None
        if call is not None:
            # Nothing marks the end of gloo's messages and of the hook's calls: only a thread's latest may wait.
            has_no_end = _recorder(entry) == _HOOK or (call.peer != -1 and _recorder(entry) == "gloo")
            is_past = has_no_end and entry is not latest[entry.get("thread_id")]
            rank.calls.append(replace(call, is_complete=call.is_complete or is_past, has_end=not has_no_end))
    for number_, status in _object(dump.get("pg_status")).items():
        if not isinstance(status, dict) or str(number_) not in names:
            continue
        enqueued, completed = (int(status.get(f"last_{what}_collective", -1)) for what in ("enqueued", "completed"))
        rank.counts[names[str(number_)]] = Counts(enqueued, completed)


def complete_met_calls(job: ForeignJob) -> None:
    """Mark a call as complete where its recorder notes no end and every rank that it needs has begun it."""
    messages, begun = Counter[tuple[int, str, str, int]](), dict[tuple[str, int], set[int]]()
    open_ended = [
        (r, values, i, c) for r, values in job.ranks.items() for i, c in enumerate(values.calls) if not c.has_end
    ]
    for rank, _, _, call in open_ended:
        if call.peer == -1:
            begun.setdefault((call.group, call.number), set()).add(rank)
        else:
            messages[rank, call.group, call.op, call.peer] += 1
    met = {place for place, ranks in begun.items() if ranks.issuperset(job.groups.get(place[0], (-1,)))}
    passed = Counter[tuple[int, str, str, int]]()
    for rank, values, index, call in open_ended:
        if call.peer == -1:
            is_met = (call.group, call.number) in met
        else:
            passed[rank, call.group, call.op, call.peer] += 1
            answer = (call.peer, call.group, "recv" if call.op == "send" else "send", rank)
            is_met = messages[answer] >= passed[rank, call.group, call.op, call.peer]
        if is_met:
            values.calls[index] = replace(call, is_complete=True)


def _recorder(entry: dict[str, Any]) -> str:
    """Return the backend that recorded an entry, or `_HOOK`."""
    return str(entry.get("profiling_name", "")).partition(":")[0]


def _name(entry: dict[str, Any]) -> str:
    """Return an entry's name without its recorder: 'all_reduce', 'send 0->1'; the hook has no ranks in it: 'send'."""
    return str(entry.get("profiling_name", "")).rpartition(":")[2]


def _drop_repeated(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries without those of torch's FlightRecorderHook of which the backend's own recorder has a better one."""
    of_backend = {(_get_group(e), bool(e.get("is_p2p"))) for e in entries if _recorder(e) != _HOOK}
    return [e for e in entries if _recorder(e) != _HOOK or (_get_group(e), bool(e.get("is_p2p"))) not in of_backend]


def _find_peer(job: ForeignJob, entry: dict[str, Any], group: str, number: int) -> int | None:
    """Return the peer of a message, and -1 of a collective. The hook records no peer: in a group of two ranks it is the other
    one, else None.
    """
    if stated := _PEERS.match(_name(entry)):
        return int(stated["other"])
    if _recorder(entry) != _HOOK or not entry.get("is_p2p"):
        return -1
    others = [r for r in job.groups.get(group, ()) if r != number]
    return others[0] if len(others) == 1 else None


def _object(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list | tuple) else []


def _group_name(name: Any, description: Any) -> str:
    return "0" if description == "default_pg" else str(name)


def _get_group(entry: dict[str, Any]) -> str:
    group = entry.get("process_group", entry.get("pg_name", ("0", "")))
    if isinstance(group, list | tuple) and group:
        return _group_name(group[0], group[1] if len(group) > 1 else "")
    return str(group)


def _call(entry: dict[str, Any], group: str, peer: int) -> ForeignCall | None:
    name = _name(entry)
    if not name or name == "coalesced":
        return None
    given = "output" if name == "scatter" else "input"  # of a scatter, only the root has inputs
    sizes, dtypes = entry.get(f"{given}_sizes") or [], entry.get(f"{given}_dtypes") or []
    count = sum(math.prod(int(n) for n in size) for size in sizes if isinstance(size, list | tuple))
    dtype = str(dtypes[0]).lower() if dtypes else ""
    number = entry.get("p2p_seq_id" if peer != -1 else "collective_seq_id", entry.get("seq_id", 0))
    return ForeignCall(
        group=group,
        number=int(number),
        op=name.partition(" ")[0] if peer != -1 else name_of_op(name),
        dtype=_DTYPES.get(dtype, dtype),
        count=count,
        peer=peer,
        is_complete=entry.get("state") == "completed" or (bool(entry.get("retired")) and _recorder(entry) != _HOOK),
        created=float(entry.get("time_created_ns") or 0) / 1e9,
        frames=tuple(
            Frame(str(f.get("filename", "")), int(f.get("line", 0)), str(f.get("name", "")))
            for f in _objects(entry.get("frames"))
        ),
    )


def name_of_op(name: str) -> str:
    """Return one name for an operation that backends and watchdogs spell in several ways."""
    bare = name.strip("_").lower()
    return _OPS.get(bare, bare)
