"""Diagnosis by number of ranks: real ranks on this machine, and folders of many made from a recorded one.

    python benchmarks/scale.py [--real 2 4 8 16 32 64] [--made 256 1024 4096 16384] [--json FILE]

Real: a test in which one rank skips a collective, with as many ranks as given; seconds of the test, and from the stop to the
verdict. Made: the recorded evidence of a fault on three ranks, with its waiting rank repeated (by links: reading, parsing and the
rules are measured, not a disk); seconds and peak memory of `diagnose(load(folder))` in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import keep

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RECORDED = ("loops", "test_one_batch_less_in_a_trainer")  # three ranks, rank 1 is the culprit
SKIPS = """
import torch, torch.distributed as dist
from pytest_nsa import world_size

@world_size({n})
def test_skips(group):
    for step in range(4):
        dist.all_reduce(torch.ones(8))
        if not (group.rank == {n} // 3 and step == 2):
            dist.all_reduce(torch.ones(2))
"""
DIAGNOSES = """
import json, resource, sys, time
from pathlib import Path
from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.evidence.load import load
began = time.monotonic()
verdict = diagnose(load(Path(sys.argv[1])))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"cause": verdict.cause, "ranks": verdict.ranks, "s": time.monotonic() - began, "mib": peak / 1024}))
"""


def real(n: int, folder: Path) -> dict[str, Any]:
    """Run pytest on ``n`` ranks once; return the figures."""
    (folder / "test_scale.py").write_text(SKIPS.format(n=n))
    options = ["-p", "no:cacheprovider", "-q", "-o", "ranks_timeout=120", "--artifacts", str(folder / "artifacts")]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_scale.py"], cwd=folder, capture_output=True, check=False
    )
    verdict = json.loads(next((folder / "artifacts" / "latest").glob("*/verdict.json")).read_text())
    right = (verdict["cause"], verdict["ranks"]) == ("skipped_collective", [n // 3])
    return {"ranks": n, "right": right, "test_s": verdict["duration_s"], "verdict_s": verdict["time_to_verdict_s"]}


def make(n: int, source: Path, folder: Path) -> int:
    """Make a folder of ``n`` ranks from one of three; return the culprit's number."""
    culprit = n // 3
    for rank in range(n):
        (folder / f"rank{rank}").mkdir()
    for origin, first, ranks in (
        (1, culprit, [culprit]),
        (0, 0 if culprit else 1, [r for r in range(n) if r != culprit]),
    ):
        for file in (source / f"rank{origin}").iterdir():
            data = file.read_bytes()
            made = folder / f"rank{first}" / file.name
            made.write_bytes(_of_all(data, n) if file.name == "board.bin" else data)
            for rank in ranks:
                if rank != first:
                    os.link(made, folder / f"rank{rank}" / file.name)
        beats = folder / f"heartbeat_rank{first}.jsonl"
        beats.write_bytes((source / f"heartbeat_rank{origin}.jsonl").read_bytes())
        for rank in ranks:
            if rank != first:
                os.link(beats, folder / f"heartbeat_rank{rank}.jsonl")
    job = json.loads((source / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps({**job, "world_size": n}))
    if (source / "source.jsonl").is_file():
        (folder / "source.jsonl").write_bytes((source / "source.jsonl").read_bytes())
    with (folder / "host.jsonl").open("w") as host:
        for line in (source / "host.jsonl").read_text().splitlines():
            event = json.loads(line)
            if "rank" not in event:
                host.write(line + "\n")
            elif event["rank"] in (0, 1):
                for rank in [culprit] if event["rank"] == 1 else (r for r in range(n) if r != culprit):
                    host.write(json.dumps({**event, "rank": rank}) + "\n")
    return culprit


def _of_all(data: bytes, n: int) -> bytes:
    """Return a board whose collectives are of groups of ``n`` ranks."""
    layout = json.loads(data[:4096].rstrip(b"\0 "))
    ring, changed = layout["ring"], bytearray(data)
    names = [name for name, _ in ring["record"]]
    codes = [code for _, code in ring["record"]]
    at = struct.calcsize("<" + "".join(codes[: names.index("size")]))
    for index in range(ring["size"]):
        struct.pack_into("<q", changed, ring["offset"] + index * ring["stride"] + at, n)
    return bytes(changed)


def made(n: int, folder: Path) -> dict[str, Any]:
    """Diagnose a folder of ``n`` ranks; return the figures."""
    from tests_cpu.faults.recorded import unpack

    (folder / "source").mkdir()
    (folder / "run").mkdir()
    culprit = make(n, unpack(RECORDED[0], folder / "source")[RECORDED[1]], folder / "run")
    done = subprocess.run(
        [sys.executable, "-c", DIAGNOSES, str(folder / "run")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    right = (found["cause"], found["ranks"]) == ("skipped_collective", [culprit])
    return {"ranks": n, "right": right, "s": round(found["s"], 2), "mib": round(found["mib"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--real", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--made", type=int, nargs="*", default=[256, 1024, 4096, 16384])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"real": [], "made": []}
    for kind, run in (("real", real), ("made", made)):
        for n in getattr(arguments, kind):
            with tempfile.TemporaryDirectory() as folder:
                row = run(n, Path(folder))
            figures[kind].append(row)
            print(kind, json.dumps(row), flush=True)
    if arguments.json is not None:
        keep(figures, arguments.json)


if __name__ == "__main__":
    main()
