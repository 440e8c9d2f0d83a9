"""Read logs of a job, one for all ranks or one each: watchdogs, monitored barriers, NCCL_DEBUG, exceptions, ends of processes.

A log is read line by line, with or without the prefixes of torchrun, SLURM and Ray, time stamps and colours.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from pytest_nsa.foreign.dumps import name_of_op
from pytest_nsa.foreign.values import Counts, ForeignCall, ForeignJob, Statement

LONGEST = 1 << 16  # bytes of a line
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK_PREFIX = re.compile(r"^\s*\[?(?:rank|default|trainer|worker)?\s?(?P<rank>\d{1,6})\]?\s?[:|>]\s?")
# '[PG ID 0 PG GUID 0(default_pg) Rank 1]', '[PG 0 Rank 1]', '[Rank 1]'
_WHO = r"\[(?:PG (?:ID \S+ )?(?:PG GUID )?(?P<group>[^\s(\]]+)(?:\((?P<name>[^)]*)\))? )?Rank (?P<rank>\d+)\]"
_TIMEOUT = re.compile(
    _WHO
    + r".*?Watchdog caught collective operation timeout: Work\w*\(SeqNum=(?P<number>\d+),\s*OpType=(?P<op>\w+)(?=[,)])"
    r"(?:,\s*TensorShape=\[(?P<shape>[\d, ]*)\])?(?:,\s*NumelIn=(?P<count>\d+)(?=[,)]))?"
)  # a name or number is whole where something follows it
_BROKEN = re.compile(r"Watchdog caught collective operation timeout: Work\w*\([^)]*$")
_COUNTS = re.compile(
    _WHO + r".*?last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)",
    re.I,
)
_BARRIER = re.compile(r"Ranks? (?P<ranks>\d+(?:, \d+)*) failed to pass monitoredBarrier")
_OP_COUNT = re.compile(
    r"(?P<process>[\w.-]+:\d+):\d+ \[\d+\] NCCL INFO (?P<op>\w+): opCount (?P<number>[0-9a-f]+) .*?\bcount (?P<count>\d+)"
    r" datatype (?P<dtype>\d+) .*?\bcomm (?P<comm>0x[0-9a-f]+)"
)
_COMM = re.compile(
    r"(?P<process>[\w.-]+:\d+):\d+ \[\d+\] NCCL INFO .*?\bcomm (?P<comm>0x[0-9a-f]+) rank (?P<rank>\d+) n[rR]anks (?P<size>\d+)"
    r"(?:.*?\bcommId (?P<id>0x[0-9a-f]+))?"
)
_DTYPES = (
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
)  # of nccl.h
_ENDED = re.compile(r"\brank\s*:\s*(?P<rank>\d+) \(local_rank")
_EXIT = re.compile(r"\bexitcode\s*:\s*(?P<code>-?\d+)")
_ERROR = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)): (?P<message>.*)")
_MARKS = (
    "Watchdog",
    "enqueued",
    "monitoredBarrier",
    "NCCL INFO",
    "Traceback",
    "Error",
    "Exception",
    "exitcode",
    "local_rank",
)


@dataclass
class _State:
    """What earlier lines of a log mean for the next one."""

    communicators: dict[tuple[str, str], tuple[int, str]] = field(
        default_factory=dict
    )  # (process, comm) -> rank, group
    in_traceback: set[int | None] = field(default_factory=set)
    ended: int | None = None
    found: set[str] = field(default_factory=set)


def read_marked_lines(file: BinaryIO) -> Iterator[str]:
    """Yield the lines of a log that may have evidence, each at most 64 KiB long, without colours.

    A terminal may have broken a watchdog's line within its parentheses: the parts are one line, up to the one with the end. A
    part has neither a rank's prefix nor a mark: before a line that has one, the broken line was cut off.
    """
    held = ""  # a line that is not whole
    while line := file.readline(LONGEST):
        text = _COLOURS.sub("", line.decode("utf-8", "replace")).rstrip()
        is_line = _RANK_PREFIX.match(text) is not None or any(mark in text for mark in _MARKS)
        if held and (is_line or len(held) > LONGEST):
            yield held
            held = ""
        text = held + text
        held = text if _BROKEN.search(text) else ""
        if not held and any(mark in text for mark in _MARKS):
            yield text
    if held:
        yield held


def add_log(job: ForeignJob, lines: Iterable[str], rank: int | None) -> set[str]:
    """Add what the lines of a log state; ``rank``: the log is of this rank alone. Return the kinds of evidence that it has."""
    state = _State()
    for line in lines:
        prefix = _RANK_PREFIX.match(line)
        own = int(prefix["rank"]) if prefix else rank
        text = line[prefix.end() :] if prefix else line
        if "NCCL INFO" in text:
            _add_nccl(job, text, state)
        elif "Watchdog caught" in text or "work:" in text:
            _add_watchdog(job, text, state)
        elif found := _BARRIER.search(text):
            missing = tuple(sorted(map(int, found["ranks"].split(", "))))
            job.statements.append(
                Statement("missing", missing, "failed to pass monitoredBarrier, by the rank that waited")
            )
            state.found.add("monitored barrier")
        else:
            _add_end(job, text, own, state)
    return state.found


def _add_watchdog(job: ForeignJob, text: str, state: _State) -> None:
    if found := _TIMEOUT.search(text):
        rank = job.rank(int(found["rank"]))
        rank.has_dump = True
        shape = [int(n) for n in re.findall(r"\d+", found["shape"] or "")]
        count = int(found["count"]) if found["count"] else (shape[0] if len(shape) == 1 else 0)
        call = ForeignCall(
            group=_group(found),
            number=int(found["number"]),
            op=name_of_op(found["op"]),
            count=count,
            dtype="?" if count or found["count"] else "",
        )
        if call not in rank.calls:
            rank.calls.append(call)
        state.found.add("watchdog")
    if found := _COUNTS.search(text):
        rank = job.rank(int(found["rank"]))
        rank.counts[_group(found)] = Counts(int(found["enqueued"]), int(found["completed"]))
        state.found.add("watchdog")


def _group(found: re.Match[str]) -> str:
    return "0" if found["name"] == "default_pg" else found["group"] or "0"


def _add_nccl(job: ForeignJob, text: str, state: _State) -> None:
    if found := _COMM.search(text):
        group = found["id"] or f"of {found['size']} ranks"
        state.communicators[found["process"], found["comm"]] = int(found["rank"]), group
        job.world_size = max(job.world_size, int(found["size"]))
    if found := _OP_COUNT.search(text):
        at = state.communicators.get((found["process"], found["comm"]))
        if at is None:
            return
        dtype = int(found["dtype"])
        job.rank(at[0]).calls.append(ForeignCall(
            group=at[1], number=int(found["number"], 16), op=name_of_op(found["op"]), count=int(found["count"]),
            dtype=_DTYPES[dtype] if dtype < len(_DTYPES) else found["dtype"],
        ))  # fmt: skip
        state.found.add("NCCL_DEBUG")


def _add_end(job: ForeignJob, text: str, own: int | None, state: _State) -> None:
    if found := _ENDED.search(text):
        state.ended = int(found["rank"])
    elif (found := _EXIT.search(text)) and state.ended is not None:
        code = int(found["code"])
        if code < 0:
            job.rank(state.ended).signal = -code
            state.found.add("ends of processes")
        state.ended = None
    elif text.startswith("Traceback (most recent call last)"):
        state.in_traceback.add(own)
    elif (found := _ERROR.match(text)) and own in state.in_traceback and own is not None:
        state.in_traceback.discard(own)
        rank = job.rank(own)
        rank.error = rank.error or f"{found['type']}: {found['message'][:300]}"
        state.found.add("exceptions")
