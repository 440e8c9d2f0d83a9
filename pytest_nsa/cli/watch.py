"""``pytest-nsa watch``: follow a training that pytest did not start, by the boards that its ranks map. It signals no process."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_nsa.cli.nccl import NcclService
from pytest_nsa.cli.report import is_ours, with_allowed_sources
from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.verdict import Finding, Verdict, describe_ranks
from pytest_nsa.evidence.board import BoardSnapshot
from pytest_nsa.evidence.load import load
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.flow.read import FILE
from pytest_nsa.observe.conclude import make_verdict
from pytest_nsa.observe.launched import LaunchedJob
from pytest_nsa.observe.observer import Observer
from pytest_nsa.report.divergence import describe_causes, read_divergence
from pytest_nsa.report.plain import visible
from pytest_nsa.report.run import read_verdict
from pytest_nsa.report.terminal import number_ranks

Status = dict[str, Any]  # what `Watcher.to_json` returns


@dataclass
class VerdictCommand:
    """Runs a shell command once per verdict or suspicion, without waiting for it.

    It gets the verdict as JSON on its standard input, and NSA_CAUSE, NSA_RANKS (comma separated), NSA_RETRY and NSA_CERTAIN
    (1 or 0) in its environment.
    """

    command: str
    _reported: set[str] = field(default_factory=set)
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def give(self, statuses: Sequence[Status]) -> None:
        """Run the command for each new verdict."""
        for status in statuses:
            verdict = status["verdict"]
            if verdict is None:
                continue
            key = json.dumps([status["folder"], verdict["cause"], verdict["ranks"], verdict["certain"]])
            if key not in self._reported:
                self._reported.add(key)
                self._run({**verdict, "folder": status["folder"]})
        self._running = [run for run in self._running if run.poll() is None]

    def _run(self, verdict: dict[str, Any]) -> None:
        environment = {
            **os.environ, "NSA_CAUSE": verdict["cause"], "NSA_RANKS": ",".join(map(str, verdict["ranks"])),
            "NSA_RETRY": verdict["retry"], "NSA_CERTAIN": str(int(verdict["certain"])),
        }  # fmt: skip
        # In memory: a pipe would wait for a command that does not read it, and a disk may be full.
        with open(os.memfd_create("verdict"), "w+", encoding="utf-8") as given:
            given.write(json.dumps(verdict) + "\n")
            given.seek(0)
            run = subprocess.Popen(self.command, shell=True, env=environment, stdin=given, stdout=sys.stderr)
        self._running.append(run)

    def finish(self, seconds: float = 60.0) -> None:
        """Wait for the commands that still run, for ``seconds`` at most."""
        deadline = time.monotonic() + seconds
        for run in self._running:
            try:
                run.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"warning: --on-verdict {self.command!r}: still runs after {seconds:g} s", file=sys.stderr)


LOOK_S = 0.25
MANY = 8  # ranks: more are shown by state
ENOUGH_S = 4.5  # to find which ranks make progress, and to look twice at those that do not
QUIET_S = 10.0  # of ranks without boards, before a suspicion is announced; with --once and where logs state an end:
SHORT_S = 3.0


class Watcher:
    """Shows the ranks of ``folder`` that run on this machine.

    What it observes is written to ``host.jsonl`` there; for another user's folder, to a temporary folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recorded: Verdict | None = None  # that of a session which has ended
        self.shows_all = False  # suspicions that are not due to be announced, too
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._observer: Observer | None = None
        self._is_own: dict[int, bool] = {}  # by rank that was seen alive: whether its process is this user's
        self._printed: object = None  # the finding that `lines` returned last
        self._diverged: list[str] = []  # where its ranks parted

    @property
    def observer(self) -> Observer:
        """The observer of the ranks. Made once the folder exists: before, it has no owner."""
        if self._observer is None:
            if self.folder.exists() and not is_ours(self.folder):
                self._scratch = tempfile.TemporaryDirectory(prefix="pytest-nsa-watch-")
            notes = Path(self._scratch.name) if self._scratch is not None else self.folder
            found = Observer(self.folder, notes=notes, read=self._load)
            if not self.folder.exists():
                return found
            self._observer = found
        return self._observer

    @property
    def boards(self) -> dict[int, BoardSnapshot]:
        """The latest boards, by rank."""
        return self.observer.boards

    @property
    def finding(self) -> Finding | Verdict | None:
        """The verdict that the folder records, or the suspicion that is due to be announced, or any."""
        if self.recorded is not None:
            return self.recorded if self.recorded.failed else None
        return self.observer.finding if self.observer.is_due or self.shows_all else None

    @property
    def is_over(self) -> bool:
        """Whether every rank here has ended, well or not."""
        gone = self.observer.gone
        return self.recorded is not None or (
            bool(self.boards) and all(b.phase == "done" or r in gone for r, b in self.boards.items())
        )

    def look(self) -> bool:
        """Look once. Return whether the report has changed."""
        before = self.finding
        self.recorded = read_verdict(self.folder)
        if self.recorded is not None:
            self.observer.read_boards()
            return _key(before) != _key(self.finding)
        self.observer.look()
        for rank, board in self.boards.items():
            if board.phase != "done" and rank not in self.observer.gone:
                self._is_own.setdefault(rank, is_ours(Path(f"/proc/{board.pid}")))
        return _key(before) != _key(self.finding)

    def _load(self) -> Evidence:
        evidence = load(self.folder, *([Path(self._scratch.name)] if self._scratch is not None else []))
        is_own_job = bool(self._is_own) and all(self._is_own.values())
        return with_allowed_sources(evidence, requested=False, is_own_job=is_own_job)

    def lines(self, *, again: bool = True) -> list[str]:
        """Return one line per rank (for many ranks one per state, the rarest first), then the verdict, if any; a verdict that the
        last call returned only with ``again``.
        """
        shown = self._states() if len(self.boards) > MANY else self._ranks()
        found, key = self.finding, _key(self.finding)
        is_new, self._printed = key != self._printed, key
        if found is not None and (again or is_new):
            who = describe_ranks(
                found.ranks, int(max((b.numbers["world_size"] for b in self.boards.values()), default=1))
            )
            kind = "verdict" if found.certain or self.recorded else "suspicion"
            sure = "" if found.certain else f" ({found.confidence:.0%} sure)"
            at = f" at {found.where}" if found.where else ""
            shown.append(f"{kind}: {found.cause} on {who}{at}{sure}: {found.reason}")
            if advice := found.advice or (self.recorded is None and CAUSES[found.cause].advice):
                shown.append(f"do: {advice}")
            if is_new:
                self._diverged = self._describe_divergence()
            shown += self._diverged
        unread = self.observer.unread
        return [visible(line) for line in ([*shown, f"not read: {unread}"] if unread else shown)]

    def _describe_divergence(self) -> list[str]:
        """Return where the ranks parted, and by which values, if their control flow is recorded (NSA_TRACE_FLOW=1)."""
        if not any(self.folder.glob(f"rank*/{FILE}")):
            return []
        verdict = make_verdict(self._load(), again=True)
        found = read_divergence(verdict)
        if found is None:
            return []
        sides = "; ".join(
            f"{text} on {describe_ranks(ranks, verdict.world_size)}" for text, ranks in found.outcomes.items()
        )
        causes = (line.strip() for line in describe_causes(verdict))
        return [f"diverged at {found.where}: `{found.statement}`; {sides}", *causes]

    def close(self) -> None:
        """Remove the folder of what was observed of another user's job."""
        if self._scratch is not None:
            self._scratch.cleanup()

    def _states(self) -> list[str]:
        """Return one line per state (step, phase, location or collective): its ranks, and how long the first has not moved."""
        ranks: dict[str, list[int]] = {}
        for rank, board in self.boards.items():
            ranks.setdefault(self._state(rank, board), []).append(rank)
        rarest_first = sorted(ranks.items(), key=lambda entry: len(entry[1]))
        return [f"{len(of):>5}  {number_ranks(of)}: {state}{self._still(of)}" for state, of in rarest_first]

    def _ranks(self) -> list[str]:
        """Return one line per rank: its state with the gradients that have arrived, and how long it has not moved."""
        found = []
        for rank, board in self.boards.items():
            n, arrived = board.numbers, ""
            if board.phase == "backward":
                arrived = f"  {n['gradients']:.0f}/{n['gradients_expected']:.0f} gradients"
            found.append(f"rank {rank}  {self._state(rank, board, arrived)}{self._still([rank])}")
        return found

    def _state(self, rank: int, board: BoardSnapshot, arrived: str = "") -> str:
        phase = "has gone" if rank in self.observer.gone else board.phase
        text = f"step {board.numbers['step']:.0f}  {phase}{arrived}"
        if board.inside:
            return f"{text}  in {board.inside[-1].describe()}"
        return f"{text}  at {board.line}" if board.line else text

    def _still(self, ranks: list[int]) -> str:
        """Return how long the first of the ranks has not moved; '' if that is no time, or if they are done."""
        waiting = [rank for rank in ranks if self.boards[rank].phase != "done"]
        seconds = max(map(self.observer.watch.measure_stall, waiting), default=0.0)
        return f"  still for {seconds:.0f} s" if seconds >= 2 else ""

    def to_json(self) -> dict[str, Any]:
        """Return the state of the ranks, and the verdict, for programs."""
        ranks = [
            {
                "rank": rank, "pid": b.pid, "step": int(b.numbers["step"]), "phase": b.phase, "line": b.line,
                "module": b.module, "gradients": int(b.numbers["gradients"]), "gone": rank in self.observer.gone,
                "inside": b.inside[-1].describe() if b.inside else "",
                "still_s": round(self.observer.watch.measure_stall(rank), 2),
            }
            for rank, b in self.boards.items()
        ]  # fmt: skip
        f = self.finding
        verdict = None if f is None else {
            "cause": f.cause, "ranks": f.ranks, "where": f.where, "module": f.module, "reason": f.reason, "certain": f.certain,
            "confidence": f.confidence, "retry": f.retry if isinstance(f, Verdict) else CAUSES[f.cause].retry,
        }  # fmt: skip
        return {"time": time.time(), "folder": str(self.folder), "ranks": ranks, "verdict": verdict}


class LaunchedWatcher(Watcher):
    """Shows the ranks (rank -> pid) of a job that was started without our tracer, by what it leaves elsewhere."""

    def __init__(self, ranks: Mapping[int, int], launcher: int) -> None:
        super().__init__(Path(f"/proc/{launcher}"))
        self._scratch = tempfile.TemporaryDirectory(prefix="pytest-nsa-watch-")
        files = Path(self._scratch.name, "files")
        files.mkdir()
        self.job = LaunchedJob(ranks, launcher, files)
        self._observer = Observer(files, notes=files.parent, job=self.job)
        self._is_over = False
        self._last: Finding | None = None  # what the logs of a job that has ended show
        self._described: list[str] = []

    @property
    def finding(self) -> Finding | None:
        """The suspicion that is due to be announced, or any after a short stall; of a job that has ended, what its logs show."""
        if self._last is not None:
            return self._last
        is_short = self.shows_all or self.job.has_stated_its_end()
        is_due = self.observer.is_due or self.shows_all
        has_lasted = self.observer.watch.stalled_s >= (SHORT_S if is_short else QUIET_S)
        return self.observer.finding if is_due and has_lasted else None

    @property
    def is_over(self) -> bool:
        """Whether all ranks and their launcher have ended."""
        return self._is_over

    def look(self) -> bool:
        """Look once. Return whether the report has changed."""
        before, was_over = self.finding, self._is_over
        self.job.look()
        self.job.stalled_s = self.observer.watch.stalled_s
        self._is_over = self.job.has_ended()  # before the boards are read: the last ones show the end
        self.observer.look()
        if self._is_over and not was_over:
            evidence = self.job.read_again()
            self._last = self.job.suspect(evidence) if self.job.has_stated_its_end() else before
        return _key(before) != _key(self.finding)

    def lines(self, *, again: bool = True) -> list[str]:
        """Return what `Watcher.lines` does, then the kinds of evidence that were read, and what is missing."""
        shown, described = super().lines(again=again), self.job.describe()
        is_new, self._described = described != self._described, described
        return [*shown, *map(visible, described if again or is_new else [])]

    def close(self) -> None:
        """Close the logs of the job."""
        self.job.close()
        super().close()

    def _state(self, rank: int, board: BoardSnapshot, arrived: str = "") -> str:
        pid = f"pid {board.pid}  " if len(self.boards) <= MANY else ""  # ranks of one state are one line
        return f"{pid}{board.phase}" + (f"  at {board.line}" if board.line else "")


def _key(found: Finding | Verdict | None) -> object:
    return found and (found.cause, found.ranks, found.where)


def watch(watchers: Sequence[Watcher], *, as_json: bool, once: bool, command: VerdictCommand | None) -> int:
    """Follow until every rank has ended, or Ctrl-C. Return 0 without a verdict at the end, 1 with one, 2 without a rank.

    ``command`` is run once per verdict.
    """
    nccl = NcclService()
    shown, last, began = 0, 0.0, time.monotonic()
    try:
        while True:
            changed = [w.look() for w in watchers]
            known = nccl.lines
            nccl.look()
            changed.append(nccl.lines != known)
            if command is not None and any(changed):
                command.give([w.to_json() for w in watchers])
            is_over = all(w.is_over for w in watchers)
            due = any(changed) or is_over or time.monotonic() - last >= (1.0 if sys.stdout.isatty() else 5.0)
            has_seen = is_over or any(w.boards for w in watchers)
            settled = time.monotonic() - began >= ENOUGH_S or any(w.finding is not None for w in watchers)
            for watcher in watchers:
                watcher.shows_all = once and settled
            if has_seen and due and (not once or settled or is_over):
                last = time.monotonic()
                shown = _show(watchers, as_json, shown, nccl.lines)
                if once or is_over:
                    break
            if once and not has_seen and settled:
                folders = ", ".join(str(w.folder) for w in watchers)
                print(visible(f"error: no rank has left a board in {folders}"), file=sys.stderr)
                return 2
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        pass
    finally:
        nccl.close()
        for watcher in watchers:
            watcher.close()
    if command is not None:
        command.finish()
    return int(any(w.finding is not None for w in watchers))


def _show(watchers: Sequence[Watcher], as_json: bool, shown: int, more: list[str]) -> int:
    """Print the state; on a terminal over the ``shown`` lines printed before. Return how many lines can be overwritten."""
    if as_json:
        for watcher in watchers:
            print(json.dumps({**watcher.to_json(), "nccl": more}), flush=True)
        return 0
    lines = [*(line for watcher in watchers for line in watcher.lines(again=sys.stdout.isatty())), *more]
    if sys.stdout.isatty() and shown:
        sys.stdout.write(f"\x1b[{shown}A\x1b[J")
    print("\n".join(lines), flush=True)
    return len(lines)
