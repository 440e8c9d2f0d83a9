"""Diagnosis by number of ranks: real ranks on this machine, and folders of many made from a recorded one.

    python benchmarks/scale.py [--real 2 4 8 ...] [--made 256 1024 ...] [--crossed 256 1024 ...] [--paired 256 1024 ...]
                               [--json FILE]

Real: a test in which one rank skips a collective, with as many ranks as given; seconds of the test, and from the stop to the
verdict. Made: the recorded evidence of a fault on three ranks, with its waiting rank repeated (by links: reading, parsing and the
rules are measured, not a disk); seconds and peak memory of `diagnose(load(folder))` in a process of its own. Crossed: the same of
a fault on a mesh of two by two, whose ranks wait in three groups: rules that compare ranks across groups are measured. Paired: a
run of two pairs of ranks, each with a group of its own, sends and receives; the pair that waits is repeated: groups grow in number.
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
PAIRS = """
import torch, torch.distributed as dist
from pytest_nsa import world_size

@world_size({n})
def test_pairs(group):
    pair = [dist.new_group([first, first + 1]) for first in range(0, {n}, 2)][group.rank // 2]
    for step in range(6):
        dist.all_reduce(torch.ones(8), group=pair)
        if group.rank % 2:
            dist.recv(torch.ones(4), group.rank - 1)
        else:
            dist.send(torch.ones(4), group.rank + 1)
        if not (group.rank == 1 and step == 4):
            dist.all_reduce(torch.ones(2), group=pair)
        dist.barrier()
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
    verdict = json.loads((_run(SKIPS.format(n=n), folder) / "verdict.json").read_text())
    right = (verdict["cause"], verdict["ranks"]) == ("skipped_collective", [n // 3])
    return {"ranks": n, "right": right, "test_s": verdict["duration_s"], "verdict_s": verdict["time_to_verdict_s"]}


def _run(test: str, folder: Path) -> Path:
    """Run pytest on the source of one test; return its evidence."""
    (folder / "test_scale.py").write_text(test)
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
    return next((folder / "artifacts" / "latest").glob("*/verdict.json")).parent


def make(n: int, source: Path, folder: Path, culprit: int) -> int:
    """Make a folder of ``n`` ranks from a recorded one: ``culprit`` stays one rank, the others are repeated in turn.

    Groups keep their names and grow with their members. Returns the culprit's new number, ``n // 3``.
    """
    only = n // 3
    others = [rank for rank in range(_world_size(source)) if rank != culprit]
    copies: dict[int, list[int]] = {rank: [] for rank in others} | {culprit: [only]}
    for index, rank in enumerate(r for r in range(n) if r != only):
        copies[others[index % len(others)]].append(rank)

    def own(origin: int, rank: int) -> dict[str, bytes]:
        if rank != copies[origin][0]:
            return {}
        sizes: dict[str, int] = {}

        def grow(event: dict[str, Any]) -> None:
            members = sorted(new for member in members_of(event["ranks"], n) for new in copies[member])
            event["ranks"] = in_runs(members)
            sizes[event["name"]] = len(members)

        def grow_record(fields: dict[str, Any]) -> None:
            fields["size"] = sizes.get(fields["group"], n)

        events = _events(source / f"rank{origin}", grow)
        return {"events.jsonl": events, "board.bin": _board(source / f"rank{origin}", grow_record)}

    _lay_out(source, folder, copies, own)
    return only


def repeat(n: int, source: Path, folder: Path) -> None:
    """Make a folder of ``n`` ranks from a recorded one of two pairs: the second pair is repeated, each time with a group and with
    partners of its own.
    """
    copies = {0: [0], 1: [1], 2: list(range(2, n, 2)), 3: list(range(3, n, 2))}

    def own(origin: int, rank: int) -> dict[str, bytes]:
        shift = rank - origin
        names: dict[str, str] = {}

        def move(event: dict[str, Any]) -> None:
            members, name = list(members_of(event["ranks"], 4)), event["name"]
            if members == [2, 3]:
                members, event["name"] = [2 + shift, 3 + shift], f"{name}.{shift}"
            elif len(members) == 4:
                members = list(range(n))
            names[name], event["ranks"] = event["name"], in_runs(members)

        def move_record(fields: dict[str, Any]) -> None:
            if fields["peer"] != -1:
                fields["peer"] += shift
            fields["group"] = names.get(fields["group"], fields["group"])
            fields["size"] = n if fields["size"] == 4 else fields["size"]

        events = _events(source / f"rank{origin}", move)
        return {"events.jsonl": events, "board.bin": _board(source / f"rank{origin}", move_record)}

    _lay_out(source, folder, copies, own)


def _lay_out(
    source: Path, folder: Path, copies: dict[int, list[int]], own: Callable[[int, int], dict[str, bytes]]
) -> None:
    """Write a folder in which each recorded rank stands for the ``copies`` of it.

    ``own(origin, rank)`` gives the files that a rank has of its own; the others are links to those of the first copy.
    """
    for origin, (first, *more) in copies.items():
        recorded = {file.name: file.read_bytes() for file in (source / f"rank{origin}").iterdir()}
        beats = folder / f"heartbeat_rank{first}.jsonl"
        beats.write_bytes((source / f"heartbeat_rank{origin}.jsonl").read_bytes())
        for rank in more:
            os.link(beats, folder / f"heartbeat_rank{rank}.jsonl")
        for rank in (first, *more):
            here, written = folder / f"rank{rank}", own(origin, rank)
            here.mkdir()
            for name, data in ({**recorded, **written} if rank == first else written).items():
                (here / name).write_bytes(data)
            for name in recorded.keys() - written.keys() if rank != first else ():
                os.link(folder / f"rank{first}" / name, here / name)
    n = sum(map(len, copies.values()))
    job = json.loads((source / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps({**job, "world_size": n}))
    if (source / "source.jsonl").is_file():
        (folder / "source.jsonl").write_bytes((source / "source.jsonl").read_bytes())
    with (folder / "host.jsonl").open("w") as host:
        for line in (source / "host.jsonl").read_text().splitlines():
            event = json.loads(line)
            for rank in copies[event["rank"]] if "rank" in event else ():
                host.write(json.dumps({**event, "rank": rank}) + "\n")
            if "rank" not in event:
                host.write(line + "\n")


def _world_size(source: Path) -> int:
    return int(json.loads((source / "job.json").read_text())["world_size"])


def _events(rank: Path, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a recorded rank's events, those of groups changed."""
    events = [json.loads(line) for line in (rank / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "group":
            change(event)
    return "".join(json.dumps(event) + "\n" for event in events).encode()


def _board(rank: Path, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a recorded rank's board, the group, the size and the peer of its collectives changed."""
    changed = bytearray((rank / "board.bin").read_bytes())
    ring = json.loads(bytes(changed[:4096]).rstrip(b"\0 "))["ring"]
    names, codes = zip(*ring["record"], strict=True)
    places = {name: (struct.calcsize("<" + "".join(codes[:at])), "<" + codes[at]) for at, name in enumerate(names)}
    for start in range(ring["offset"], ring["offset"] + ring["size"] * ring["stride"], ring["stride"]):
        fields = {
            name: struct.unpack_from(places[name][1], changed, start + places[name][0])[0]
            for name in ("group", "size", "peer")
        }
        if not fields["size"]:  # no call was recorded here
            continue
        fields["group"] = fields["group"].rstrip(b"\0").decode()
        change(fields)
        for name, value in {**fields, "group": fields["group"].encode()}.items():
            struct.pack_into(places[name][1], changed, start + places[name][0], value)
    return bytes(changed)


def made(n: int, folder: Path, planted: Planted) -> dict[str, Any]:
    """Diagnose a folder of ``n`` ranks; return the figures."""
    from tests_cpu.faults.recorded import unpack

    (folder / "source").mkdir()
    (folder / "run").mkdir()
    source = unpack(planted.module, folder / "source")[planted.test]
    culprit = make(n, source, folder / "run", planted.culprit)
    return _diagnosed(n, folder / "run", planted.cause, culprit)


def paired(n: int, folder: Path) -> dict[str, Any]:
    """Diagnose a folder of ``n`` ranks in ``n // 2`` groups; return the figures."""
    evidence = _run(PAIRS.format(n=4), folder)
    (folder / "run").mkdir()
    repeat(n, evidence, folder / "run")
    return _diagnosed(n, folder / "run", "skipped_collective", 1)


def _diagnosed(n: int, run: Path, cause: str, culprit: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", DIAGNOSES, str(run)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    right = (found["cause"], found["ranks"]) == (cause, [culprit])
    return {"ranks": n, "right": right, "s": round(found["s"], 2), "mib": round(found["mib"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--real", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--made", type=int, nargs="*", default=[256, 1024, 4096, 16384])
    parser.add_argument("--crossed", type=int, nargs="*", default=[256, 1024, 4096, 16384])
    parser.add_argument("--paired", type=int, nargs="*", default=[256, 1024, 4096])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    for kind, least in (("real", 2), ("made", 3), ("crossed", 4), ("paired", 4)):
        for n in getattr(arguments, kind):
            if n < least or (kind == "paired" and n % 2):
                parser.error(
                    f"--{kind} {n}: " + ("pairs need an even number" if n >= least else f"at least {least} ranks")
                )
    figures: dict[str, Any] = {"real": [], "made": [], "crossed": [], "paired": []}
    runs: dict[str, Callable[[int, Path], dict[str, Any]]] = {
        "real": real,
        "made": partial(made, planted=ONE_GROUP),
        "crossed": partial(made, planted=GROUPS),
        "paired": paired,
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
