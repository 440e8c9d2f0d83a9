"""Under an outer launcher (torchrun, SLURM) each pytest process hosts one rank of every test, and rank 0's process leads.

All processes run the same tests in the same order. The leader watches all boards, decides, diagnoses and reports; the
others send it what their rank leaves, and take over its verdict. They meet in the launcher's TCPStore; what they exchange is
JSON and the bytes of evidence files.
"""

import base64
import contextlib
import json
import os
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.observe.host_log import note
from pytest_nsa.observe.supervise import RanksRun
from pytest_nsa.session.phases import Phases
from pytest_nsa.session.runner import Group
from pytest_nsa.settings import OuterLauncher
from pytest_nsa.system.clock import monotonic
from pytest_nsa.wire.files import append_line, read_lines, write_atomically
from pytest_nsa.wire.messages import Job
from pytest_nsa.wire.protocols import LaunchError, Limits, Monitor, Starter

NOTICE_S = 5.0
MEET_S = 600.0  # for all processes to collect their tests


class OuterStore:
    """Named values that the processes of a run exchange: JSON through torchrun's store.

    The one place where a pytest process imports torch: that store is torch's TCPStore, and its protocol is torch's own. Under an
    outer launcher ranks are forked from this process, which has to import torch anyway.
    """

    def __init__(self, outer: OuterLauncher) -> None:
        import torch.distributed as dist

        store = dist.TCPStore(
            outer.address,
            outer.port,
            is_master=outer.rank == 0 and not outer.serves_store,
            wait_for_workers=False,
            multi_tenant=True,  # a test that forms a group by env:// serves the same port of this process
            timeout=timedelta(seconds=MEET_S),
        )
        self._store = dist.PrefixStore("pytest-nsa", store)

    def put(self, key: str, value: Any) -> None:
        """Publish a value: anything that JSON can hold."""
        self._store.set(key, zlib.compress(json.dumps(value).encode()))

    def look(self, key: str) -> Any:
        """Return the value of a key; None until it is set."""
        return json.loads(zlib.decompress(self._store.get(key))) if self._store.check([key]) else None

    def wait(self, key: str, seconds: float, *, or_key: str = "", awaited: str = "") -> Any:
        """Wait for the value of ``key``, or of ``or_key`` if that comes first. Raises TimeoutError.

        After `NOTICE_S` a line on standard error has what is ``awaited``, if that is given.
        """
        began = monotonic()
        deadline = began + seconds
        while True:
            for name in (key, or_key):
                value = self.look(name) if name else None
                if value is not None:
                    return value
            if awaited and monotonic() - began >= NOTICE_S:
                print(f"nsa: waits for {awaited} (up to {seconds:.0f} s)", file=sys.__stderr__, flush=True)
                awaited = ""
            if monotonic() >= deadline:
                raise TimeoutError(f"nothing was received for {key!r} for {seconds:.0f} s")
            time.sleep(0.01)


PUSH_S = 0.25  # between two boards that a follower sends
START_S = 120.0
SILENT_S = 10.0  # after which a process that sends nothing is taken for dead
EVIDENCE_S = 15.0
BYE_S = 5.0
MAX_FILE = 4 << 20
NEVER_S = 1e9
_SHARED = ("passed", "xfailed", "skipped", "pytest_exit")  # of each rank's evidence
_FILES = ("events.jsonl", "reports.jsonl", "output.log", "traces.log", "stacks.txt", "fatal.txt", "board.bin")


class Attachment(Group):
    """This process's part in a run under an outer launcher. It is alone until it meets the others."""

    is_alone = False

    def __init__(self, outer: OuterLauncher) -> None:
        super().__init__()
        self.outer = outer
        self._store: OuterStore | None = None
        self._count = 0
        self.lost: dict[int, str] = {}  # the other processes that host no rank any more, and why

    @property
    def leads(self) -> bool:
        """Whether this process decides and reports."""
        return self.outer.rank == 0

    @property
    def wire(self) -> OuterStore:
        """The store in which the processes meet."""
        self._store = self._store or OuterStore(self.outer)
        return self._store

    def ranks_here(self, world_size: int) -> Sequence[int]:
        """Return the one rank of a test that this process starts."""
        return (self.outer.rank,)

    def meet(self, nodeids: list[str]) -> None:
        """Meet the others. Check that all have collected the same tests on ranks; raises UsageError with the difference."""
        self.wire.put(f"items/{self.outer.rank}", nodeids)
        if self.leads:
            problems = [self._difference(rank, nodeids) for rank in range(1, self.outer.world_size)]
            self.wire.put("agreed", [problem for problem in problems if problem])
        problems = self.wire.wait("agreed", MEET_S, awaited="the other processes to collect their tests")
        if problems:
            raise pytest.UsageError("\n".join(problems))

    def _difference(self, rank: int, ours: list[str]) -> str:
        try:
            theirs = self.wire.wait(f"items/{rank}", MEET_S, awaited=f"rank {rank}'s process to collect its tests")
        except TimeoutError:
            return f"rank {rank}'s process has not collected its tests within {MEET_S:.0f} s"
        if theirs == ours:
            return ""
        missing = [name for name in ours if name not in theirs]
        more = [name for name in theirs if name not in ours]
        what = [f"it lacks {', '.join(missing[:5])}"] if missing else []
        what += [f"it has {', '.join(more[:5])} too"] if more else []
        order = "the same in another order (pytest-randomly: give --randomly-seed=N)"
        return (
            f"rank {rank}'s process collected other tests on ranks than rank 0's: "
            f"{' and '.join(what) or order}; give all the same checkout and arguments"
        )

    def local(self, job: Job) -> Job:
        """Return ``job`` as this process runs it: its own rank alone, in a group that all processes' ranks join."""
        self._count += 1
        return replace(
            job,
            only=self.outer.rank,
            rendezvous=f"{self.outer.address}:{self.outer.port}/pytest-nsa-group-{self._count}",
            reuse="",
            stay=False,
        )

    def run(self, run: RanksRun) -> None:
        """Run this process's rank of a job, as leader or follower. Nothing is announced, and no hook adds facts."""
        job, run = run.job, replace(run, announce=None, more=None)
        key = str(self._count)
        if self.leads:
            for rank in range(1, self.outer.world_size):
                if left := why_left(self.wire, rank):
                    self.lost.setdefault(rank, left)
            if self.lost:
                raise LaunchError("; ".join(f"rank {rank}'s process {why}" for rank, why in self.lost.items()))
            self.wire.put(f"{key}/go", {"nodeid": job.nodeid, "seed": job.seed})
            leading = LeaderLauncher(run.launcher, self.wire, key, job, self.lost)
            replace(run, launcher=leading).run()
            leading.gather()
            return
        go = self.wire.wait(f"{key}/go", MEET_S, or_key="end")
        if "refused" in go:
            raise LaunchError(f"rank 0's process could not start its rank: {go['refused']}")
        if "exit_status" in go:
            pytest.exit(f"rank 0 has ended its session ({go['exit_status']})", returncode=go["exit_status"])
        if go["nodeid"] != job.nodeid:
            pytest.exit(f"rank {self.outer.rank} is at {job.nodeid}, rank 0 at {go['nodeid']}", returncode=4)
        job = replace(job, seed=go["seed"])
        follower = Follower(self.wire, key, job, self.outer.rank)
        follower.poll()  # the leader's limit for silent processes counts from here
        endless = Limits(start=NEVER_S, run=NEVER_S, hang_after=0, after_failure=NEVER_S)
        try:
            replace(run, job=job, limits=endless, monitors=(follower,), ranks=(self.outer.rank,)).run()
        finally:
            follower.send_everything()

    def refuse(self, reason: str) -> None:
        """Inform the followers that the leader could not start its rank, so that they do not wait for it."""
        if self.leads:
            self.wire.put(f"{self._count}/go", {"refused": reason})
            self.wire.put(f"{self._count}/stop", True)

    def agree(self, verdict: Verdict, evidence: Evidence, found: Phases) -> tuple[Verdict, Evidence, Phases]:
        """Return what the leader concluded in every process, so that all continue, or stop, alike."""
        conclusion = None
        if self.leads:
            facts = [{name: getattr(rank, name) for name in _SHARED} for rank in evidence.ranks]
            conclusion = {"verdict": verdict.to_json(), "ranks": facts, "phases": found.to_json()}
        agreed = self.share(conclusion)
        ranks = [replace(rank, **known) for rank, known in zip(evidence.ranks, agreed["ranks"], strict=True)]
        evidence = replace(evidence, ranks=tuple(ranks))
        return Verdict.from_json(agreed["verdict"]), evidence, Phases.from_json(agreed["phases"], evidence)

    def share(self, conclusion: dict[str, Any] | None) -> dict[str, Any]:
        """Exchange the leader's conclusion on a test: the leader sends it, the others receive it."""
        key = f"{self._count}/verdict"
        if conclusion is not None:
            self.wire.put(key, conclusion)
            return conclusion
        received = self.wire.wait(key, MEET_S, or_key="end")
        if "exit_status" in received:
            pytest.exit("rank 0 has ended its session", returncode=received["exit_status"])
        return received

    def close(self) -> None:
        """Wait until the leader ends the session: torchrun ends every process once one has failed, and the leader has to report.

        The leader exits last, as its process may keep the store. No-op for a process that has met no other.
        """
        if self._store is None:
            return
        if not self.leads:
            with contextlib.suppress(Exception):  # the leader, or the store, may have exited
                self.wire.put(f"left/{self.outer.rank}", self.exit_status)
                self.wire.wait("end", MEET_S)
                self.wire.put(f"bye/{self.outer.rank}", True)
            return
        self.wire.put("end", {"exit_status": self.exit_status})
        deadline = monotonic() + BYE_S
        for rank in set(range(1, self.outer.world_size)) - set(self.lost):
            with contextlib.suppress(TimeoutError):
                self.wire.wait(f"bye/{rank}", max(0.0, deadline - monotonic()))


def why_left(wire: OuterStore, rank: int) -> str:
    """Return that a process has ended its session, with its exit status; '' while it has not."""
    status = wire.look(f"left/{rank}")
    return "" if status is None else f"has ended its session with {status}"


class LeaderLauncher(Starter):
    """The launcher of the leader: starts its own rank, and learns of the others through the store."""

    def __init__(self, inner: Starter, wire: OuterStore, key: str, job: Job, lost: dict[int, str]) -> None:
        self.inner, self.wire, self.key, self.job, self.lost_processes = inner, wire, key, job, lost
        self.others = [rank for rank in range(job.world_size) if rank != job.only]
        self.lost: set[int] = set()
        self._gone: set[int] = set()
        self._beats: dict[int, tuple[Any, float]] = {}

    def start(self, job: Job) -> list[int]:
        for rank in self.others:
            job.rank_folder(rank).mkdir(exist_ok=True)
            self._beats[rank] = (None, monotonic())
        own = self.inner.start(job)[0]
        return [own if rank == job.only else 0 for rank in range(job.world_size)]

    def exits(self, timeout: float) -> dict[int, int]:
        found = dict(self.inner.exits(timeout))
        for rank in self.others:
            if rank in self._gone:
                continue
            status = self.wire.look(f"{self.key}/exit/{rank}")
            if status is None and self._is_silent(rank):
                note(Path(self.job.folder) / "host.jsonl", "silent", rank=rank, seconds=SILENT_S)
                self.lost.add(rank)
                self.lost_processes[rank] = why_left(self.wire, rank) or f"was lost in {self.job.nodeid}"
                status = 9
            if status is not None:
                self._gone.add(rank)
                found[rank] = status
        return found

    def _is_silent(self, rank: int) -> bool:
        """Write the board that the rank's process sent last; return whether it has sent nothing for too long."""
        look = self.wire.look(f"{self.key}/look/{rank}")
        count, since = self._beats[rank]
        if look is not None and look["count"] != count:
            self._beats[rank] = (look["count"], monotonic())
            if look["board"]:
                write_atomically(self.job.rank_folder(rank) / "board.bin", base64.b64decode(look["board"]))
            return False
        if count is None and why_left(self.wire, rank):
            return True
        limit = SILENT_S if count is not None else START_S  # it may have to import torch, or to make a host fixture
        return monotonic() - since > limit

    def signal(self, rank: int, number: int) -> None:
        if rank == self.job.only:
            self.inner.signal(rank, number)
        else:
            self.wire.put(f"{self.key}/stop", True)  # the rank's host dumps its stacks, then ends it

    def kill(self) -> None:
        self.wire.put(f"{self.key}/stop", True)
        self.inner.kill()

    def gather(self) -> None:
        """Write the evidence of the other ranks into the test's folder, once all have ended."""
        deadline = monotonic() + EVIDENCE_S
        for rank in self.others:
            try:
                sent = self.wire.wait(f"{self.key}/evidence/{rank}", max(0.0, deadline - monotonic()))
            except TimeoutError:
                continue
            folder = self.job.rank_folder(rank)
            for name, data in sent["files"].items():
                if name in _FILES:
                    write_atomically(folder / name, base64.b64decode(data))
            for fact in sent["process"]:
                append_line(Path(self.job.folder) / "host.jsonl", fact)


@dataclass
class Follower(Monitor):
    """Sends the board of this process's rank to the leader, and receives its request to stop."""

    wire: OuterStore
    key: str
    job: Job
    rank: int
    stop_reason: str = ""
    _count: int = 0
    _last: float = 0.0

    def poll(self) -> float:
        """Send the board every `PUSH_S` seconds, and query whether to stop."""
        now = monotonic()
        if now - self._last >= PUSH_S:
            self._last = now
            self._count += 1
            board = _encoded(self.job.rank_folder(self.rank) / "board.bin")
            self.wire.put(f"{self.key}/look/{self.rank}", {"count": self._count, "board": board})
            if self.wire.look(f"{self.key}/stop"):
                self.stop_reason = "leader"
        return 0.0

    def send_everything(self) -> None:
        """Send the exit status, then every file of evidence."""
        host = list(read_lines(Path(self.job.folder) / "host.jsonl"))
        ended = next((e for e in host if e["event"] == "exit"), {"code": 1, "signal": 0})
        folder = self.job.rank_folder(self.rank)
        files = {name: _encoded(folder / name) for name in _FILES if (folder / name).is_file()}
        process = [e for e in host if e["event"] == "process"]
        self.wire.put(f"{self.key}/exit/{self.rank}", ended["signal"] or ended["code"] << 8)
        self.wire.put(f"{self.key}/evidence/{self.rank}", {"files": files, "process": process})


def _encoded(path: Path) -> str:
    """Return a file's last `MAX_FILE` bytes in base64; '' if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_FILE))
            return base64.b64encode(file.read()).decode()
    except OSError:
        return ""
