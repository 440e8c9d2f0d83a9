"""The healthy programs of `generated.py`, which makes one statement of one rank another one.

A statement that may change ends with #~ and what it is: a collective, a message or a key of a store. `step` is the round.
"""

import random

HEAD = """\
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

ODD = set()


def is_odd(step):
    return (dist.get_rank(), step) in ODD


def mean(x):
    dist.all_reduce(x)
    return x / dist.get_world_size()


def log(x):
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, x.tolist())


def log_mean(x):
    log(mean(x))


def ready():
    dist.barrier()


def ready_below():
    ready()


"""
# By name: the numbers of ranks, and the source.
PATTERNS: dict[str, tuple[tuple[int, ...], str]] = {
    "stages": (
        (2, 3, 4),
        """\
def forward(x, rank, n, step):
    if rank > 0:
        dist.recv(x, rank - 1, tag=1)  #~ message
    if rank < n - 1:
        dist.send(x * 2, rank + 1, tag=1)  #~ message

def backward(g, rank, n, step):
    if rank < n - 1:
        dist.recv(g, rank + 1, tag=2)  #~ message
    if rank > 0:
        dist.send(g / 2, rank - 1, tag=2)  #~ message

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    x, g = torch.ones(4), torch.ones(4)
    for step in range(5):
        forward(x, rank, n, step)
        backward(g, rank, n, step)
        dist.all_reduce(g)  #~ collective
""",
    ),
    "tree": (
        (4, 6, 7),
        """\
def reduce_up(x, rank, n, step):
    for child in (2 * rank + 1, 2 * rank + 2):
        if child < n:
            dist.recv(x, child)  #~ message
    if rank:
        dist.send(x, (rank - 1) // 2)  #~ message

def fan_down(x, rank, n, step):
    if rank:
        dist.recv(x, (rank - 1) // 2)  #~ message
    for child in (2 * rank + 1, 2 * rank + 2):
        if child < n:
            dist.send(x, child)  #~ message

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(6):
        x = torch.ones(3)
        reduce_up(x, rank, n, step)
        fan_down(x, rank, n, step)
    dist.barrier()
""",
    ),
    "server": (
        (3, 4),
        """\
def serve(x, n, step):
    for worker in range(1, n):
        dist.recv(x, worker)  #~ message
    for worker in range(1, n):
        dist.send(x, worker)  #~ message

def work(x, step):
    dist.send(x, 0)  #~ message
    dist.recv(x, 0)  #~ message

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.ones(4)
    for step in range(4):
        serve(x, n, step) if rank == 0 else work(x, step)
        dist.broadcast(x, 0)  #~ collective
""",
    ),
    "ring": (
        (2, 3, 4, 5),
        """\
def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(4), torch.empty(4)
    for step in range(4):
        sent = dist.isend(x, (rank + 1) % n, tag=step)
        dist.recv(y, (rank - 1) % n, tag=step)  #~ message
        sent.wait()
        log(y)  #~ collective
    dist.barrier()
""",
    ),
    "batch": (
        (3, 4),
        """\
def swap(rank, n, step, x):
    got = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, got, (rank - 1) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((3,), float(rank))
    for step in range(6):
        swap(rank, n, step, x)  #~ message
        dist.all_reduce(torch.ones(1))  #~ collective
    dist.barrier()
""",
    ),
    "leader": (
        (2, 3, 4),
        """\
def publish(store, step):
    store.set(f"round/{step}", str(step))  #~ key

def TEST(group):
    store = dist.PrefixStore("job", dist.distributed_c10d._get_default_store())
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(5):
        if rank == step % n:
            publish(store, step)
        else:
            store.wait([f"round/{step}"], timedelta(minutes=20))
        dist.all_reduce(torch.ones(2))  #~ collective
    dist.barrier()
""",
    ),
    "keys": (
        (2, 3, 5),
        """\
def exchange(store, rank, n, step):
    store.set(f"{step}/from/{rank}", f"{rank * step}")  #~ key
    return [store.get(f"{step}/from/{r}") for r in range(n)]

def TEST(group):
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(minutes=20))
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(6):
        exchange(store, rank, n, step)
        dist.all_reduce(torch.ones(1))  #~ collective
""",
    ),
    "mesh": (
        (4, 6),
        """\
def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    row = [dist.new_group([a, a + 1]) for a in range(0, n, 2)][rank // 2]
    column = [dist.new_group(list(range(a, n, 2))) for a in (0, 1)][rank % 2]
    for step in range(6):
        x = torch.ones(4)
        dist.all_reduce(x, group=row)  #~ collective
        dist.all_gather([torch.empty(4) for _ in range(n // 2)], x, group=column)  #~ collective
        if step % 3 == 2:
            dist.all_reduce(torch.ones(1))  #~ collective
    dist.barrier()
""",
    ),
    "handles": (
        (2, 3, 4),
        """\
def launch(tensors, step):
    works = []
    for x in tensors:
        works.append(dist.all_reduce(x, async_op=True))  #~ collective
    return works

def TEST(group):
    tensors = [torch.ones(3), torch.ones(5)]
    for step in range(6):
        for work in launch(tensors, step):
            work.wait()
        dist.broadcast(tensors[0], 0)  #~ collective
    dist.barrier()
""",
    ),
    "objects": (
        (2, 3, 4),
        """\
def agree(step, rank, n):
    plan = [{"step": step} if rank == step % n else None]
    dist.broadcast_object_list(plan, src=step % n)  #~ collective

def collect(step, rank, n):
    rows = [None] * n if rank == 0 else None
    dist.gather_object({"rank": rank}, rows, dst=0)  #~ collective

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(5):
        agree(step, rank, n)
        dist.all_reduce(torch.ones(1))  #~ collective
        collect(step, rank, n)
        dist.barrier()  #~ collective
""",
    ),
    "replicas": (
        (2, 3),
        """\
def TEST(group):
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()  #~ collective
        optimizer.step()
        dist.all_reduce(torch.ones(2))  #~ collective
        if step % 3 == 2:
            log(torch.ones(2))  #~ collective
""",
    ),
}
# What draws its statements: a round of three to five of these.
STATEMENTS = (
    "dist.all_reduce(torch.ones(3))", "dist.barrier()", "dist.broadcast(x, 0)", "mean(x)", "log(x)", "log_mean(x)",
    "dist.all_gather([torch.empty(4) for _ in range(n)], x)", "dist.all_to_all_single(torch.empty(2 * n), torch.ones(2 * n))",
    "dist.all_reduce(torch.ones(2), group=pair)", "dist.all_reduce(x, op=dist.ReduceOp.MAX)", "ready_below()",
)  # fmt: skip
# What iterates over epochs: what is before it, its header, and the epoch's number.
LOOPS = (
    ("", "for step in range(4):", "step"),
    ("", "for step, name in enumerate('abcd'):", "step"),
    ("step = -1", "while (step := step + 1) < 4:", "step"),
    ("", "for name in ('a', 'b', 'c', 'd'):", "'abcd'.index(name)"),
    ("", "for batch in torch.utils.data.DataLoader(torch.arange(4.0)):", "int(batch)"),
)


def drawn(draw: random.Random) -> tuple[str, tuple[int, ...], str]:
    """Return a pattern's name, its numbers of ranks and its source; some are put together from `STATEMENTS` and `LOOPS`."""
    name = draw.choice([*PATTERNS, "drawn", "drawn", "drawn", "epochs", "epochs"])
    if name in PATTERNS:
        return name, *PATTERNS[name]
    before, header, number = draw.choice(LOOPS) if name == "epochs" else LOOPS[0]
    calls = draw.sample(STATEMENTS, 1 if name == "epochs" else draw.randint(3, 5))
    body = [f"{call}  #~ collective" for call in calls]
    if name == "epochs":
        batches = draw.choice(
            (
                ["mean(x)"],
                ["for _ in range(3):", "    mean(x)"],
                ["left = 3", "while left:", "    mean(x)", "    left -= 1"],
            )
        )
        body = draw.choice(([*body, *batches], [*batches, *body], [*batches, *body, *batches]))
    if number != "step":
        body.insert(0, f"step = {number}")
    setup = ["rank, n, x = dist.get_rank(), dist.get_world_size(), torch.ones(4)", "pair = dist.new_group()", before]
    lines = [*filter(None, setup), header, *(f"    {line}" for line in body), "dist.barrier()"]
    return (
        name,
        (2, 3, 4, 5) if name == "drawn" else (2, 2, 3),
        "def TEST(group):\n" + "".join(f"    {line}\n" for line in lines),
    )
