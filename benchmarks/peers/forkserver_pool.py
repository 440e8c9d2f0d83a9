"""The trivial test in a forkserver pool made for it, as DeepSpeed's tests do. Usage: forkserver_pool.py COUNT"""

import json
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def body(rank: int, store: str) -> bool:
    """One rank."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item() == 2


def destroy(_: int) -> None:
    """After the test."""
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.set_start_method("forkserver")
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(int(sys.argv[1])):
            started = time.perf_counter()
            with mp.Pool(2) as pool:
                store = os.path.join(folder, f"store{number}")
                assert all(pool.starmap(body, [(0, store), (1, store)], chunksize=1))
                pool.map(destroy, range(2), chunksize=1)
                pool.close()
                pool.join()
            times.append(time.perf_counter() - started)
    print(json.dumps(times))
