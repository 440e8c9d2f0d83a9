"""A planted fault on forked ranks without this plugin: what torch alone makes of it. Usage: bare_fault.py MODULE TEST [MODE ...]

With ``healthy`` the program has no fault. With ``leave`` each rank writes its flight recorder's dump, its stacks and its exception
into the folder FR_FOLDER once it waits, and ends then.
"""

import faulthandler
import functools
import importlib
import inspect
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pytest_nsa.fixtures import DDP, FSDP, Group
from tests_cpu.faults.planting import NO_RANK, programs_of

LOOK_S = 3.0  # from one look to the next
LOOKS = 2  # in a row at which a rank has used no CPU: then it waits, as a pause may last one
LEAVE_S = 30.0  # at most, for a rank that computes


def leave(rank: int, world_size: int, ended: threading.Event) -> None:
    """Write what a rank of a job leaves that is ended at a limit: a rank that has ended has no stack.

    This runs in a thread, which needs the GIL, as the watchdog of a user.
    """
    folder, began, used, idle = Path(os.environ["FR_FOLDER"]), time.monotonic(), -1.0, 0
    while idle < LOOKS and time.monotonic() - began < LEAVE_S:
        time.sleep(LOOK_S)
        now = time.process_time()
        idle = idle + 1 if now - used < 0.05 else 0
        used = now
    (folder / f"trace_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())
    if not ended.is_set():
        with (folder / f"stack_{rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file)
    while len(list(folder.glob("trace_*"))) < world_size and time.monotonic() - began < LEAVE_S + 2:
        time.sleep(0.2)  # a rank that ends breaks the connections of others
    time.sleep(0.2)
    os._exit(0)


def body(rank: int, world_size: int, store: str, function: object, *, leaves: bool) -> int:
    """One rank; its exit code."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    limit = timedelta(seconds=2 * LEAVE_S if leaves else 8)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, timeout=limit, store=dist.FileStore(store, world_size)
    )
    ended = threading.Event()
    if leaves:
        threading.Thread(target=leave, args=(rank, world_size, ended)).start()
    common = {"rank": rank, "world_size": world_size, "device": "cpu", "backend": "gloo"}
    made = {
        "group": Group(**common), "ddp": DDP(**common, static_graph=False), "fsdp": FSDP(**common, version=2),
        "tmp_path": Path(store).parent,
    }  # fmt: skip
    try:
        function(**{name: made[name] for name in inspect.signature(function).parameters if name in made})  # type: ignore[operator, arg-type]
    except BaseException:
        traceback.print_exc()
        if leaves:
            text = "".join(f"[rank{rank}]: {line}\n" for line in traceback.format_exc().splitlines())
            Path(os.environ["FR_FOLDER"], f"log_{rank}.txt").write_text(text)
        return 1
    finally:
        ended.set()
        if leaves:
            threading.Event().wait()
    return 0


def run(file: str, name: str, *modes: str) -> int:
    """Run a program on forked ranks; return 1 where one of them failed, else 0."""
    module = importlib.import_module(f"tests_cpu.faults.programs.{file}")
    planted = programs_of(module)[name]
    function = getattr(module, name)
    takes, healthy = inspect.signature(function).parameters, "healthy" in modes
    given = {"culprit": NO_RANK if healthy else planted.rank, "faulty": not healthy}
    function = functools.partial(function, **{name: given[name] for name in given if name in takes})
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as server:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.getsockname()[1]))
        pids = []
        for rank in range(planted.n):
            pid = os.fork()
            if pid == 0:
                code = body(rank, planted.n, os.path.join(folder, "store"), function, leaves="leave" in modes)
                sys.stdout.flush()
                os._exit(code)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    for rank, code in enumerate(codes):
        if code < 0 and "leave" in modes:  # as torchrun's launcher reports it
            with Path(os.environ["FR_FOLDER"], "launcher.log").open("a") as log:
                log.write(f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {pids[rank]})\n")
        print(f"process {rank} ended with {signal.Signals(-code).name if code < 0 else code}", flush=True)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
