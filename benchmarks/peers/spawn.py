"""The trivial test by torch.multiprocessing.spawn: prints the seconds of each as a JSON list. Usage: spawn.py COUNT"""

import json
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def body(rank: int, store: str) -> None:
    """One rank."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.destroy_process_group()


if __name__ == "__main__":
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(int(sys.argv[1])):
            started = time.perf_counter()
            mp.spawn(body, args=(os.path.join(folder, f"store{number}"),), nprocs=2)
            times.append(time.perf_counter() - started)
    print(json.dumps(times))
