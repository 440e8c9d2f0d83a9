"""Calls that C++ starts, in DDP's reducer or in an extension, are on the board where groups have hooks: from torch 2.14 on."""

# options: -o timeout=60 -p xdist -n 2
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from nsa.trace.session import installed
from pytest_nsa import world_size

if not hasattr(dist.ProcessGroup, "register_post_hook"):
    pytest.skip("torch below 2.14 has no hooks", allow_module_level=True)

from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor

broadcast_in_cpp = torch._C._distributed_c10d._broadcast_coalesced  # as an extension's: it calls nothing of Python's
MANY = 1 << 20


@world_size(3)
def test_an_extension_that_one_rank_does_not_call(group):  # -> skipped_collective 1 certain here: broadcast #5
    for step in range(5):
        if not (group.rank == 1 and step == 2):
            broadcast_in_cpp(dist.group.WORLD, [torch.ones(4)], MANY, 0)  # HERE
        dist.barrier()


@world_size(3)
def test_another_size_for_an_extension(group):  # -> CRASH collective_mismatch 1 here
    for step in range(5):
        size = 3 if group.rank == 1 and step == 2 else 4
        broadcast_in_cpp(dist.group.WORLD, [torch.ones(size)], MANY, 0)  # HERE
        dist.all_reduce(torch.ones(1))


def reduced_in_cpp():
    model = DistributedDataParallel(nn.Linear(8, 8))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return model


@world_size(3)
def test_a_backward_less_under_a_builtin_hook(group):  # -> skipped_collective 1 here
    model = reduced_in_cpp()
    for step in range(5):
        loss = model(torch.ones(4, 8)).sum()
        if not (group.rank == 1 and step == 2):
            loss.backward()  # HERE
    dist.barrier()


@world_size(3)
def test_a_reduction_more_under_a_builtin_hook(group):  # -> CRASH extra_collective 1 here
    model = reduced_in_cpp()
    for step in range(5):
        loss = model(torch.ones(4, 8)).sum()
        if group.rank == 1 and step == 2:
            dist.all_reduce(loss)  # HERE
        loss.backward()


# A call that raises before it begins is none: the next one has its number.
@world_size(3)
def test_a_call_of_an_extension_that_is_refused(group):  # -> skipped_collective 1: barrier #3
    dist.barrier()
    if group.rank == 2:
        with pytest.raises(RuntimeError, match="root"):
            broadcast_in_cpp(dist.group.WORLD, [torch.ones(4)], MANY, 7)
    broadcast_in_cpp(dist.group.WORLD, [torch.ones(4)], MANY, 0)
    if group.rank != 1:
        dist.barrier()
    dist.all_reduce(torch.ones(4))


@pytest.fixture
def counted(group):
    """Compare the board with a hook: each call that it sees has an entry on the board, or is part of one that is waited in."""
    board, on_board = installed().board, []
    entered = board.count("collectives_entered")

    def after(call):
        nonlocal entered
        before, entered = entered, board.count("collectives_entered")
        on_board.append(entered > before or board.count("blocked_in") > 0)

    dist.group.WORLD.register_post_hook(1, after)
    yield
    dist.group.WORLD.unregister_post_hook(1)
    assert len(on_board) > 4
    assert sum(on_board) >= 0.99 * len(on_board)


def train(model):
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()


@world_size(2)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_all_calls_of_ddp(counted, options):  # -> passes
    train(DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), **options))


@world_size(2)
def test_all_calls_of_a_builtin_hook(counted):  # -> passes
    train(reduced_in_cpp())


@world_size(2)
def test_all_calls_of_fsdp2(counted):  # -> passes
    mesh = dist.init_device_mesh("cpu", (2,))
    model = nn.Sequential(fully_shard(nn.Linear(8, 8), mesh=mesh), nn.Linear(8, 8))
    train(fully_shard(model, mesh=mesh))


@world_size(2)
def test_all_calls_of_tensors_that_are_distributed(counted):  # -> passes
    mesh = dist.init_device_mesh("cpu", (2,))
    one, other = (distribute_tensor(torch.ones(4, 4, requires_grad=True), mesh, [Shard(0)]) for _ in range(2))
    (one @ other).redistribute(mesh, [Shard(1)]).full_tensor().sum().backward()


def test_all_calls_of_a_pipeline(group, counted):  # -> passes
    stage = PipelineStage(nn.Linear(8, 8), group.rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).sum())
    batch = torch.ones(8, 8)
    for _ in range(2):
        schedule.step(batch) if group.rank == 0 else schedule.step(target=batch)


@world_size(2)
def test_all_calls_of_a_compiled_graph(counted):  # -> passes
    @torch.compile(backend="aot_eager")
    def mean_of_all(x):
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return functional.all_gather_tensor(total, 0, dist.group.WORLD).mean()

    for size in (2, 2, 4):
        assert mean_of_all(torch.ones(size)) == 4


@pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")
def test_recording_is_not_compiled(group):  # -> passes
    def twice_of_rank_0(x):
        y = x * 2
        broadcast_in_cpp(dist.group.WORLD, [y], MANY, 0)  # breaks the graph
        return y

    before = counters["frames"]["total"]
    compiled = torch.compile(twice_of_rank_0, backend="aot_eager")
    for _ in range(5):
        compiled(torch.ones(2))
    assert counters["frames"]["total"] - before == 2  # the two halves of the function


def test_all_calls_of_a_checkpoint_in_a_thread(group, counted):  # -> passes
    folder = [tempfile.mkdtemp() if group.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    for step in range(2):
        checkpoint.async_save({"weight": torch.ones(4)}, checkpoint_id=f"{folder[0]}/{step}").result()
