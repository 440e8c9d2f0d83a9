"""``pytest-nsa watch``: follow a training that pytest did not start, by the boards that its ranks map. It signals no process."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pytest_nsa.cli.foreign_folders import is_ours, with_allowed_sources
from pytest_nsa.cli.nccl import NcclService
from pytest_nsa.cli.outputs import VerdictCommand
from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.engine import suspect
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.board import BoardSnapshot
from pytest_nsa.evidence.load import load
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.observe.announce_delay import WAITED_FOR_S, AnnounceDelay
from pytest_nsa.observe.announcements import announcement, stalled_for
from pytest_nsa.observe.host_log import note
from pytest_nsa.observe.progress import GRACE_S, ProgressWatch
from pytest_nsa.observe.second_look import await_counters
from pytest_nsa.observe.stall import StallClock
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import number_ranks
from pytest_nsa.system.procfs import text_of

LOOK_S = 0.25
MANY = 8  # ranks: more are shown by state
ENOUGH_S = 4.5  # to find which ranks make progress, and to look twice at those that do not
_BOARD = re.compile(r"(/\S.*)/rank(\d+)/board\.bin$")


def folder_of(pid: int, rank: int | None = None) -> Path | None:
    """Return the folder of the board of a rank (None: of any) that a process has mapped; None if it maps no board, or is another
    user's.
    """
    lines = text_of(Path(f"/proc/{pid}/maps")).splitlines()
    found = (match for line in lines if (match := _BOARD.search(line)))
    return next((Path(match[1]) for match in found if rank is None or int(match[2]) == rank), None)


@dataclass
class Watcher:
    """Looks at the ranks of ``folder`` that run on this machine.

    It records what it observes in ``host.jsonl`` there; for another user's folder, in a temporary folder.
    """

    folder: Path
    watch: ProgressWatch = field(init=False, default_factory=ProgressWatch)
    finding: Finding | None = None
    unread: str = ""  # why the folder's evidence cannot be read
    _stall: StallClock = field(default_factory=StallClock)
    _gone: set[int] = field(default_factory=set)
    _delay: AnnounceDelay = field(default_factory=AnnounceDelay)
    _has_counters: bool = False  # the ranks were asked for the counters of their loops in this stall
    _printed: object = None  # the finding that `lines` returned last
    # By rank that was seen alive: whether its process is this user's.
    _is_own: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watch.add_from(self.folder)

    @cached_property
    def _scratch(self) -> tempfile.TemporaryDirectory[str] | None:
        """The temporary folder, None for this user's folder. Evaluated once a rank exists: before, the folder may not exist."""
        return None if is_ours(self.folder) else tempfile.TemporaryDirectory(prefix="pytest-nsa-watch-")

    @cached_property
    def log(self) -> Path:
        """The file with what was observed."""
        return (Path(self._scratch.name) if self._scratch is not None else self.folder) / "host.jsonl"

    @property
    def boards(self) -> dict[int, BoardSnapshot]:
        """The latest boards, by rank."""
        return dict(sorted(self.watch.boards.items()))

    @property
    def is_over(self) -> bool:
        """Whether every rank here has ended, well or not."""
        return bool(self.boards) and all(b.phase == "done" or r in self._gone for r, b in self.boards.items())

    def look(self) -> bool:
        """Look once. Return whether the report has changed."""
        self.watch.add_from(self.folder)
        self.watch.look()
        before = self.finding
        for rank, board in self.boards.items():
            if board.phase == "done" or rank in self._gone:
                continue
            if self._is_alive(rank, board):
                self._is_own.setdefault(rank, is_ours(Path(f"/proc/{board.pid}")))
            elif not self._is_done(rank):
                self._gone.add(rank)
                with contextlib.suppress(OSError):  # a folder that can only be read
                    note(self.log, "gone", rank=rank)
                self.finding, _ = self._suspect()
        waited = self.watch.longest_wait
        if waited < GRACE_S and not self._gone:
            self._stall.reset()
            self.finding, self._has_counters = None, False
        elif self._stall.look(self._alive(), waited):
            with contextlib.suppress(OSError):
                self._note(waited)
            found, evidence = self._suspect()
            if evidence is not None and found is not None and not self._gone:
                is_due = self._delay.is_due(found, evidence, self.watch.past, stalled_for(found, self.watch))
                found = found if is_due else None
            self.finding = found
        return (before and before.key) != (self.finding and self.finding.key)

    def _suspect(self) -> tuple[Finding | None, Evidence | None]:
        """Return what the rules find, and the evidence that it rests on: where no rank can go on, with the loops' counters."""
        evidence = self._load()
        found = None if evidence is None else suspect(evidence)
        if (
            evidence is None
            or found is None
            or not found.ends_the_test
            or self._has_counters
            or self._scratch is not None
        ):
            return found, evidence
        self._has_counters = True
        await_counters(self.folder / f"rank{rank}" for rank in self._alive())
        evidence = self._load()
        return None if evidence is None else suspect(evidence), evidence

    def _load(self) -> Evidence | None:
        """Return the folder's evidence; None if it cannot be read, with the reason in `unread`."""
        try:
            evidence = load(self.folder, *([self.log.parent] if self._scratch is not None else []))
            is_own_job = bool(self._is_own) and all(self._is_own.values())
            evidence = with_allowed_sources(evidence, requested=False, is_own_job=is_own_job)
        except (OSError, ValueError) as error:
            self.unread = str(error)
            return None
        self.unread = ""
        return evidence

    def _alive(self) -> dict[int, int]:
        return {r: b.pid for r, b in self.boards.items() if b.phase != "done" and r not in self._gone}

    def _is_alive(self, rank: int, board: BoardSnapshot) -> bool:
        """Return whether the process that made the board lives and still maps it: its pid may be reused."""
        mapped = folder_of(board.pid, rank)
        with contextlib.suppress(OSError):  # a file that has gone
            return mapped is not None and (mapped / f"rank{rank}").samefile(self.folder / f"rank{rank}")
        return False

    def _is_done(self, rank: int) -> bool:
        """Return whether a rank that is no longer alive had ended well: it may have done so since the last look."""
        board = self.watch.readers[rank].read()
        return board is not None and board.phase == "done"

    def _note(self, waited: float) -> None:
        for rank, facts in self._stall.facts.items():
            note(self.log, "process", rank=rank, **facts)
        note(self.log, "stall", **self.watch.stall_facts(waited))

    def announcement(self, test: str) -> str:
        """Return the line on a suspicion in a job of a test; '' without one, or if no rank has waited for `WAITED_FOR_S`."""
        found, waited = self.finding, self.watch.longest_wait
        if found is None or waited < WAITED_FOR_S:
            return ""
        who = describe_ranks(found.ranks, self._world_size)
        seconds, what = stalled_for(found, self.watch), "a suspicion; the test's own time limit ends it"
        return visible(announcement(found, test, who, seconds, what, at_work=self._delay.at_work))

    @property
    def _world_size(self) -> int:
        return int(max(b.numbers["world_size"] for b in self.boards.values()))

    def lines(self, *, again: bool = True) -> list[str]:
        """Return one line per rank (for many ranks one per state, the rarest first), then the verdict, if any; a verdict that the
        last call returned only with ``again``.
        """
        found = self._states() if len(self.watch.boards) > MANY else self._ranks()
        key = self.finding and self.finding.key
        is_new, self._printed = key != self._printed, key
        if self.finding is not None and (again or is_new):
            f = self.finding
            who = describe_ranks(f.ranks, self._world_size)
            kind = "verdict" if f.certain else "suspicion"
            found.append(f"{kind}: {f.cause} on {who}" + (f" at {f.where}" if f.where else "") + f": {f.reason}")
            found.append(f"do: {f.advice or CAUSES[f.cause].advice}")
        return [visible(line) for line in ([*found, f"not read: {self.unread}"] if self.unread else found)]

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
        phase = "has gone" if rank in self._gone else board.phase
        text = f"step {board.numbers['step']:.0f}  {phase}{arrived}"
        if board.inside:
            return f"{text}  in {board.inside[-1].describe()}"
        return f"{text}  at {board.line}" if board.line else text

    def _still(self, ranks: list[int]) -> str:
        """Return how long the first of the ranks has not moved; '' if that is no time, or if they are done."""
        waiting = [rank for rank in ranks if self.watch.boards[rank].phase != "done"]
        seconds = max(map(self.watch.stalled_for, waiting), default=0.0)
        return f"  still for {seconds:.0f} s" if seconds >= 2 else ""

    def to_json(self) -> dict[str, Any]:
        """Return the state of the ranks, and the verdict, for programs."""
        ranks = [
            {
                "rank": rank, "pid": b.pid, "step": int(b.numbers["step"]), "phase": b.phase, "line": b.line,
                "module": b.module, "gradients": int(b.numbers["gradients"]), "gone": rank in self._gone,
                "inside": b.inside[-1].describe() if b.inside else "", "still_s": round(self.watch.stalled_for(rank), 2),
            }
            for rank, b in self.boards.items()
        ]  # fmt: skip
        f = self.finding
        verdict = None if f is None else {
            "cause": f.cause, "ranks": f.ranks, "where": f.where, "module": f.module, "reason": f.reason, "certain": f.certain,
            "confidence": f.confidence, "retry": CAUSES[f.cause].retry,
        }  # fmt: skip
        return {"time": time.time(), "folder": str(self.folder), "ranks": ranks, "verdict": verdict}


def watch(folders: Iterable[Path], *, as_json: bool, once: bool, command: VerdictCommand | None) -> int:
    """Follow until every rank has ended, or Ctrl-C. Return 0 without a verdict at the end, 1 with one, 2 without a rank.

    ``command`` is run once per verdict.
    """
    watchers, nccl = [Watcher(folder) for folder in folders], NcclService()
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
            has_seen = any(w.boards for w in watchers)
            settled = time.monotonic() - began >= ENOUGH_S or any(w.finding is not None for w in watchers)
            if has_seen and due and (not once or settled or is_over):
                last = time.monotonic()
                shown = _show(watchers, as_json, shown, nccl.lines)
                if once or is_over:
                    break
            if once and not has_seen and settled:
                print(visible(f"error: no rank has left a board in {', '.join(map(str, folders))}"), file=sys.stderr)
                return 2
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        pass
    finally:
        nccl.close()
    if command is not None:
        command.finish()
    return int(any(w.finding is not None for w in watchers))


def _show(watchers: list[Watcher], as_json: bool, shown: int, more: list[str]) -> int:
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
