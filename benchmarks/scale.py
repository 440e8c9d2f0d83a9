"""Diagnosis by number of ranks: real ranks on this machine, and folders of many made from a recorded one.

    python benchmarks/scale.py [--real 2 4 8 ...] [--made 256 1024 ...] [--crossed 256 1024 ...] [--many 256 1024 ...] [--json FILE]

Real: a test in which one rank skips a collective, with as many ranks as given; seconds of the test, and from the stop to the
verdict. Made: the recorded evidence of a fault on three ranks, with its waiting rank repeated (by links: reading, parsing and the
rules are measured, not a disk); seconds and peak memory of `diagnose(load(folder))` in a process of its own. Crossed: the same of
a fault on a mesh of two by two, whose ranks wait in three groups: rules that compare ranks across groups are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from figures import keep

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


class Planted(NamedTuple):
    """A recorded fault, its culprit and its cause."""

    module: str
    test: str
    culprit: int
    cause: str


ONE_GROUP = Planted("loops", "test_one_batch_less_in_a_trainer", 1, "skipped_collective")  # three ranks
GROUPS = Planted("apart", "test_a_look_at_a_whole_weight", 1, "extra_collective")  # a mesh of two by two
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


def make(n: int, source: Path, folder: Path, culprit: int) -> int:
    """Make a folder of ``n`` ranks from a recorded one: ``culprit`` stays one rank, the others are repeated in turn.

    Groups keep their names and grow with their members. Returns the culprit's new number, ``n // 3``.
    """
    only = n // 3
    recorded = json.loads((source / "job.json").read_text())
    others = [rank for rank in range(recorded["world_size"]) if rank != culprit]
    copies: dict[int, list[int]] = {rank: [] for rank in others} | {culprit: [only]}
    for index, rank in enumerate(r for r in range(n) if r != only):
        copies[others[index % len(others)]].append(rank)
    files = {origin: _files(source / f"rank{origin}", copies) for origin in copies}
    for rank in range(n):
        (folder / f"rank{rank}").mkdir()
    for origin, (first, *more) in copies.items():
        for name, data in files[origin].items():
            (folder / f"rank{first}" / name).write_bytes(data)
            for rank in more:
                os.link(folder / f"rank{first}" / name, folder / f"rank{rank}" / name)
        beats = folder / f"heartbeat_rank{first}.jsonl"
        beats.write_bytes((source / f"heartbeat_rank{origin}.jsonl").read_bytes())
        for rank in more:
            os.link(beats, folder / f"heartbeat_rank{rank}.jsonl")
    (folder / "job.json").write_text(json.dumps({**recorded, "world_size": n}))
    if (source / "source.jsonl").is_file():
        (folder / "source.jsonl").write_bytes((source / "source.jsonl").read_bytes())
    with (folder / "host.jsonl").open("w") as host:
        for line in (source / "host.jsonl").read_text().splitlines():
            event = json.loads(line)
            for rank in copies[event["rank"]] if "rank" in event else ():
                host.write(json.dumps({**event, "rank": rank}) + "\n")
            if "rank" not in event:
                host.write(line + "\n")
    return only


def _files(rank: Path, copies: dict[int, list[int]]) -> dict[str, bytes]:
    """Return a recorded rank's files, with the groups that it is in grown to the new ranks of their members."""
    from nsa.trace.calls import in_runs

    found = {file.name: file.read_bytes() for file in rank.iterdir()}
    everybody = sum(map(len, copies.values()))
    sizes: dict[bytes, int] = {}
    lines = []
    for event in map(json.loads, found["events.jsonl"].splitlines()):
        if event["event"] == "group":
            members = sorted(new for member in event["ranks"] for new in copies[member])
            event["ranks"] = in_runs(members)
            sizes[event["name"].encode()] = len(members)
        lines.append(json.dumps(event) + "\n")
    found["events.jsonl"] = "".join(lines).encode()
    found["board.bin"] = _grown(found["board.bin"], sizes, everybody)
    return found


def _grown(data: bytes, sizes: dict[bytes, int], everybody: int) -> bytes:
    """Return a board whose collectives are of groups of ``sizes`` ranks, by name; of ``everybody`` where a group is not named."""
    ring = json.loads(data[:4096].rstrip(b"\0 "))["ring"]
    names, codes = zip(*ring["record"], strict=True)
    at_group, at_size = (struct.calcsize("<" + "".join(codes[: names.index(name)])) for name in ("group", "size"))
    changed = bytearray(data)
    for start in range(ring["offset"], ring["offset"] + ring["size"] * ring["stride"], ring["stride"]):
        group = struct.unpack_from(f"<{codes[names.index('group')]}", data, start + at_group)[0].rstrip(b"\0")
        struct.pack_into("<q", changed, start + at_size, sizes.get(group, everybody))
    return bytes(changed)


def made(n: int, folder: Path, planted: Planted) -> dict[str, Any]:
    """Diagnose a folder of ``n`` ranks; return the figures."""
    from tests_cpu.faults.recorded import unpack

    (folder / "source").mkdir()
    (folder / "run").mkdir()
    source = unpack(planted.module, folder / "source")[planted.test]
    culprit = make(n, source, folder / "run", planted.culprit)
    done = subprocess.run(
        [sys.executable, "-c", DIAGNOSES, str(folder / "run")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    right = (found["cause"], found["ranks"]) == (planted.cause, [culprit])
    return {"ranks": n, "right": right, "s": round(found["s"], 2), "mib": round(found["mib"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--real", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--made", type=int, nargs="*", default=[256, 1024, 4096, 16384])
    parser.add_argument("--crossed", type=int, nargs="*", default=[256, 1024, 4096, 16384])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"real": [], "made": [], "crossed": []}
    runs: dict[str, Callable[[int, Path], dict[str, Any]]] = {
        "real": real,
        "made": partial(made, planted=ONE_GROUP),
        "crossed": partial(made, planted=GROUPS),
    }
    for kind, run in runs.items():
        for n in getattr(arguments, kind):
            with tempfile.TemporaryDirectory() as folder:
                row = run(n, Path(folder))
            figures[kind].append(row)
            print(kind, json.dumps(row), flush=True)
    if arguments.json is not None:
        keep(figures, arguments.json)


if __name__ == "__main__":
    main()
