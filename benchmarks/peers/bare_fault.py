"""A planted fault on forked ranks without this plugin: what torch alone makes of it. Usage: bare_fault.py MODULE TEST [MODE]

With ``monitored`` the ranks meet in a monitored_barrier when the function has ended. After `LOOK_S` seconds: with ``recorder``
each rank dumps torch's flight recorder into the folder FR_FOLDER; with ``leave`` its stacks and its exception too, and ends then;
with ``debug`` the pages of torch's debug server are fetched; with ``py-spy`` every rank's stacks are dumped.
"""

import faulthandler
import functools
import importlib
import inspect
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pytest_nsa.fixtures import DDP, FSDP, Group
from tests_cpu.faults.planting import programs_of

LOOK_S = 6.0  # before torch's own limit of 8 s


def dump_recorder(rank: int, after: float) -> None:
    """Dump the flight recorder, as a user's watchdog would: from a thread, which needs the GIL."""
    time.sleep(after)
    Path(os.environ["FR_FOLDER"], f"trace_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())


def leave(rank: int, ended: threading.Event) -> None:
    """Write what a rank of a job leaves that is ended at a limit: a rank that has ended has no stack."""
    dump_recorder(rank, LOOK_S)
    if not ended.is_set():
        with Path(os.environ["FR_FOLDER"], f"stack_{rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file)
    time.sleep(2.0)  # until the others have written theirs: a rank that ends breaks their connections
    os._exit(0)


def look(mode: str, pids: list[int], port: int) -> None:
    """Print what a tool shows of the ranks that are there after a while."""
    time.sleep(LOOK_S)
    if mode == "debug":
        for page in ("stacks", "pyspy_dump", "fr_trace"):
            try:
                print(
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=4)
                    .read()
                    .decode(errors="replace"),
                    flush=True,
                )
            except OSError as error:
                print(f"{page}: {error}", flush=True)
    for pid in pids if mode == "py-spy" else ():
        tool = shutil.which("py-spy")
        if tool is not None and Path(f"/proc/{pid}/stat").exists():
            done = subprocess.run(
                [tool, "dump", "--pid", str(pid)], text=True, capture_output=True, timeout=6, check=False
            )
            print(f"-- process {pids.index(pid)}\n{done.stdout}", flush=True)


def body(rank: int, world_size: int, store: str, function: object, mode: str, port: int) -> int:
    """One rank; its exit code."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    # The debug server's pages come through the store that the launcher's variables name.
    place = {"init_method": "env://"} if mode == "debug" else {"store": dist.FileStore(store, world_size)}
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=8), **place)  # type: ignore[arg-type]
    if mode == "recorder":
        threading.Thread(target=dump_recorder, args=(rank, LOOK_S), daemon=True).start()
    ended = threading.Event()
    if mode == "leave":
        threading.Thread(target=leave, args=(rank, ended)).start()
    if mode == "debug":
        from torch.distributed.debug import start_debug_server

        start_debug_server(port=port)
    common = {"rank": rank, "world_size": world_size, "device": "cpu", "backend": "gloo"}
    made = {
        "group": Group(**common), "ddp": DDP(**common, static_graph=False), "fsdp": FSDP(**common, version=2),
        "tmp_path": Path(store).parent,
    }  # fmt: skip
    try:
        function(**{name: made[name] for name in inspect.signature(function).parameters if name in made})  # type: ignore[operator, arg-type]
        if mode == "monitored":
            dist.monitored_barrier(timeout=timedelta(seconds=4), wait_all_ranks=True)
    except BaseException:
        traceback.print_exc()
        if mode == "leave":
            text = "".join(f"[rank{rank}]: {line}\n" for line in traceback.format_exc().splitlines())
            Path(os.environ["FR_FOLDER"], f"log_{rank}.txt").write_text(text)
        return 1
    finally:
        ended.set()
        if mode == "leave":
            threading.Event().wait()
        if mode == "recorder":
            dump_recorder(rank, 0.0)
    return 0


if __name__ == "__main__":
    module, name = importlib.import_module(f"tests_cpu.faults.programs.{sys.argv[1]}"), sys.argv[2]
    planted = programs_of(module)[name]
    function = getattr(module, name)
    if planted.rank is not None:
        function = functools.partial(function, culprit=planted.rank)
    with tempfile.TemporaryDirectory() as folder:
        mode = sys.argv[3] if len(sys.argv) > 3 else ""
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            port, meets_at = one.getsockname()[1], other.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(meets_at))
        pids = []
        for rank in range(planted.n):
            pid = os.fork()
            if pid == 0:
                code = body(rank, planted.n, os.path.join(folder, "store"), function, mode, port)
                sys.stdout.flush()
                os._exit(code)
            pids.append(pid)
        threading.Thread(target=look, args=(mode, pids, port), daemon=True).start()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    for rank, code in enumerate(codes):
        print(f"process {rank} ended with {signal.Signals(-code).name if code < 0 else code}", flush=True)
    sys.exit(int(any(codes)))
