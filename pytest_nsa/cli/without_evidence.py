"""``pytest-nsa watch PID`` for a job that leaves no evidence: only what /proc and py-spy show.

What is observed is written to a temporary folder of evidence, to which the rules are applied as usual, with less confidence.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_nsa.cli.foreign_folders import is_ours, with_allowed_sources
from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.engine import suspect
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.load import load
from pytest_nsa.evidence.stacks import ThreadStack, parse_dump
from pytest_nsa.evidence.waiting import torch_wait
from pytest_nsa.observe.host_log import note
from pytest_nsa.report.plain import visible
from pytest_nsa.system import py_spy
from pytest_nsa.system.procfs import ProcessState, began, children_of, difference, look_at, stat_of, text_of
from pytest_nsa.system.tcp import socket_queues
from pytest_nsa.wire.files import parse, write_atomically
from pytest_nsa.wire.messages import Job

BETWEEN_LOOKS_S = 2.0  # between two looks at a rank: a rank at the same location that did not compute is stalled
AGAIN_S = 5.0
DUMP_S = 20.0
LESS = 0.7  # of the confidence that the rules have with a board
_SAME_JOB = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def environment_of(pid: int) -> dict[str, str]:
    """Return the variables that a process of this user was started with; {} for another user's process, or one that has ended."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in data.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}


def ranks_of(pid: int) -> dict[int, int]:
    """Return, by rank, the process ids on this machine of the job that a process belongs to; {} if it is no rank.

    A rank's children (a data loader's workers) inherit its variables: the rank is the process with a parent that lacks them.
    Children of ``mp.spawn`` have no such variables: they are numbered in the order of their starts, which is that of the ranks.
    """
    mine = environment_of(pid)
    if not mine.get("RANK", "").isdecimal():
        return _spawned(pid) or _spawned(_parent(pid))
    ranks: dict[int, dict[int, int]] = {}
    for other in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        variables = environment_of(other)
        rank = variables.get("RANK", "")
        if rank.isdecimal() and all(variables.get(name) == mine.get(name) for name in _SAME_JOB):
            ranks.setdefault(int(rank), {})[other] = _parent(other)
    return {
        rank: next((p for p, parent in sorted(found.items()) if parent not in found), min(found))
        for rank, found in sorted(ranks.items())
    }


def _spawned(pid: int) -> dict[int, int]:
    """Return the children of a process that multiprocessing's spawn has started, if there are several and all have connections."""
    found = [child for child in children_of(pid) if "--multiprocessing-fork" in _arguments_of(child)]
    are_ranks = len(found) > 1 and all(socket_queues(child).get("sockets") for child in found)
    return dict(enumerate(sorted(found, key=lambda child: (began(child), child)))) if are_ranks else {}


def _arguments_of(pid: int) -> list[str]:
    return text_of(Path(f"/proc/{pid}/cmdline")).split("\0")


def _parent(pid: int) -> int:
    fields = stat_of(pid)
    return int(fields[1]) if fields else 0


def python_stacks(pid: int) -> tuple[str, str]:
    """Return a process's stacks in faulthandler's form, by py-spy, which pauses it for a moment; and '' or the reason for none."""
    text, why_not = py_spy.dump(pid, "--json", limit_s=DUMP_S)
    if not text:
        more = "" if py_spy.program() else ": without it no stack is known (pip install py-spy)"
        return "", why_not + more
    threads = parse(text)
    if not isinstance(threads, list):
        return "", "py-spy gave no list of threads"
    return as_dump(threads), ""


def as_dump(threads: list[Any]) -> str:
    """Return py-spy's JSON in faulthandler's form; threads without frames, and what is no thread, are skipped."""
    parts = []
    for thread in threads:
        frames = thread.get("frames") if isinstance(thread, dict) else None
        if not isinstance(frames, list) or not frames:
            continue
        kind = "Current thread" if thread.get("thread_name") == "MainThread" else "Thread"
        lines = [f"{kind} 0x{int(thread.get('thread_id') or 0):016x} (most recent call first):"]
        lines += [
            f'  File "{f.get("filename")}", line {f.get("line")} in {_plain(str(f.get("name")))}'
            for f in frames
            if isinstance(f, dict)
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _plain(name: str) -> str:
    """Return a function's name as a traceback has it: py-spy 0.4 gives qualified names (``Store.get.<locals>.wait``)."""
    return name.rpartition(".")[2]


@dataclass
class Unaided:
    """Looks repeatedly at the ranks of a job. ``pids``: by rank."""

    pids: Mapping[int, int]
    world_size: int
    finding: Finding | None = None
    problems: tuple[str, ...] = ()
    _still_since: dict[int, float] = field(default_factory=dict)
    _stacks: dict[int, str] = field(default_factory=dict)
    _shares: dict[int, float] = field(default_factory=dict)
    _began: dict[int, int] = field(init=False)  # when each process began: the kernel reuses pids

    def __post_init__(self) -> None:
        self._began = {pid: began(pid) for pid in self.pids.values()}

    @property
    def is_over(self) -> bool:
        """Whether no rank is left."""
        return not any(map(self._is_there, self.pids.values()))

    def _is_there(self, pid: int) -> bool:
        return self._began[pid] > 0 and began(pid) == self._began[pid]

    def _look_at(self, pid: int) -> tuple[ProcessState | None, str, str]:
        """Return a process's state, its stacks, and why there are no stacks."""
        return (look_at(pid), *python_stacks(pid)) if self._is_there(pid) else (None, "", "")

    def look(self) -> None:
        """Look twice, with `BETWEEN_LOOKS_S` seconds between."""
        before = {rank: self._look_at(pid) for rank, pid in self.pids.items()}
        began = time.monotonic()
        time.sleep(BETWEEN_LOOKS_S)
        after = {rank: self._look_at(pid) for rank, pid in self.pids.items()}
        elapsed = time.monotonic() - began
        self.problems = tuple(dict.fromkeys(why for *_, why in after.values() if why))
        facts: dict[int, dict[str, Any]] = {}
        for rank, (now, stacks, _) in after.items():
            then, earlier, _ = before[rank]
            if then is None or now is None:
                continue
            facts[rank] = difference(then, now, elapsed)
            self._shares[rank] = facts[rank]["cpu_share"]
            moves = stacks != earlier or facts[rank]["main_cpu_share"] >= 0.5
            if moves:
                self._still_since.pop(rank, None)
            else:
                self._still_since.setdefault(rank, began)
            self._stacks[rank] = stacks
        self.finding = self._diagnosed(facts)

    def _diagnosed(self, facts: Mapping[int, dict[str, Any]]) -> Finding | None:
        """Return the finding of the rules on ranks that did not move; None if all ranks move."""
        still = [rank for rank in facts if rank in self._still_since]
        if not still:
            return None
        with tempfile.TemporaryDirectory(prefix="pytest-nsa-watch-") as scratch:
            folder = Path(scratch)
            job = Job(nodeid="a job", folder=scratch, world_size=self.world_size, backend="")
            write_atomically(folder / "job.json", json.dumps(job.to_json()))
            for rank, state in facts.items():
                (folder / f"rank{rank}").mkdir()
                write_atomically(folder / f"rank{rank}" / "stacks.txt", self._stacks.get(rank, ""))
                note(folder / "host.jsonl", "process", rank=rank, **state)
            waited = time.monotonic() - min(self._still_since[rank] for rank in still)
            moved = [rank for rank in facts if rank not in still]
            note(
                folder / "host.jsonl", "stall", stalled_s=0.0 if moved else waited, waits_s=waited, moved=bool(moved),
                moved_ranks=moved,
            )  # fmt: skip
            is_own_job = all(is_ours(Path(f"/proc/{pid}")) for pid in self.pids.values())
            found = suspect(with_allowed_sources(load(folder), requested=False, is_own_job=is_own_job))
        found = found or self._in_different_calls()
        return found and replace(found, certain=False, confidence=round(LESS * found.confidence, 2))

    def _in_different_calls(self) -> Finding | None:
        """Find that stalled ranks wait in different collectives, by their stacks; those in the rarest call are the culprits."""
        calls: dict[str, list[int]] = {}
        for rank in self.pids:
            stack = self._main(rank)
            call = torch_wait(stack.frames) if stack is not None and rank in self._still_since else ""
            calls.setdefault(call, []).append(rank)
        if len(calls) < 2 or "" in calls:
            return None
        fewest = min(map(len, calls.values()))
        ranks = tuple(sorted(rank for members in calls.values() if len(members) == fewest for rank in members))
        waits = [f"{describe_ranks(tuple(members), self.world_size)} in {call}" for call, members in calls.items()]
        return Finding(
            cause="collective_mismatch",
            ranks=ranks,
            reason=f"of the ranks that wait, {', '.join(waits)}",
            where=self._where(ranks[0]),
            confidence=0.6,
        )

    def lines(self) -> list[str]:
        """Return one line per rank, the suspicion, if any, and what this view lacks."""
        found = []
        for rank, pid in self.pids.items():
            where = self._where(rank)
            since = self._still_since.get(rank)
            state = "moves" if since is None else f"still for {time.monotonic() - since:.0f} s"
            found.append(f"rank {rank}  pid {pid}  {state}  {100 * self._shares.get(rank, 0.0):.0f}% CPU  {where}")
        if self.finding is not None:
            f = self.finding
            at = f" at {f.where}" if f.where else ""
            found.append(
                f"suspicion ({f.confidence:.0%} sure): {f.cause} on {describe_ranks(f.ranks, self.world_size)}{at}: {f.reason}"
            )
            found.append(f"do: {f.advice or CAUSES[f.cause].advice}")
        view = "by /proc and py-spy alone; with NSA_TRACE_DIR=DIR the job leaves evidence of collectives and phases"
        return [visible(line) for line in ([*self.problems, view, *found] if self.problems else [*found, view])]

    def _main(self, rank: int) -> ThreadStack | None:
        return next((thread for thread in parse_dump(self._stacks.get(rank, "")) if thread.is_main), None)

    def _where(self, rank: int) -> str:
        """Return the user's line that a rank's main thread is in; without one, the innermost line."""
        stack = self._main(rank)
        frame = stack and (stack.user_frame or next(iter(stack.frames), None))
        return frame.describe() if frame else ""

    @property
    def seen(self) -> tuple[object, ...]:
        """What is printed when it changes: the suspicion, the problems, which ranks move, and the location of each."""
        places = tuple((rank, rank in self._still_since, self._where(rank)) for rank in self.pids)
        return (self.finding and self.finding.key, self.problems, places)


def watch_unaided(pid: int, *, once: bool) -> int:
    """Follow a job that leaves no evidence. Return 0 without a suspicion at the end, 1 with one, 2 if the process is no rank."""
    pids = ranks_of(pid)
    if not pids:
        return 2
    size = environment_of(pid).get("WORLD_SIZE", "")
    job = Unaided(pids, max(int(size) if size.isdecimal() else 1, max(pids) + 1))
    shown: tuple[object, ...] = ()
    try:
        while True:
            job.look()
            if job.seen != shown:
                shown = job.seen
                print("\n".join(job.lines()), flush=True)
            if once or job.is_over:
                break
            time.sleep(AGAIN_S)
    except KeyboardInterrupt:
        pass
    return int(job.finding is not None)
