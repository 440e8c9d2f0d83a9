"""A planted fault on forked ranks without this plugin: what torch alone makes of it. Usage: bare_fault.py MODULE TEST [monitored]

With ``monitored`` the ranks meet in a monitored_barrier when the function has ended.
"""

import importlib
import inspect
import os
import signal
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pytest_nsa.fixtures import DDP, FSDP, Group


def body(rank: int, world_size: int, store: str, function: object, *, monitored: bool) -> int:
    """One rank; its exit code."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timedelta(seconds=8)
    )
    common = {"rank": rank, "world_size": world_size, "device": "cpu", "backend": "gloo"}
    made = {
        "group": Group(**common), "ddp": DDP(**common, static_graph=False), "fsdp": FSDP(**common, version=2),
        "tmp_path": Path(store).parent,
    }  # fmt: skip
    try:
        function(**{name: made[name] for name in inspect.signature(function).parameters})  # type: ignore[operator, arg-type]
        if monitored:
            dist.monitored_barrier(timeout=timedelta(seconds=4), wait_all_ranks=True)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    function = getattr(importlib.import_module(f"tests_cpu.faults.planted_{sys.argv[1]}"), sys.argv[2])
    world_size = next(mark.args[0] for mark in function.pytestmark if mark.name == "world_size")
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                code = body(
                    rank, world_size, os.path.join(folder, "store"), function, monitored="monitored" in sys.argv
                )
                sys.stdout.flush()
                os._exit(code)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    for rank, code in enumerate(codes):
        print(f"process {rank} ended with {signal.Signals(-code).name if code < 0 else code}", flush=True)
    sys.exit(int(any(codes)))
