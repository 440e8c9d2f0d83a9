"""The corpus of planted faults: which verdict each one gets, how soon, and what existing tools report of the same faults.

    python benchmarks/diagnosis.py --json benchmarks/results/diagnosis.json [--tools [N]]

Every live program of tests_cpu/faults is run as a user's test would be, with `ranks_hang_after` = 3 s. Times to announcement and to
verdict are counted from when the ranks stalled.
``--tools`` runs the same functions on ranks without this plugin: as torch leaves them (its own time limit 8 s), with
TORCH_DISTRIBUTED_DEBUG=DETAIL, with a monitored_barrier after them, inside a test with
pytest-timeout alone (6 s), and with what the field looks at: torch's flight recorder and analyzer, its debug server, py-spy.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from figures import keep, parser_of, run_tests

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PROGRAMS = ROOT / "tests_cpu" / "faults" / "programs"
TOOL_LIMIT_S = 20


def faults() -> dict[str, tuple[str, Any]]:
    """Return the file and the row of each live program by its test; without those that need a library which is not installed."""
    from tests_cpu.faults.test_corpus import list_programs, rows_by_program  # the repository is on the path by now

    found = {name: (file, rows_by_program()[name]) for file, name, _ in list_programs()}
    return {name: pair for name, pair in found.items() if not pair[1].needs or importlib.util.find_spec(pair[1].needs)}


def run_corpus(folder: Path, workers: int) -> Iterator[tuple[str, dict[str, Any], float | None]]:
    """Yield (test, its verdict, seconds of the stall when it was announced) of each fault."""
    for program in PROGRAMS.glob("[!_]*.py"):
        shutil.copy(program, folder / f"test_{program.name}")
    (folder / "conftest.py").write_text("from tests_cpu.faults.planting import faulty_rank\n")
    options = ("ranks_hang_after=3", "ranks_check_divergence=true", "ranks_timeout=14", f"pythonpath={ROOT}")
    found = run_tests(folder, *(word for option in options for word in ("-o", option)), workers=workers)
    run = folder / "artifacts" / "latest"
    for verdict in found.values():
        told = run / verdict["folder"] / "suspicions.jsonl"
        first = json.loads(told.read_text().splitlines()[0]) if told.is_file() else None
        yield verdict["nodeid"].partition("::")[2], verdict, first and first["stalled_s"]


def tool(module: str, name: str, expected: Any, line: str, mode: str) -> dict[str, Any]:
    """Run a fault on bare ranks: whether they end by themselves, after how long, whether the output singles the culprit out, and
    whether it shows the line that our verdict names (``line``, '' where it names none).
    """
    debug = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if mode == "DETAIL" else {}
    debug |= {"TORCH_FR_BUFFER_SIZE": "2000"} if mode in ("recorder", "debug") else {}
    command = [sys.executable, str(HERE / "peers" / "bare_fault.py"), module, name, mode]
    folder = tempfile.mkdtemp()
    debug["FR_FOLDER"] = folder
    if mode == "pytest-timeout":
        test = Path(folder) / "test_fault.py"
        test.write_text(f"import subprocess\ndef test_fault():\n    assert subprocess.call({command!r}) == 0\n")
        options = ["-q", "-s", "-p", "no:nsa", "-p", "no:cacheprovider", "-c", "/dev/null", "--timeout=6"]
        command = [sys.executable, "-m", "pytest", *options, f"--rootdir={folder}", str(test)]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **debug, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    try:
        text = process.communicate(timeout=TOOL_LIMIT_S)[0]
        ended = True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        text, ended = process.communicate()[0], False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
    if mode == "recorder":
        text = analyze(folder)
    shutil.rmtree(folder, ignore_errors=True)
    # Who names every rank has singled none out: it shows the stacks of all, for the reader to compare.
    said = [line for line in text.splitlines() if "exit" not in line]
    named = {int(found[1]) for line in said for found in re.finditer(r"\branks?:? ?(\d+)\b", line, re.I)}
    every = set(range(expected.n))
    return {
        "ended": ended, "seconds": time.perf_counter() - started,
        "names_rank": expected.ranks[0] in named and (not every <= named or set(expected.ranks) == every),
        "crashed": "SIGSEGV" in text, "silent": ended and process.returncode == 0,
        "shows_line": bool(line) and re.search(rf"\b{module}\.py(:|\", line ){line}\b", text) is not None,
    }  # fmt: skip


def analyze(folder: str) -> str:
    """Return what torch's analyzer of flight recorder dumps prints, with the stacks that it has.

    In torch 2.13 it ends with a KeyError on gloo's dumps: their list of groups names the default one '', and their entries name it
    '0'. That is mended here, so that what is compared is what the analyzer finds.
    """
    for dump in Path(folder).glob("trace_*"):
        try:
            recorded = pickle.loads(dump.read_bytes())  # our own ranks wrote it
        except (EOFError, pickle.UnpicklingError):  # its rank was killed meanwhile
            dump.unlink()
            continue
        groups = recorded.get("pg_config", {})
        if "" in groups:
            groups["0"] = {**groups.pop(""), "name": "0"}
            dump.write_bytes(pickle.dumps(recorded))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder, "-p", "trace_", "--allow-incomplete-ranks",
         "--print_stack_trace"],
        text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def compare_tools(all_faults: list[tuple[str, str, Any, str]], workers: int) -> dict[str, Any]:
    """Return the totals of each mode over all faults."""
    found = {}
    for mode in ("plain", "DETAIL", "monitored", "pytest-timeout", "recorder", "debug", "py-spy"):
        with ThreadPoolExecutor(workers) as pool:
            results = list(pool.map(lambda f, mode=mode: tool(*f, mode), all_faults))  # type: ignore[misc]
        found[mode] = {
            "faults": len(results), "ended_by_themselves": sum(r["ended"] for r in results),
            "name_the_rank": sum(r["names_rank"] for r in results), "crashed": sum(r["crashed"] for r in results),
            "exit_code_0": sum(r["silent"] for r in results), "show_the_line": sum(r["shows_line"] for r in results),
            "median_s_of_those_that_ended": statistics.median([r["seconds"] for r in results if r["ended"]] or [0.0]),
        }  # fmt: skip
    return found


def main() -> None:
    """Measure, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=3, help="tests at a time (default: 3)")
    parser.add_argument(
        "--tools", type=int, nargs="?", const=1, default=0, metavar="N",
        help="also what others say without this plugin, of every Nth fault (default: of all)",
    )  # fmt: skip
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    matrix: Counter[tuple[str, str]] = Counter()
    wrong, announced, verdict_after, lines = [], [], [], {}
    planted = faults()
    with tempfile.TemporaryDirectory() as name:
        for test, verdict, told in run_corpus(Path(name), arguments.workers):
            if test not in planted:
                continue
            file, row = planted[test]
            matrix[row.cause, verdict["cause"] or verdict["outcome"]] += 1
            if (row.cause, list(row.ranks)) != (verdict["cause"], verdict["ranks"]):
                wrong.append({"test": test, "planted": [row.cause, row.ranks], "told": verdict["reason"]})
            if told is not None:
                announced.append(told)
            verdict_after.append(verdict["stalled_s"] + verdict["time_to_verdict_s"])
            found = re.match(rf"test_{file}\.py:(\d+) ", verdict["where"])
            lines[test] = found[1] if found is not None else ""
    every = [(file, test, row, lines.get(test, "")) for test, (file, row) in planted.items()]
    figures: dict[str, Any] = {
        "faults": len(every), "right": len(every) - len(wrong), "wrong": wrong,
        "announced_after_s": {"median": statistics.median(announced), "worst": max(announced), "n": len(announced)},
        "verdict_after_s": {"median": statistics.median(verdict_after), "worst": max(verdict_after)},
        "matrix": {f"{planted} -> {told}": n for (planted, told), n in sorted(matrix.items())},
    }  # fmt: skip
    keep(figures, arguments.json)
    if arguments.tools:
        figures["tools"] = compare_tools(every[:: arguments.tools], arguments.workers)
        keep(figures, arguments.json)


if __name__ == "__main__":
    main()
