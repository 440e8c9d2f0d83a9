"""The ten kinds of fault that NVIDIA's resiliency extension injects without a GPU, on one of four ranks that train.

    python benchmarks/fault_kinds.py --json benchmarks/results/fault_kinds.json

The kinds are made again by hand. The test below runs for each, and without a fault; rank 2 gets it, after a second.
"""

import ctypes
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_nsa import world_size
from pytest_nsa.fixtures import Group

AFTER_S, HEALTHY_S, RANK = 1.0, 2.0, 2
KINDS = {
    "SIGKILL": "rank_died", "SIGTERM": "rank_died", "SIGINT": "rank_exception", "SIGSTOP": "rank_stopped", "SIGABRT": "rank_died",
    "segmentation fault": "rank_died", "exception": "rank_exception", "asynchronous exception": "rank_exception",
    "exception of a handler": "rank_exception", "the GIL is kept": "gil_held", "none": "",
}  # fmt: skip


class Fault(Exception):
    """A fault that is an exception."""


def raise_fault(*_: object) -> None:
    """Raise as a signal's handler."""
    raise Fault


def inject(kind: str) -> None:
    """Make a fault of this process, in a thread."""
    if kind == "segmentation fault":
        ctypes.string_at(0)
    elif kind == "asynchronous exception":
        main = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(Fault))
    elif kind == "the GIL is kept":
        ctypes.PyDLL(None).sleep(1000)
    elif kind != "exception":
        os.kill(os.getpid(), signal.SIGUSR1 if kind == "exception of a handler" else signal.Signals[kind])


@world_size(4)
@pytest.mark.parametrize("kind", KINDS)
def test_kind(group: Group, kind: str) -> None:
    """Train until the fault, or for some seconds without one."""
    model = DistributedDataParallel(nn.Linear(64, 64))
    has_fault = kind != "none" and group.rank == RANK
    if has_fault:
        signal.signal(signal.SIGUSR1, raise_fault)
        threading.Timer(AFTER_S, inject, (kind,)).start()
    began, is_over = time.monotonic(), torch.zeros(1)
    while not is_over:
        passed_s = time.monotonic() - began
        if has_fault and kind == "exception" and passed_s > AFTER_S:
            raise Fault
        model(torch.ones(4, 64)).sum().backward()
        is_over.fill_(kind == "none" and passed_s > HEALTHY_S)
        dist.broadcast(is_over, src=0)


def main() -> None:
    """Run the test in a folder, and compare its verdicts with the kinds."""
    from figures import keep, parser_of, run_tests  # beside this file, which ranks import from elsewhere

    arguments = parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(__file__, Path(folder, "test_kinds.py"))
        verdicts = run_tests(
            Path(folder), "-o", "ranks_hang_after=3", "-o", "ranks_timeout=40", "-o", "ranks_rerun=off"
        )
    found = {nodeid.partition("[")[2].rstrip("]"): verdict for nodeid, verdict in verdicts.items()}
    figures = {}
    for kind, cause in KINDS.items():
        named = found[kind].get("cause", ""), found[kind].get("ranks", [])
        figures[kind] = {"cause": named[0], "ranks": named[1], "right": named == (cause, [RANK] if cause else [])}
    keep({"kinds": figures, "right": sum(bool(f["right"]) for f in figures.values())}, arguments.json)


if __name__ == "__main__":
    main()
