"""A public set of programs with one fault each, and the score of any tool's answers.

    python benchmarks/hangs.py labels                        # a JSON line per program: what is right
    python benchmarks/hangs.py answer nsa > nsa.jsonl        # pytest-nsa's answers
    python benchmarks/hangs.py answer plain > plain.jsonl    # of plain processes: by their dumps, and by their stacks
    python benchmarks/hangs.py score nsa.jsonl plain.jsonl --json benchmarks/results/hangs.json
    python benchmarks/peers/bare_fault.py skip test_a_loop_awaits_a_collective_of_its_executor [healthy]

A program is a function in tests_cpu/faults/programs, for torch.distributed on a CPU, of this project's licence. A fault on one rank
is on `culprit`: without it the program is its healthy twin. The last command runs one without pytest, for another tool. A tool
answers with JSON lines that have its name:
{"tool": "mine", "program": "test_...", "ranks": [1], "line": 31, "certain": false}; [] and 0 for nothing. A line is one of the
program's file.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import foreign
from figures import keep, parser_of

ROOT = foreign.ROOT

from pytest_nsa.diagnosis.foreign import judge  # noqa: E402
from pytest_nsa.evidence.source import LOCATION  # noqa: E402
from pytest_nsa.foreign.find import read_job  # noqa: E402
from tests_cpu.faults.planting import marked_lines  # noqa: E402
from tests_cpu.faults.rows import PLANTED  # noqa: E402
from tests_cpu.faults.test_corpus import (  # noqa: E402
    AS_FAULTS,
    HERE,
    list_programs,
    load_file,
    rows_by_program,
    run_programs,
)

WORKERS, AT_ONCE = 3, 8  # tests; programs on plain processes, which wait for most of their time
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in ', re.MULTILINE)


def list_labels() -> Iterator[dict[str, Any]]:
    """Yield what is right of each program: ranks, the lines that a tool may name, cause, and the statement where ranks part."""
    rows = rows_by_program()
    for file, name, program in list_programs():
        row, path = rows[name], HERE / "programs" / f"{file}.py"
        own, statement, text = (
            _list_lines(path, name),
            row.divergence.get("statement", ""),
            path.read_text(encoding="utf-8"),
        )
        parting = {n for n, line in enumerate(text.splitlines(), 1) if statement and line.strip().startswith(statement)}
        yield {
            "program": name, "file": str(path.relative_to(ROOT)), "world_size": program.n, "ranks": list(row.ranks),
            "lines": sorted((marked_lines(path) | parting) & own), "cause": row.cause, "family": row.family,
            "statement": statement, "origin": row.origin, "licence": "Apache-2.0",
        }  # fmt: skip


def _list_lines(path: Path, name: str) -> set[int]:
    """Return the lines of a program: of its function, and of what this one names in its file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    definitions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    todo, lines = [name], set[int]()
    while todo:
        node = definitions.pop(todo.pop(), None)
        if node is not None:
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            todo += [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
            todo += [part.arg for part in ast.walk(node) if isinstance(part, ast.arg)]
    return lines


def answer_by_pytest_nsa() -> Iterator[dict[str, Any]]:
    """Yield the verdict on each program, with its second run."""
    by_file = defaultdict(list)
    for file, name, _ in list_programs():
        by_file[file].append(name)
    for file, names in by_file.items():
        with tempfile.TemporaryDirectory() as folder:
            workers = WORKERS if len(names) > WORKERS else 0
            with contextlib.redirect_stdout(sys.stderr):
                found = run_programs(
                    Path(folder), AS_FAULTS, file, names, "--ranks-rerun", "all", workers=workers, timeout=900
                )
        for name in names:
            verdict = found.verdicts.get(name)
            if verdict is not None:
                place = LOCATION.match(verdict.where)
                is_own = place is not None and Path(place["file"]).name == PLANTED
                yield {
                    "tool": "pytest-nsa", "program": name, "ranks": list(verdict.ranks), "certain": verdict.certain,
                    "line": int(place["line"]) if place is not None and is_own else 0, "cause": verdict.cause,
                }  # fmt: skip


def answer_by_plain_processes() -> Iterator[dict[str, Any]]:
    """Yield two answers on each program that runs without pytest: of its flight recorder's dumps, and of its stacks."""
    programs = [
        (file, name, program.n) for file, name, program in list_programs()
        if set(inspect.signature(getattr(load_file(file), name)).parameters) <= {"group", "ddp", "fsdp", "culprit", "tmp_path"}
    ]  # fmt: skip
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for answers in pool.map(lambda of: _answer_plain(*of), programs):
            yield from answers


def _answer_plain(file: str, name: str, n: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        foreign.run_program(file, name, folder)
        verdict, _ = judge(read_job(sorted(folder.glob("trace_*"))), name)
        stacks = {rank: folder / f"stack_{rank}.txt" for rank in range(n)}  # a rank that has ended has none
        texts = {rank: path.read_text() if path.exists() else "" for rank, path in stacks.items()}
        ranks, line = read_stacks(texts, file)
    of = {"program": name, "certain": False}
    return [
        {
            **of,
            "tool": "dumps of the flight recorder",
            "ranks": list(verdict.ranks),
            "line": 0,
            "certain": verdict.certain,
        },
        {**of, "tool": "stacks, by the majority", "ranks": ranks, "line": line},
    ]


def read_stacks(stacks: dict[int, str], file: str) -> tuple[list[int], int]:
    """Return the ranks with another line of the program than most, and their line: how a person reads stacks of all ranks."""
    lines = {
        rank: next((int(m["line"]) for m in _FRAME.finditer(text) if m["file"].endswith(f"/programs/{file}.py")), 0)
        for rank, text in stacks.items()
    }
    if not lines:
        return [], 0
    usual, number = Counter(lines.values()).most_common(1)[0]
    odd = sorted(rank for rank, line in lines.items() if line != usual)
    return (odd, lines[odd[0]]) if odd and number > len(lines) / 2 else ([], 0)


def score(answers: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return by tool how many programs it answered, and in how many of these ranks and line are right."""
    labels = {label["program"]: label for label in list_labels()}
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for answer in answers:
        label, row = labels[answer["program"]], rows[answer["tool"]]
        right = sorted(answer["ranks"]) == sorted(label["ranks"])
        row["programs"] += 1
        row["ranks right"] += right
        row["have a line"] += bool(label["lines"])
        row["line right"] += right and answer["line"] in label["lines"]
        row["wrong and certain"] += bool(answer.get("certain")) and bool(answer["ranks"]) and not right
    return {tool: dict(row) for tool, row in rows.items()}


def main() -> None:
    """Do what the command names."""
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=argparse.ArgumentParser)
    commands.add_parser("labels")
    commands.add_parser("answer").add_argument("tool", choices=("nsa", "plain"))
    scored = commands.add_parser("score")
    scored.add_argument("answers", nargs="+", type=Path)
    scored.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.command == "score":
        lines = [line for path in given.answers for line in path.read_text(encoding="utf-8").splitlines()]
        keep({"programs": len(list_programs()), "scores": score(map(json.loads, lines))}, given.json)
    else:
        made = {"nsa": answer_by_pytest_nsa, "plain": answer_by_plain_processes}
        for record in list_labels() if given.command == "labels" else made[given.tool]():
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
