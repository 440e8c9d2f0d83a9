"""How often a verdict on what other tools left is right: recorder dumps of gloo, public cases, and dumps of NCCL jobs.

    python benchmarks/foreign.py --json benchmarks/results/foreign.json [--nccl DIR]

Faults of the corpus run on plain processes, without our tracer, with torch's flight recorder on. After `LIMIT_S` each process
writes its dump and its stacks. The verdict is made of the dumps alone, then of dumps and stacks. ``DIR`` has a folder per incident
of NCCL with a file `ranks` ('12 14').
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from figures import keep, parser_of

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pytest_nsa.diagnosis.foreign import judge  # noqa: E402
from pytest_nsa.foreign.find import read_job  # noqa: E402
from tests_cpu.faults.planting import programs_of  # noqa: E402
from tests_cpu.faults.rows import read_rows  # noqa: E402
from tests_cpu.foreign.cases import CASES  # noqa: E402

LIMIT_S = 9.0
FAMILIES = ("skip", "extra", "swap", "mismatch", "group", "hook", "branch", "lock", "sleep", "endless", "io")
MOST = 40


def run_rank(file: str, test: str, rank: int, folder: Path) -> None:
    """Run one rank of a program on a plain process group; write its dump, its stacks and its exception."""
    import torch
    import torch.distributed as dist

    from pytest_nsa.fixtures import Group

    module = importlib.import_module(f"tests_cpu.faults.programs.{file}")
    function, program = getattr(module, test), programs_of(module)[test]
    dist.init_process_group("gloo", rank=rank, world_size=program.n)
    ended = threading.Event()

    def leave() -> None:
        if not ended.is_set():  # a rank that has ended has no stack
            with (folder / f"stack_{rank}.txt").open("w") as file_:
                faulthandler.dump_traceback(file_)
        (folder / f"dump_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())
        time.sleep(2.0)  # until the others have written theirs: a rank that ends breaks their connections
        os._exit(0)

    def at_the_limit() -> None:
        time.sleep(LIMIT_S)
        leave()

    threading.Thread(target=at_the_limit, daemon=True).start()
    values = {"group": Group(rank=rank, world_size=program.n, device="cpu", backend="gloo"), "culprit": program.rank}
    try:
        inspect.unwrap(function)(**{name: values[name] for name in inspect.signature(function).parameters})
    except Exception:
        text = "".join(f"[rank{rank}]: {line}\n" for line in traceback.format_exc().splitlines())
        (folder / f"log_{rank}.txt").write_text(text)
    ended.set()
    threading.Event().wait()


def run_program(file: str, test: str, n: int, folder: Path) -> None:
    """Run a program on plain processes, which end by themselves."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, __file__, "--rank"]
    ranks = [
        subprocess.Popen([*command, file, test, str(r), str(folder)], env=environment, stderr=subprocess.DEVNULL)
        for r in range(n)
    ]
    for rank in ranks:
        try:
            rank.wait(timeout=4 * LIMIT_S)
        except subprocess.TimeoutExpired:
            rank.kill()


def of_gloo() -> dict[str, Any]:
    """Return how many faults of the corpus were named by dumps alone, and with stacks."""
    rows = {row.program or row.test: row for row in read_rows()}
    found: dict[str, Any] = {}
    for family in FAMILIES:
        module = importlib.import_module(f"tests_cpu.faults.programs.{family}")
        for test, program in programs_of(module).items():
            row = rows[test]
            if (
                len(found) >= MOST
                or row.needs
                or not set(inspect.signature(getattr(module, test)).parameters) <= {"group", "culprit"}
            ):
                continue
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                run_program(family, test, program.n, folder)
                alone, _ = judge(read_job(sorted(folder.glob("dump_*"))), test)
                whole, _ = judge(read_job([folder]), test)
            line = whole.where.rpartition(":")[2].partition(" ")[0]
            lines = {
                n
                for n, text in enumerate((Path(str(module.__file__))).read_text().splitlines(), 1)
                if text.endswith("# HERE")
            }
            found[test] = {
                "ranks": list(row.ranks), "by dumps": [alone.cause, list(alone.ranks), alone.certain],
                "with stacks": [whole.cause, list(whole.ranks), whole.where.rpartition("/")[2]],
                "dumps right": alone.ranks == row.ranks, "ranks right": whole.ranks == row.ranks,
                "line right": line.isdecimal() and int(line) in lines,
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
    if sys.argv[1:2] == ["--rank"]:
        file, test, rank, folder = sys.argv[2:]
        run_rank(file, test, int(rank), Path(folder))
        return
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
