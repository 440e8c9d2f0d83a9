"""What NCCL reports of a job's communicators by its own service (RAS, NCCL 2.28 and newer): counts of calls per rank, lost ranks.

`ncclras -f json` queries one rank and returns the state of the whole job, other nodes included. It knows no lines of the program.
It shows, in addition to the boards, which rank of a communicator is behind, and which rank does not answer.
"""

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import number_ranks
from pytest_nsa.wire.files import parse

AGAIN_S = 5.0
MOST = 16 << 20  # bytes of an answer
# If ranks are missing, 2.28.9 omits a comma between a value and the name on the next line.
_NO_COMMA = re.compile(r'(["\d\]}el])(\s*\n\s*"[^"\n]*"\s*:)')


def read_answer(text: str) -> dict[str, Any] | None:
    """Return the answer as an object; None if it is no object. Inserts the comma that 2.28.9 omits."""
    found = parse(text)
    if found is None:
        found = parse(_NO_COMMA.sub(r"\1,\2", text))
    return found if isinstance(found, dict) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Communicator:
    """A communicator's ranks: calls by rank and operation, where each rank runs, and why a rank is missing."""

    name: str
    counts: dict[int, dict[str, int]]
    places: dict[int, str]
    missing: dict[int, str]

    def behind(self) -> Iterator[tuple[str, int, list[int]]]:
        """Yield (operation, by how many calls, ranks) of the ranks that made fewer calls than another rank."""
        operations = sorted({op for counts in self.counts.values() for op in counts})
        for operation in operations:
            made = {rank: counts.get(operation, 0) for rank, counts in self.counts.items()}
            for count in sorted(set(made.values()))[:-1]:
                yield operation, max(made.values()) - count, [rank for rank, n in sorted(made.items()) if n == count]


def communicators(answer: dict[str, Any]) -> list[Communicator]:
    """Return the communicators of an answer. Entries in another form than that of NCCL 2.28 to 2.30 are skipped."""
    found = []
    for entry in _objects(answer.get("communicators")):
        ranks = [r for r in _objects(entry.get("ranks")) if isinstance(r.get("rank"), int)]
        lost = [r for r in _objects(entry.get("missing_ranks")) if isinstance(r.get("rank"), int)]
        found.append(Communicator(
            name=str(entry.get("hash", "?")),
            counts={r["rank"]: _numbers(r.get("collective_counts")) for r in ranks},
            places={r["rank"]: _place(r) for r in (*ranks, *lost)},
            missing={r["rank"]: _why_missing(r.get("status")) for r in lost},
        ))  # fmt: skip
    return found


def _objects(value: Any) -> list[dict[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def _numbers(value: Any) -> dict[str, int]:
    return {str(k): v for k, v in value.items() if isinstance(v, int)} if isinstance(value, dict) else {}


def _place(rank: dict[str, Any]) -> str:
    known = [str(rank["host"])] if "host" in rank else []
    known += [f"GPU {rank['cuda_dev']}"] if "cuda_dev" in rank else []
    known += [f"pid {rank['pid']}"] if "pid" in rank else []
    return ", ".join(known)


def _why_missing(status: Any) -> str:
    if not isinstance(status, dict):
        return "is missing"
    return "is dead" if status.get("considered_dead") is True else "does not answer"


def describe(before: list[Communicator], now: list[Communicator]) -> list[str]:
    """Return a line per fact of two answers: ranks that are behind and have made no call since, and ranks that are missing."""
    earlier = {c.name: c for c in before}
    lines = []
    for communicator in now:
        total = len(communicator.counts) + len(communicator.missing)
        name = f"NCCL: communicator {communicator.name} of {total} ranks"
        for rank, why in sorted(communicator.missing.items()):
            place = communicator.places.get(rank, "")
            lines.append(f"{name}: rank {rank}{f' ({place})' if place else ''} {why}")
        then = earlier.get(communicator.name)
        if then is None or then.counts != communicator.counts:
            continue  # it moves
        for operation, calls, ranks in communicator.behind():
            place = communicator.places.get(ranks[0], "") if len(ranks) == 1 else ""
            verb = "is" if len(ranks) == 1 else "are"
            who = number_ranks(ranks) + (f" ({place})" if place else "")
            lines.append(f"{name}: {who} {verb} {calls} {operation} behind, and nothing moves")
    return [visible(line) for line in lines]


@dataclass
class NcclService:
    """Runs `ncclras` every few seconds, without waiting for it. No-op if it is not installed."""

    lines: list[str] = field(default_factory=list)
    _program: str | None = field(default_factory=lambda: shutil.which("ncclras"))
    _process: subprocess.Popen[bytes] | None = None
    _answer: IO[bytes] = field(default_factory=tempfile.TemporaryFile)  # an answer on thousands of ranks fills a pipe
    _queried_at: float = 0.0
    _before: list[Communicator] = field(default_factory=list)

    def look(self) -> None:
        """Read an answer that has arrived; query again when it is time."""
        if self._program is None:
            return
        if self._process is not None and self._process.poll() is not None:
            self._take(self._process.returncode)
            self._process = None
        if self._process is None and time.monotonic() - self._queried_at >= AGAIN_S:
            self._queried_at = time.monotonic()
            self._answer.seek(0)
            self._answer.truncate()
            try:
                self._process = subprocess.Popen(
                    [self._program, "-f", "json", "-t", "4"], stdin=subprocess.DEVNULL, stdout=self._answer,
                    stderr=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError:
                self._program = None

    def _take(self, code: int) -> None:
        self._answer.seek(0)
        answer = read_answer(self._answer.read(MOST).decode(errors="replace")) if code == 0 else None
        now = communicators(answer) if answer is not None else []
        self.lines, self._before = describe(self._before, now), now

    def close(self) -> None:
        """End a query that has no answer yet."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._answer.close()
