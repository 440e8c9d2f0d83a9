"""Whether what is watched behaves as what is not: how programs on ranks end under plain torch, and traced.

    python benchmarks/watched.py DIR --json benchmarks/results/watched.json

DIR holds pytest files, each with a test on N ranks that takes the argument ``group``. Without DIR, 120 programs are generated as by
`schedules.py --seed N`. Each program runs in N forked processes with gloo and a file store, without the plugin: once under plain
torch, once traced as by `NSA_TRACE_DIR`. A program completes, raises, is aborted by a signal, or hangs (10 s). Where the two modes
differ, the program is run three times more in each mode, as some races end in more than one way.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import runpy
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import schedules
import torch
import torch.distributed as dist
from figures import keep, parser_of

LIMIT_S = 10.0
AFTER_ABORT_S = 3.0  # for the other ranks to end
REPEATS = 3
_SIZE = re.compile(r"world_size\((\d+)\)")


def run_rank(path: Path, rank: int, size: int, folder: Path, *, traced: bool) -> None:
    """Run a program's test as one rank, leave how it ended in a file, and stay until all ranks have one."""
    os.dup2(os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    if traced:
        from nsa.trace.training import trace_training

        trace_training(folder / "evidence", rank, size)
    names = runpy.run_path(str(path))
    test = next(value for name, value in names.items() if name.startswith("test_") and callable(value))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        test(SimpleNamespace(rank=rank, world_size=size))
        how = "completes"
    except BaseException as error:  # a test's skip and exit are ways to end, too
        how = f"raises {type(error).__name__}"
    (folder / f"end{rank}.partial").write_text(how)
    (folder / f"end{rank}.partial").rename(folder / f"end{rank}")
    while not all((folder / f"end{other}").exists() for other in range(size)):
        time.sleep(0.02)
    os._exit(0)


def run(path: Path, size: int, folder: Path, *, traced: bool) -> str:
    """Return how the ranks of a program end: the most severe way of them."""
    folder.mkdir()
    pids = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            try:
                run_rank(path, rank, size, folder, traced=traced)
            finally:
                os._exit(9)
        pids.append(pid)
    began, aborted, waiting = time.monotonic(), 0.0, set(pids)
    how: set[str] = set()
    while (
        waiting and time.monotonic() - began < LIMIT_S and not (aborted and time.monotonic() - aborted > AFTER_ABORT_S)
    ):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.01)
            continue
        waiting.discard(pid)
        if os.WIFSIGNALED(status):
            aborted = aborted or time.monotonic()
            how.add(f"aborted by {signal.Signals(os.WTERMSIG(status)).name}")
    ends = [(folder / f"end{rank}") for rank in range(size)]
    how |= {end.read_text() for end in ends if end.exists()}
    if waiting and not aborted:
        how.add("hangs")
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    order = ("aborted", "raises", "hangs", "completes")
    return min(how, key=lambda text: (order.index(text.split()[0]), text))


def ways_to_end(path: Path) -> dict[str, set[str]]:
    """Return how a program ends in each mode."""
    size = int(found[1]) if (found := _SIZE.search(path.read_text())) else 2
    seen: dict[str, set[str]] = {"plain": set(), "traced": set()}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(1 + REPEATS):
            for mode, ways in seen.items():
                ways.add(run(path, size, Path(scratch) / f"{mode}{turn}", traced=mode == "traced"))
            if turn == 0 and seen["plain"] == seen["traced"]:
                break
    return seen


def compare(paths: list[Path], jobs: int) -> dict[str, Any]:
    """Return how many programs end in each way, and those that end otherwise when they are traced."""
    ends: Counter[str] = Counter()
    differ = []
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for path, seen in zip(paths, pool.imap(ways_to_end, paths), strict=True):
            both = seen["plain"] & seen["traced"]
            if not both:
                differ.append({"program": path.name, **{mode: sorted(ways) for mode, ways in seen.items()}})
            elif len(seen["plain"] | seen["traced"]) > 1:
                ends["in more than one way, in both modes"] += 1
            else:
                ends[next(iter(both)).split()[0]] += 1
    return {"programs": len(paths), "end_alike": dict(sorted(ends.items())), "end_otherwise": differ}


def main() -> None:
    """Read the command line, run, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="programs (default: generated ones)")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--programs", type=int, default=120)
    parser.add_argument("--jobs", type=int, default=6, help="programs at a time (default: 6)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch) / "programs"
        if arguments.folder is None:
            folder.mkdir()
            draw = random.Random(arguments.seed)
            for made in (schedules.program(k, draw) for k in range(arguments.programs)):
                (folder / f"test_{made.name}.py").write_text(schedules.HEAD + made.text)
        figures = compare(sorted(folder.glob("test_*.py")), arguments.jobs)
    keep(figures, arguments.json)


if __name__ == "__main__":
    main()
