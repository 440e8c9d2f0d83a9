"""Diagnosis by number of ranks: real ranks on this machine, and folders of many made from a recorded one.

    python benchmarks/scale.py [--real 2 4 8 ...] [--made 256 1024 ...] [--crossed 256 1024 ...] [--json FILE]

Real: a test in which one rank skips a collective, with as many ranks as given; seconds of the test, and from the stop to the
verdict. Made: the recorded evidence of a fault on three ranks, with its waiting rank repeated (by links: reading, parsing and the
rules are measured, not a disk); seconds and peak memory of `diagnose(load(folder))` in a process of its own. Crossed: the same of
a fault on a mesh of two by two, whose ranks wait in three groups: rules that compare ranks across groups are measured.
"""

from __future__ import annotations

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

from figures import keep, parser_of

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nsa.trace.calls.arguments import in_runs  # noqa: E402  the repository's own, from any folder
from pytest_nsa.evidence.load import members_of  # noqa: E402


class Planted(NamedTuple):
    """A recorded fault, its culprit and its cause."""

    module: str
    test: str
    culprit: int
    cause: str


ONE_GROUP = Planted("trainer_callbacks", "test_one_batch_less_in_a_trainer", 1, "skipped_collective")  # three ranks
GROUPS = Planted("training_saves", "test_a_look_at_a_whole_weight", 1, "extra_collective")  # a mesh of two by two
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
    options = [
        "-p",
        "no:cacheprovider",
        "-q",
        "-o",
        "ranks_timeout=120",
        "--ranks-artifacts",
        str(folder / "artifacts"),
    ]
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
    job = json.loads((source / "job.json").read_text())
    others = [rank for rank in range(job["world_size"]) if rank != culprit]
    copies: dict[int, list[int]] = {rank: [] for rank in others} | {culprit: [only]}
    for index, rank in enumerate(r for r in range(n) if r != only):
        copies[others[index % len(others)]].append(rank)
    for origin, (first, *more) in copies.items():
        recorded = {file.name: file.read_bytes() for file in (source / f"rank{origin}").iterdir()}
        recorded |= _grown(source / f"rank{origin}", copies, n)
        beats = folder / f"heartbeat_rank{first}.jsonl"
        beats.write_bytes((source / f"heartbeat_rank{origin}.jsonl").read_bytes())
        (folder / f"rank{first}").mkdir()
        for name, data in recorded.items():
            (folder / f"rank{first}" / name).write_bytes(data)
        for rank in more:
            os.link(beats, folder / f"heartbeat_rank{rank}.jsonl")
            (folder / f"rank{rank}").mkdir()
            for name in recorded:
                os.link(folder / f"rank{first}" / name, folder / f"rank{rank}" / name)
    (folder / "job.json").write_text(json.dumps({**job, "world_size": n}))
    if (source / "source.jsonl").is_file():
        (folder / "source.jsonl").write_bytes((source / "source.jsonl").read_bytes())
    with (folder / "host.jsonl").open("w") as host:
        for event in map(json.loads, (source / "host.jsonl").read_text().splitlines()):
            for rank in copies[event["rank"]] if "rank" in event else [None]:
                host.write(json.dumps({**event, **({} if rank is None else {"rank": rank})}) + "\n")
    return only


def _grown(rank: Path, copies: dict[int, list[int]], n: int) -> dict[str, bytes]:
    """Return a recorded rank's events and board, in which groups have the copies of their members."""
    sizes: dict[str, int] = {}
    events = [json.loads(line) for line in (rank / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "group":
            members = sorted(new for member in members_of(event["ranks"], n) for new in copies[member])
            event["ranks"], sizes[event["name"]] = in_runs(members), len(members)
    text = "".join(json.dumps(event) + "\n" for event in events)
    return {"events.jsonl": text.encode(), "board.bin": _board(rank, sizes, n)}


def _board(rank: Path, sizes: dict[str, int], n: int) -> bytes:
    """Return a recorded rank's board, with the ``sizes`` of its collectives' groups."""
    changed = bytearray((rank / "board.bin").read_bytes())
    ring = json.loads(bytes(changed[:4096]).rstrip(b"\0 "))["ring"]
    names, codes = zip(*ring["record"], strict=True)
    places = {name: (struct.calcsize("<" + "".join(codes[:at])), "<" + codes[at]) for at, name in enumerate(names)}
    (group_at, group_code), (size_at, size_code) = places["group"], places["size"]
    for start in range(ring["offset"], ring["offset"] + ring["size"] * ring["stride"], ring["stride"]):
        if struct.unpack_from(size_code, changed, start + size_at)[0]:  # else no call was recorded here
            group = struct.unpack_from(group_code, changed, start + group_at)[0].rstrip(b"\0").decode()
            struct.pack_into(size_code, changed, start + size_at, sizes.get(group, n))
    return bytes(changed)


def made(n: int, folder: Path, planted: Planted) -> dict[str, Any]:
    """Diagnose a folder of ``n`` ranks; return the figures."""
    from tests_cpu.faults.recorded import unpack

    (folder / "source").mkdir()
    (folder / "run").mkdir()
    source = unpack(planted.module, folder / "source", planted.test)[planted.test]
    culprit = make(n, source, folder / "run", planted.culprit)
    command = [sys.executable, "-c", DIAGNOSES, str(folder / "run")]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    right = (found["cause"], found["ranks"]) == (planted.cause, [culprit])
    return {"ranks": n, "right": right, "s": round(found["s"], 2), "mib": round(found["mib"])}


def main() -> None:
    """Measure, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--real", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--made", type=int, nargs="*", default=[256, 1024, 4096, 16384])
    parser.add_argument("--crossed", type=int, nargs="*", default=[256, 1024, 4096, 16384])
    arguments = parser.parse_args()
    runs: dict[str, Callable[[int, Path], dict[str, Any]]] = {
        "real": real,
        "made": partial(made, planted=ONE_GROUP),
        "crossed": partial(made, planted=GROUPS),
    }
    figures: dict[str, Any] = {kind: [] for kind in runs}
    for kind, run in runs.items():
        for n in getattr(arguments, kind):
            with tempfile.TemporaryDirectory() as folder:
                figures[kind].append(run(n, Path(folder)))
            print(kind, json.dumps(figures[kind][-1]), flush=True)
    keep(figures, arguments.json)


if __name__ == "__main__":
    main()
