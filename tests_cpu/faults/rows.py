"""The rows of the recorded faults: the verdict that each one must get, a line of evidence/rows.jsonl."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_nsa.evidence.source import LOCATION
from tests_cpu.faults.recorded import ARCHIVES

TABLE = ARCHIVES / "rows.jsonl"
PLANTED = "test_planted"  # how the file of every recorded program begins
# What one edit did to a program that is right on every rank.
FAMILIES = {
    "skip": "a call, message, key or batch is left out",
    "extra": "a call or message is added",
    "swap": "two calls or messages change places",
    "mismatch": "a call has another operation, size, type or tag",
    "wrong_peer": "a message goes to, or is expected from, another rank",
    "dropped": "the Work of a message is not kept",
    "key": "a key of a store has another name",
    "group": "a group is not made, or made otherwise",
    "meeting": "the first group does not form: address, port, rank, size",
    "branch": "the forward takes another branch",
    "hook": "a hook has a collective",
    "unused": "a parameter gets no gradient",
    "autograd": "the graph or its recomputation is not what DDP expects",
    "numbers": "values, gradients or replicas become wrong",
    "raise": "an exception",
    "exit": "the process ends",
    "crash": "a signal ends the process",
    "stop": "a signal stops the process",
    "memory": "memory runs out",
    "lock": "a lock, queue or thread is waited for",
    "loader": "a data loader's worker stalls or dies",
    "sleep": "a sleep or a poll",
    "io": "a file, pipe or socket is waited for",
    "child": "a child process is waited for",
    "endless": "a loop does not end",
    "busy": "native code or a compiler runs, or keeps the GIL",
    "slow": "a step takes longer",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The verdict of a recorded fault, and where it comes from.

    ``archive`` holds the evidence of ``test``, which ran on ``n`` ranks. The verdict's location has ``where`` in it, or is one
    of ``lines`` of the program; its reason has ``reason`` in it. ``family`` is the kind of edit (`FAMILIES`). ``origin`` is an
    issue, or a set and its date. ``needs`` is a library without which the program does not run. ``miss`` is the fact that is
    missing where the verdict or its line is a known miss. ``program`` is the live test, where it has another name.
    ``divergence`` is the first divergence that a second run of the program found.
    """

    test: str
    archive: str
    cause: str
    ranks: tuple[int, ...]
    n: int
    family: str
    origin: str
    where: str = ""
    lines: tuple[int, ...] = ()
    reason: str = ""
    needs: str = ""
    miss: str = ""
    program: str = ""
    divergence: Mapping[str, Any] = field(default_factory=dict)

    def names(self, cause: str, ranks: tuple[int, ...]) -> bool:
        """Return whether a verdict's cause and ranks are right."""
        return (cause, ranks) == (self.cause, self.ranks)

    def allows(self, where: str, lines: frozenset[int] | None = None) -> bool:
        """Return whether a verdict's location is right: by the recorded lines, or by ``lines`` of a live program."""
        if not self.lines:
            return self.where in where
        location = LOCATION.match(where)
        allowed = self.lines if lines is None else lines
        return (
            location is not None
            and Path(location["file"]).name.startswith(PLANTED)
            and int(location["line"]) in allowed
        )


@functools.cache
def read_rows() -> tuple[Fault, ...]:
    """Return all rows. Raise TypeError for a field that is not one of a fault's."""
    rows = map(json.loads, TABLE.read_text(encoding="utf-8").splitlines())
    return tuple(Fault(**row | {"ranks": tuple(row["ranks"]), "lines": tuple(row.get("lines", ()))}) for row in rows)


@functools.cache
def faults(archive: str) -> dict[str, Fault]:
    """Return the rows of an archive, by test."""
    return {row.test: row for row in read_rows() if row.archive == archive}


def list_archives() -> tuple[str, ...]:
    """Return the names of the archives."""
    return tuple(dict.fromkeys(row.archive for row in read_rows()))


def update_row(program: str, /, **changed: object) -> None:
    """Write the row of a program again with other values. Raise ValueError where it has none."""
    rows = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    found = [row for row in rows if (row.get("program") or row["test"]) == program]
    if not found:
        raise ValueError(f"{program}: it has no row in {TABLE}; add one with its cause, ranks, n, family and origin")
    found[0].update(changed)
    partial = TABLE.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(TABLE)
