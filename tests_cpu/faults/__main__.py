"""Prints the recorded faults, and the healthy tests: `python -m tests_cpu.faults --list [WORD ...]`."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence

from tests_cpu.faults.rows import read_rows
from tests_cpu.faults.test_corpus import HEALTHY, healthy_tests, list_programs

HEAD = ("archive", "test", "live in", "cause", "ranks", "world size", "family", "origin", "needs", "miss")


def fault_rows() -> list[tuple[str, ...]]:
    """Return a row per recorded fault, with the columns of `HEAD`; `live in` is the file of its program, where there is one."""
    files = {name: file for file, name, _ in list_programs()}
    return [
        (
            of.archive, of.test, files.get(of.program or of.test, "-"), of.cause, ",".join(map(str, of.ranks)) or "-", str(of.n),
            of.family, of.origin, of.needs, of.miss,
        )
        for of in read_rows()
    ]  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines of aligned columns under a head."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables, or their rows in which every word occurs."""
    parser = argparse.ArgumentParser(prog="python -m tests_cpu.faults", description=__doc__)
    parser.add_argument("--list", nargs="*", metavar="WORD", required=True, help="print the rows that have every WORD")
    words = parser.parse_args(arguments).list
    healthy = [(module, name) for module in HEALTHY for name in healthy_tests(module)]
    for title, head, rows in (("recorded faults", HEAD, fault_rows()), ("healthy tests", ("module", "test"), healthy)):
        found = [row for row in rows if all(any(word in cell for cell in row) for word in words)]
        print(f"{len(found)} {title}\n\n{table(head, found)}\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as `| head` ends it
    main()
