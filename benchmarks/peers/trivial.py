"""The trivial test of two ranks in several ways: prints the seconds of each test as a JSON list. Usage: trivial.py WAY COUNT

The ways: `floor`, two forks of this process; `spawn`, torch.multiprocessing.spawn; `pool`, a forkserver pool per test, as in
DeepSpeed's tests; `torchrun`, in a subprocess; its ranks run the way `rank`.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def reduce_once() -> bool:
    """Reduce, and return whether the sum is right."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item() == 2


def join(rank: int, store: str) -> None:
    """Form the group."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)


def join_and_reduce(rank: int, store: str) -> bool:
    """Run one rank."""
    join(rank, store)
    return reduce_once()


def spawned(rank: int, store: str) -> None:
    """Run one rank of `spawn`."""
    assert join_and_reduce(rank, store)
    dist.destroy_process_group()


def destroy(_: int) -> None:
    """End the group after the test."""
    dist.destroy_process_group()


def fork_two(run: Callable[[int], bool]) -> None:
    """Fork two children that run, with their rank, and exit."""
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = int(not run(rank))
            finally:
                os._exit(code)
        pids.append(pid)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0


def floor(store: str) -> None:
    """Fork two children that form a group, reduce once and exit."""
    fork_two(lambda rank: join_and_reduce(rank, store))


def spawn(store: str) -> None:
    """Start two processes."""
    mp.spawn(spawned, args=(store,), nprocs=2)


def pool(store: str) -> None:
    """Start a pool of two."""
    with mp.get_context("forkserver").Pool(2) as workers:
        assert all(workers.starmap(join_and_reduce, [(0, store), (1, store)], chunksize=1))
        workers.map(destroy, range(2), chunksize=1)
        workers.close()
        workers.join()


def torchrun(_: str) -> None:
    """Start torch's launcher."""
    options = ["--nproc_per_node=2", "--master_port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, "rank"]
    subprocess.run(command, check=True, capture_output=True)


WAYS = {way.__name__: way for way in (floor, spawn, pool, torchrun)}


def main(way: str, count: int) -> None:
    """Run and time the tests."""
    torch.set_num_threads(1)
    gc.freeze()
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            started = time.perf_counter()
            WAYS[way](os.path.join(folder, f"store{number}"))
            times.append(time.perf_counter() - started)
    print(json.dumps(times))


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        dist.init_process_group("gloo")
        assert reduce_once()
        dist.destroy_process_group()
    else:
        main(sys.argv[1], int(sys.argv[2]))
