"""Programs as users write them in which nothing is wrong, however it looks (see healthy_pauses.py); written by hands that had not read the rules."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import importlib
import io
import logging
import logging.handlers
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from pytest_nsa import world_size


def ranks():
    return dist.get_rank(), dist.get_world_size()


def compute(seconds):
    """Pure Python work for some time."""
    end, total, i = time.monotonic() + seconds, 0.0, 0
    while time.monotonic() < end:
        for _ in range(2000):
            i += 1
            total += (i * 7919 % 104729) ** 0.5
    return total


@world_size(3)
def test_evaluation_on_rank0_alone():
    """Rank 0 evaluates alone, three seconds each time, while the others wait in a barrier."""
    rank, _ = ranks()
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for _ in range(5):
            opt.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            opt.step()
        if rank == 0:
            model.eval()
            end = time.monotonic() + 3.0
            with torch.no_grad():
                while time.monotonic() < end:
                    model.module(torch.randn(16, 8)).argmax(-1)
            model.train()
        dist.barrier()


@world_size(4)
def test_slow_checkpoint_and_polling(tmp_path):
    """Rank 2 writes a checkpoint piece by piece with pauses, as to a slow disk, and the others poll for its marker file before they read it."""
    rank, _ = ranks()
    done, path = tmp_path / "ckpt.done", tmp_path / "ckpt.bin"
    for step in range(4):
        x = torch.ones(16)
        dist.all_reduce(x)
    if rank == 2:
        with open(path, "wb") as f:
            for piece in range(6):
                f.write(os.urandom(100_000))
                f.flush()
                os.fsync(f.fileno())
                time.sleep(0.9)
        done.touch()
    else:
        while not done.exists():
            time.sleep(0.25)
    sizes = [None] * 4
    dist.all_gather_object(sizes, path.stat().st_size)
    assert set(sizes) == {600_000}


class SlowSamples(Dataset):
    """One sample of each rank is very slow to decode."""

    def __init__(self, rank):
        self.slow = {0: 9, 1: 20}.get(rank)

    def __len__(self):
        return 32

    def __getitem__(self, i):
        if i == self.slow:
            time.sleep(4.5)
        return torch.full((6,), float(i))


@world_size(2)
def test_loader_workers_with_slow_samples():
    """The loader's workers stall for 4.5 s on one sample, on each rank another, while the other rank waits in the all-reduce."""
    rank, _ = ranks()
    loader = DataLoader(SlowSamples(rank), batch_size=4, num_workers=2, prefetch_factor=1)
    seen = 0
    for batch in loader:
        total = batch.sum()
        dist.all_reduce(total)
        seen += len(batch)
    assert seen == 32


@world_size(2)
def test_recompiles_for_new_shapes():
    """Rank 1 compiles (with the eager backend) anew for many shapes, and pauses in between, while rank 0 does plain eager work."""
    rank, _ = ranks()
    x = torch.ones(1)
    dist.all_reduce(x)

    def block(t, k):
        for _ in range(k):
            t = torch.tanh(t) * 1.01 + 0.1
        return t.sum()

    step = torch.compile(block, backend="eager", dynamic=False) if rank == 1 else block
    end = time.monotonic() + 4.0
    for k in range(1, 8):
        loss = step(torch.zeros(3, k + 1), k)
        if rank == 1:
            time.sleep(max(0.0, (end - time.monotonic()) / (8 - k)))
        dist.all_reduce(loss)
        assert torch.isfinite(loss)


@world_size(4)
def test_file_lock_taken_in_turn(tmp_path):
    """Every rank holds an exclusive file lock for 1.3 s to prepare a shared cache; the others block in flock until it is their turn."""
    rank, world = ranks()
    path = tmp_path / "cache.lock"
    dist.barrier()
    with open(path, "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        try:
            time.sleep(1.3)
            with open(tmp_path / "cache.txt", "a") as cache:
                cache.write(f"{rank}\n")
        finally:
            fcntl.flock(f, fcntl.LOCK_UN)
    dist.barrier()
    assert sorted((tmp_path / "cache.txt").read_text().split()) == [str(r) for r in range(world)]


class Uploader(threading.Thread):
    """Takes records off a queue, each one slow, with a heartbeat to a logger."""

    def __init__(self, log):
        super().__init__(daemon=True)
        self.queue, self.log, self.sent = queue.Queue(maxsize=3), log, 0

    def run(self):
        while (record := self.queue.get()) is not None:
            time.sleep(0.45)
            self.sent += 1
            self.log.info("sent %d: %s", self.sent, record)
            self.queue.task_done()


@world_size(3)
def test_uploader_with_back_pressure():
    """Rank 1 pushes records into a short queue whose thread is slow, so it blocks in put() and at last in join(); the others wait in the all-reduce."""
    rank, _ = ranks()
    log = logging.Logger(f"upload{rank}")
    log.addHandler(logging.handlers.MemoryHandler(1000, target=logging.StreamHandler(io.StringIO())))
    uploader = Uploader(log)
    uploader.start()
    for step in range(12):
        x = torch.rand(4)
        dist.all_reduce(x)
        if rank == 1 or step % 6 == 0:
            uploader.queue.put(float(x.sum()))
    uploader.queue.put(None)
    uploader.join()
    assert uploader.sent == (12 if rank == 1 else 2)
    dist.barrier()


@world_size(5)
def test_subgroups_at_different_speeds():
    """The group {0, 3} makes 120 fast steps, the group {1, 2, 4} five slow ones, and they meet at the end in the world."""
    rank, _ = ranks()
    fast, slow = dist.new_group([0, 3]), dist.new_group([1, 2, 4])
    mine, steps, pause = (fast, 120, 0.002) if rank in (0, 3) else (slow, 5, 1.0)
    x = torch.ones(4)
    for step in range(steps):
        if rank in (2, 3):
            time.sleep(pause)
        y = x * step
        dist.all_reduce(y, group=mine)
        if step % 4 == 3:
            dist.barrier(group=mine)
    dist.all_reduce(x)
    assert float(x[0]) == 5.0


@world_size(3)
def test_client_retries_until_server_is_up(tmp_path):
    """Rank 2 serves a configuration over a socket, but only after 4.5 s of preparation; the others retry with growing pauses, and then read."""
    rank, _ = ranks()
    address = f"\0config-{zlib.crc32(str(tmp_path).encode())}"
    if rank == 2:
        compute(1.5)
        time.sleep(3.0)
        server = socket.socket(socket.AF_UNIX)
        server.bind(address)
        server.listen(4)
        for _ in range(2):
            client, _ = server.accept()
            time.sleep(0.5)
            client.sendall(b"lr=0.5")
            client.close()
        server.close()
        text = "lr=0.5"
    else:
        delay, client = 0.1, None
        while client is None:
            try:
                client = socket.socket(socket.AF_UNIX)
                client.connect(address)
            except OSError:
                client.close()
                client = None
                time.sleep(delay)
                delay = min(delay * 1.5, 1.0)
        parts = []
        while data := client.recv(64):
            parts.append(data)
        client.close()
        text = b"".join(parts).decode()
    t = torch.tensor([float(text.split("=")[1])])
    dist.all_reduce(t)
    assert float(t) == 1.5


@world_size(4)
def test_join_with_very_uneven_inputs():
    """Rank 3 has twenty batches and takes its time, rank 0 has two; DDP's join shadows the rest."""
    rank, _ = ranks()
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.join():
        for step in range([2, 5, 9, 20][rank]):
            if rank == 3:
                time.sleep(0.25)
            opt.zero_grad()
            model(torch.randn(3, 6)).abs().mean().backward()
            opt.step()
    weights = [torch.empty_like(model.module.weight) for _ in range(4)]
    dist.all_gather(weights, model.module.weight.detach())
    assert all(torch.allclose(weights[0], w) for w in weights)


@world_size(2)
def test_native_code_with_and_without_gil():
    """Rank 0 is inside native code that keeps the GIL for 2 s, then in a slow regular expression and in a long sort; rank 1 waits."""
    rank, _ = ranks()
    x = torch.ones(2)
    dist.all_reduce(x)
    if rank == 0:
        ctypes.PyDLL(None).usleep(900_000)
        ctypes.PyDLL(None).usleep(900_000)
        ctypes.CDLL(None).usleep(900_000)
        assert re.match(r"(a+)+$", "a" * 20 + "b") is None
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            numbers = [random.random() for _ in range(200_000)]
            numbers.sort()
            torch.rand(500, 500).sort()
    dist.barrier()


@world_size(4)
def test_pipeline_with_slow_first_stage():
    """A pipeline of four stages with microbatches: the first stage warms up for 3 s and sends slowly, so the last one sits in recv for long."""
    rank, world = ranks()
    stage = nn.Linear(5, 5)
    if rank == 0:
        time.sleep(3.0)
    with torch.no_grad():
        for micro in range(6):
            if rank == 0:
                x = torch.full((2, 5), float(micro))
                time.sleep(0.4)
            else:
                x = torch.empty(2, 5)
                dist.recv(x, rank - 1, tag=micro)
            y = torch.tanh(stage(x))
            if rank < world - 1:
                dist.send(y, rank + 1, tag=micro)
    dist.barrier()


@world_size(3)
def test_child_process_and_signal_timer():
    """Rank 1 waits for a converter process that reports line by line, rank 2 has a timer whose signal handler counts, rank 0 waits in the gathering."""
    rank, _ = ranks()
    got = 0
    if rank == 1:
        code = "import time\nfor i in range(10):\n    print(i, flush=True)\n    time.sleep(0.5)"
        with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout:
                got += 1
        assert child.returncode == 0
    elif rank == 2:

        def beat(signum, frame):
            nonlocal got
            got += 1

        old = signal.signal(signal.SIGVTALRM, beat)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.05, 0.05)
        compute(4.0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)
    counts = [None] * 3
    dist.all_gather_object(counts, got)
    assert counts[0] == 0 and counts[1] == 10 and counts[2] > 0


@world_size(4)
def test_late_handles_pool_and_asyncio():
    """Each rank starts its collectives asynchronously and waits for them late: rank 3 imports and computes first, rank 1 runs a thread pool, rank 2 an event loop."""
    rank, _ = ranks()
    first, second = torch.ones(8), torch.full((3,), float(rank))
    handles = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, op=dist.ReduceOp.MAX, async_op=True)]
    if rank == 1:
        with ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(compute if i % 2 else time.sleep, 1.2) for i in range(9)]
            assert sum(1 for _ in as_completed(jobs)) == 9
    elif rank == 2:

        async def main():
            lock = asyncio.Lock()

            async def job(i):
                async with lock:
                    await asyncio.sleep(0.5)
                return i

            return await asyncio.gather(*(job(i) for i in range(9)))

        assert asyncio.run(main()) == list(range(9))
    elif rank == 3:
        for name in ("torch.distributions", "sqlite3", "xml.dom.minidom", "unittest.mock", "email.mime.text"):
            importlib.import_module(name)
        compute(3.5)
    late = torch.ones(1)
    handles.append(dist.all_reduce(late, async_op=True))
    for handle in reversed(handles):
        handle.wait()
    assert float(first[0]) == 4.0 and float(second[0]) == 3.0 and float(late) == 4.0
