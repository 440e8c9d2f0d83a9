"""How often a verdict on what other tools left is right: recorder dumps of gloo, public cases, and dumps of NCCL jobs.

    python benchmarks/foreign.py --json benchmarks/results/foreign.json [--nccl DIR]

Faults of the corpus run on plain processes, without our tracer, with torch's flight recorder on. After a limit each process writes
its dump and its stacks (peers/bare_fault.py). The verdict is made of the dumps alone, then of dumps and stacks. ``DIR`` has a
folder per incident of NCCL with a file `ranks` ('12 14').
"""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import keep, parser_of

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pytest_nsa.diagnosis.foreign import judge  # noqa: E402
from pytest_nsa.foreign.find import read_job  # noqa: E402
from tests_cpu.faults.planting import marked_lines, programs_of  # noqa: E402
from tests_cpu.faults.rows import read_rows  # noqa: E402
from tests_cpu.foreign.cases import CASES  # noqa: E402

FAMILIES = ("skip", "extra", "swap", "mismatch", "group", "hook", "branch", "lock", "sleep", "endless", "io")
MOST = 40


def run_program(file: str, test: str, folder: Path) -> None:
    """Run a program on plain processes, which end by themselves unless one holds the GIL."""
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000", "FR_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
    script = str(ROOT / "benchmarks" / "peers" / "bare_fault.py")
    command = ["timeout", "--signal", "KILL", "30", sys.executable, script, file, test, "leave"]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def of_gloo() -> dict[str, Any]:
    """Return how many faults of the corpus were named by dumps alone, and with stacks."""
    rows = {row.program or row.test: row for row in read_rows()}
    found: dict[str, Any] = {}
    for family in FAMILIES:
        module = importlib.import_module(f"tests_cpu.faults.programs.{family}")
        for test in programs_of(module):
            row = rows[test]
            if (
                len(found) >= MOST
                or row.needs
                or not set(inspect.signature(getattr(module, test)).parameters) <= {"group", "culprit"}
            ):
                continue
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                run_program(family, test, folder)
                alone, _ = judge(read_job(sorted(folder.glob("trace_*"))), test)
                whole, _ = judge(read_job([folder]), test)
            line = whole.where.rpartition(":")[2].partition(" ")[0]
            found[test] = {
                "ranks": list(row.ranks), "by dumps": [alone.cause, list(alone.ranks), alone.certain],
                "with stacks": [whole.cause, list(whole.ranks), whole.where.rpartition("/")[2]],
                "dumps right": alone.ranks == row.ranks, "ranks right": whole.ranks == row.ranks,
                "line right": line.isdecimal() and int(line) in marked_lines(Path(str(module.__file__))),
            }  # fmt: skip
            print(test, found[test], flush=True)
    return found


def of_cases() -> dict[str, bool]:
    """Return whether each public case was named."""
    found = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            for file, text in case.files.items():
                Path(folder, file).write_text(text)
            verdict, _ = judge(read_job([Path(folder)]), name)
        found[name] = verdict.ranks == case.ranks and verdict.cause in case.causes
    return found


def of_nccl(folder: Path) -> dict[str, Any]:
    """Return the ranks that each incident's dumps name, those that were injected, and the seconds that it took."""
    found = {}
    for incident in sorted(path for path in folder.iterdir() if (path / "ranks").is_file()):
        began = time.perf_counter()
        verdict, _ = judge(read_job(sorted(incident.glob("_dump_*"))), incident.name)
        wanted = [int(n) for n in (incident / "ranks").read_text().split()]
        found[incident.name] = {
            "found": list(verdict.ranks),
            "injected": wanted,
            "seconds": round(time.perf_counter() - began, 2),
        }
    return found


def main() -> None:
    """Run all three, and keep the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--nccl", type=Path, help="a folder of incidents, each with dumps and a file `ranks`")
    arguments = parser.parse_args()
    gloo = of_gloo()
    figures = {
        "gloo": {
            "faults": len(gloo),
            **{what: sum(f[what] for f in gloo.values()) for what in ("dumps right", "ranks right", "line right")},
            "wrong and certain": sum(f["by dumps"][2] and not f["dumps right"] for f in gloo.values()),
            "by fault": gloo,
        },
        "public cases": of_cases(),
        "nccl": of_nccl(arguments.nccl) if arguments.nccl else {},
    }  # fmt: skip
    keep(figures, arguments.json)


if __name__ == "__main__":
    main()
