"""Lifetimes, exceptions, hooks and random numbers of a program are the same with tracers and without."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests_cpu.sockets import free_port
from tests_cpu.warm import WarmPython

LIFETIMES = """
import gc, json, os, time, weakref
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
found = {}

def is_gone(reference):
    return reference() is None

def work_of_a_collective():
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    return weakref.ref(work)

def dropped_work_of_a_collective():
    work = dist.all_reduce(torch.ones(2), async_op=True)
    return weakref.ref(work)

def work_of_a_message():
    work = dist.isend(torch.ones(2), 1) if rank == 0 else dist.irecv(torch.ones(2), 0)
    work.wait()
    return weakref.ref(work)

def dropped_work_of_a_message():
    work = dist.irecv(torch.ones(2), 1 - rank, tag=9)
    return weakref.ref(work)

def group():
    made = dist.new_group([0, 1])
    dist.barrier(group=made)
    dist.destroy_process_group(made)
    return weakref.ref(made)

def payload():
    x = torch.ones(3)
    dist.all_reduce(x)
    return weakref.ref(x)

def output():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    out = model(torch.ones(2, 4))
    storage = weakref.ref(out.untyped_storage())
    return weakref.ref(out), weakref.ref(model), weakref.ref(model[0].weight)

def trained():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    return weakref.ref(model), weakref.ref(optimizer), weakref.ref(loss), weakref.ref(model.module.weight.grad)

class Failing(nn.Module):
    def forward(self, x):
        raise KeyError("in the forward")

class OurError(Exception):
    pass

class Raises(nn.Module):
    def forward(self, x):
        raise OurError("in the forward")

def exception():
    try:
        nn.Sequential(Raises())(torch.ones(1))
    except OurError as error:
        return weakref.ref(error)

torch.manual_seed(0)
for make in (work_of_a_collective, work_of_a_message, dropped_work_of_a_message, group, payload, output, trained, exception):
    references = make()
    references = references if isinstance(references, tuple) else (references,)
    gc.collect()
    deadline = time.monotonic() + 5
    while not all(map(is_gone, references)) and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread of gloo's has a tensor for a moment longer than the call lasts
    found[make.__name__] = [is_gone(r) for r in references]
reference = dropped_work_of_a_collective()
found["dropped_work_of_a_collective"] = is_gone(reference)
dist.barrier()

texts = {}
for name, call in {
    "forward": lambda: nn.Sequential(Failing())(torch.ones(1)),
    "root": lambda: dist.broadcast(torch.ones(1), src=7),
    "tensor": lambda: dist.all_reduce("text"),
    "peer": lambda: dist.send(torch.ones(1), rank),
    "list": lambda: dist.all_gather([torch.ones(1)], torch.ones(2)),
}.items():
    try:
        call()
        texts[name] = "completed"
    except Exception as error:
        texts[name] = f"{type(error).__name__}: {error}"
found["exceptions"] = texts

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))
loss = model(torch.ones(2, 4)).sum()
loss.backward()
found["hooks"] = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
found["numbers"] = [loss.item(), torch.rand(1).item(), *(p.grad.double().sum().item() for p in model.parameters())]
found["ids"] = len({id(dist.all_reduce(torch.ones(1), async_op=True)) for _ in range(1)})
open(os.environ["FOUND"] + str(rank), "w").write(json.dumps(found))
dist.barrier()
os._exit(0)
"""


def run(warm: WarmPython, tmp_path: Path, source: str, *, level: str = "") -> list[Any]:
    """Run a program on two ranks as torchrun does, traced at ``level`` ('' for not at all); return what each wrote to the file that
    FOUND names.
    """
    where = tmp_path / (level or "plain")
    where.mkdir()
    script = tmp_path / "program.py"
    script.write_text(source)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NSA_", "PYTEST_"))} | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "FOUND": f"{where}/found",
    }  # fmt: skip
    if level:
        env |= {"NSA_TRACE_DIR": str(where / "evidence"), "NSA_TRACE_LEVEL": level}
    ranks = [warm.popen(str(script), env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE) for rank in range(2)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
    assert (where / "evidence" / "rank1").is_dir() == bool(level)
    return [json.loads((where / f"found{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("level", ["full", pytest.param("light", marks=pytest.mark.slow)])
def test_a_traced_program_sees_what_an_untraced_one_sees(warm: WarmPython, tmp_path: Path, level: str) -> None:
    plain = run(warm, tmp_path, LIFETIMES)
    print(plain)
    assert run(warm, tmp_path, LIFETIMES, level=level) == plain


KEEPS_ITS_GROUP = """
import torch, torch.distributed as dist
from torch import nn

def train():
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()

dist.init_process_group("gloo")
train()
"""


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "register_post_hook"), reason="groups have hooks since torch 2.14")
def test_a_process_that_keeps_its_group_ends_as_it_would_untraced(tmp_path: Path) -> None:
    """C++ frees such a group once Python has ended; torch 2.14.1 then ends by SIGSEGV where the group still has a hook."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    variables["NSA_TRACE_DIR"] = str(tmp_path)
    ended = subprocess.run([sys.executable, "-c", KEEPS_ITS_GROUP], env=os.environ | variables, timeout=120)
    assert ended.returncode == 0
    assert (tmp_path / "rank0" / "board.bin").is_file()
