"""Prints which faults are planted and which programs are healthy: `python -m tests_cpu.faults --list [WORD ...]`."""

from __future__ import annotations

import argparse
import importlib
import signal
from collections.abc import Sequence
from types import ModuleType

from tests_cpu.faults import test_corpus

HEAD = ("module", "test", "cause", "ranks", "world size", "family", "origin", "needs", "miss")
HEALTHY_HEAD = ("module", "test", "world size")


def planted_rows() -> list[tuple[str, ...]]:
    """Return a row per planted fault, with the columns of `HEAD`; `miss` is what a known miss lacks."""
    rows = []
    for module in test_corpus.MODULES:
        loaded = test_corpus.planted_module(module)
        for name, fault in test_corpus.faults(module).items():
            ranks = ",".join(map(str, fault.ranks)) or "-"
            rows.append(
                (
                    loaded.__name__.rpartition(".")[2],
                    name,
                    fault.cause,
                    ranks,
                    str(fault.n),
                    fault.family,
                    fault.origin,
                    fault.needs,
                    fault.miss,
                )
            )
    return rows


def healthy_rows() -> list[tuple[str, ...]]:
    """Return a row per healthy test: its module, test and world size."""
    rows = []
    for module in test_corpus.HEALTHY:
        loaded = importlib.import_module(f"tests_cpu.faults.{module}")
        rows += [(module, name, world_size(loaded, name)) for name in test_corpus.healthy_tests(module)]
    return rows


def world_size(module: ModuleType, test: str) -> str:
    """Return the number of ranks of a test by its mark; '1' without one."""
    marks = getattr(getattr(module, test), "pytestmark", [])
    return next((",".join(map(str, mark.args)) for mark in marks if mark.name == "world_size"), "1")


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
    for title, head, rows in (
        ("planted faults", HEAD, planted_rows()),
        ("healthy tests", HEALTHY_HEAD, healthy_rows()),
    ):
        found = [row for row in rows if all(any(word in cell for cell in row) for word in words)]
        print(f"{len(found)} {title}\n\n{table(head, found)}\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as `| head` ends it
    main()
