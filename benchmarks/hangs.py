"""A public set of programs with one fault each, and the score of any tool's answers.

    python benchmarks/hangs.py labels                        # a JSON line per program: what is right
    python benchmarks/hangs.py answer nsa > nsa.jsonl        # pytest-nsa's answers
    python benchmarks/hangs.py answer plain > plain.jsonl    # of plain processes: what each reader of their evidence says
    python benchmarks/hangs.py answer nsa --healthy > twins.jsonl  # the same of the healthy twins; `plain` has it, too
    python benchmarks/hangs.py score nsa.jsonl plain.jsonl twins.jsonl --json benchmarks/results/hangs.json
    python benchmarks/peers/bare_fault.py skip test_a_loop_awaits_a_collective_of_its_executor [healthy]

A program is a function in tests_cpu/faults/programs, for torch.distributed on a CPU, of this project's licence. It takes the rank
that has the fault, or whether there is a fault: without it the program is its healthy twin. The last command runs one without
pytest, for another tool. A tool answers with JSON lines that have its name:
{"tool": "mine", "program": "test_...", "ranks": [1], "line": 31, "certain": false}; [] and 0 for nothing. A line is one of the
program's file. An answer on a twin also has "healthy": true; any rank, line or "cause" in it is a false alarm.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import json
import os
import re
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from analyzers import HAS_NVRX, ask_nvrx, ask_torch, copied, run_forked
from figures import ROOT, keep, parser_of
from peers import bare_fault

from pytest_nsa.diagnosis.foreign import judge
from pytest_nsa.evidence.source import LOCATION
from pytest_nsa.foreign.find import read_job
from pytest_nsa.wire.files import read_lines
from tests_cpu.faults.planting import marked_lines
from tests_cpu.faults.rows import PLANTED
from tests_cpu.faults.test_corpus import (
    AS_FAULTS,
    AS_TWINS,
    HERE,
    list_programs,
    load_file,
    rows_by_program,
    run_programs,
)

WORKERS, AT_ONCE = 5, 8  # tests; programs on plain processes. Both wait for most of their time
GIVEN = {"group", "ddp", "fsdp", "culprit", "faulty", "tmp_path"}  # what bare_fault.py gives a program
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


def answer_by_pytest_nsa(*, healthy: bool) -> Iterator[dict[str, Any]]:
    """Yield the verdict on each program, with its second run; of a twin, also the cause of an announcement while it ran."""
    way = replace(AS_FAULTS, conftest=AS_TWINS.conftest) if healthy else AS_FAULTS
    options = ("--ranks-keep", "all") if healthy else ("--ranks-rerun", "all")
    programs = [(file, name) for file, name, _ in list_programs()]
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(sys.stderr):
            found = run_programs(Path(folder), way, programs, *options, workers=WORKERS, timeout=1800)
        for name, verdict in found.verdicts.items():
            place = LOCATION.match(verdict.where)
            is_own = place is not None and Path(place["file"]).name.startswith(PLANTED)
            suspicions = read_lines(found.folder(name) / "suspicions.jsonl") if healthy else ()
            announced = next((of["cause"] for of in suspicions if "cause" in of), "")
            yield {
                "tool": "pytest-nsa", "program": name, "ranks": list(verdict.ranks), "certain": verdict.certain,
                "line": int(place["line"]) if place is not None and is_own else 0, "cause": verdict.cause or announced,
                "seconds": round(verdict.stalled_s + verdict.time_to_verdict_s, 1), "healthy": healthy,
            }  # fmt: skip


def answer_by_plain_processes(*, healthy: bool) -> Iterator[dict[str, Any]]:
    """Yield each reader's answer on each program that runs without pytest: one run leaves dumps, stacks and logs.

    No rank has our tracer. A watchdog's thread of each rank writes its dump and its stacks; a launcher writes how processes ended.
    torch's compiler is imported once: the ranks of programs with DDP would still import it as the watchdog looks.
    """
    importlib.import_module("torch._dynamo")
    programs = [
        (file, name, program.n, healthy)
        for file, name, program in list_programs()
        if _list_needs(getattr(load_file(file), name)) <= GIVEN
    ]
    with ProcessPoolExecutor(AT_ONCE, mp_context=get_context("fork")) as pool:
        for answers in pool.map(_answer_plain, *zip(*programs, strict=True)):
            yield from answers


def _list_needs(function: Callable[..., None]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.default is parameter.empty}


def _answer_plain(file: str, name: str, n: int, healthy: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as path:

        def run() -> None:
            os.environ.update(TORCH_FR_BUFFER_SIZE="2000", FR_FOLDER=path)
            bare_fault.run(file, name, "leave", *(("healthy",) if healthy else ()))

        run_forked(run, 90)  # the ranks end by themselves, unless one holds the GIL
        return [{**answer, "healthy": healthy} for answer in list_answers(file, name, n, Path(path))]


def list_answers(file: str, name: str, n: int, folder: Path) -> list[dict[str, Any]]:
    """Return what each reader says of what plain processes left in a folder."""
    answers = []
    for tool, pattern in (("diagnose, of dumps", "trace_*"), ("diagnose, of dumps, stacks and logs", "*")):
        verdict, _ = judge(read_job(sorted(folder.glob(pattern))), name, sources=True)
        place = LOCATION.match(verdict.where)
        is_own = place is not None and place["file"].endswith(f"/programs/{file}.py")
        line = int(place["line"]) if place is not None and is_own else 0
        answers.append(
            {"tool": f"pytest-nsa {tool}", "ranks": list(verdict.ranks), "line": line, "certain": verdict.certain}
        )
    with copied(folder, "trace_") as dumps:
        answers.append({"tool": "torch's analyzer of dumps", "ranks": ask_torch(dumps, "trace_"), "line": 0})
        if HAS_NVRX:
            answers.append({"tool": "NVRx's analyzer of dumps", "ranks": ask_nvrx(dumps, "trace_"), "line": 0})
    stacks = {rank: folder / f"stack_{rank}.txt" for rank in range(n)}  # a rank that has ended has none
    texts = {rank: path.read_text() if path.exists() else "" for rank, path in stacks.items()}
    odd, line = read_stacks(texts, file)
    answers.append({"tool": "stacks, by the majority", "ranks": odd, "line": line})
    return [{"program": name, **answer} for answer in answers]


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


def score(answers: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return by tool how many programs it answered, and in how many of these ranks and line are right; of how many healthy twins
    it named anything.

    Where a tool gives ``seconds`` from the beginning of a stall to its answer, their median and the longest, too.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    labels = {label["program"]: label for label in list_labels()}
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for answer in answers:
        label, row = labels[answer["program"]], rows[answer["tool"]]
        if answer.get("healthy"):
            row["twins"] += 1
            row["false alarms"] += bool(answer["ranks"] or answer["line"] or answer.get("cause"))
            continue
        right = sorted(answer["ranks"]) == sorted(label["ranks"])
        row["programs"] += 1
        if answer.get("seconds"):
            seconds[answer["tool"]].append(answer["seconds"])
        row["ranks right"] += right
        row["have a line"] += bool(label["lines"])
        row["line right"] += right and answer["line"] in label["lines"]
        row["wrong and certain"] += bool(answer.get("certain")) and bool(answer["ranks"]) and not right
    times = {
        tool: {"median s": statistics.median(all_of), "longest s": max(all_of)} for tool, all_of in seconds.items()
    }
    return {tool: {**row, **times.get(tool, {})} for tool, row in rows.items()}


def main() -> None:
    """Do what the command names."""
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=argparse.ArgumentParser)
    commands.add_parser("labels")
    answering = commands.add_parser("answer")
    answering.add_argument("tool", choices=("nsa", "plain"))
    answering.add_argument("--healthy", action="store_true", help="answer on the healthy twins")
    scored = commands.add_parser("score")
    scored.add_argument("answers", nargs="+", type=Path)
    scored.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.command == "score":
        lines = [line for path in given.answers for line in path.read_text(encoding="utf-8").splitlines()]
        keep({"programs": len(list_programs()), "scores": score(map(json.loads, lines))}, given.json)
    else:
        made = {"nsa": answer_by_pytest_nsa, "plain": answer_by_plain_processes}
        for record in list_labels() if given.command == "labels" else made[given.tool](healthy=given.healthy):
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
