"""Ranks that go apart at one call and stall at a later one: what was left out or added was like the call after it.

After generated programs (benchmarks/mutations.py), and programs whose authors had not read the rules. HERE marks the lines that a
verdict may name: those where they went apart.
"""

from __future__ import annotations

import socket
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests_cpu.faults.planting import AT, planted


class Meter:
    def __init__(self) -> None:
        self.values = torch.zeros(3)

    def sync(self) -> None:
        dist.all_reduce(self.values)


def gather(values: torch.Tensor, world_size: int) -> list[object]:
    rows: list[object] = [None] * world_size
    dist.all_gather_object(rows, values.tolist())  # HERE
    return rows


@planted("skipped_collective", [0], n=3, marked=True, reason="one call apart since barrier #12")
def test_the_last_barrier_is_like_the_round_s(group):
    loss = torch.ones(1)
    for step in range(6):
        dist.all_gather([torch.empty(1) for _ in range(3)], loss)
        dist.all_reduce(loss)
        if (group.rank, step) == (0, AT):
            break
        dist.barrier()  # HERE
    dist.barrier()


@planted("skipped_collective", [2], n=4, marked=True, reason="the call at test_planted.py:")
def test_a_round_of_two_groups_is_cut_short(group):
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][group.rank >= 2]
    meter = Meter()
    for step in range(6):
        dist.all_reduce(torch.ones(5))
        if (group.rank, step) == (2, AT):
            continue
        dist.all_reduce(torch.ones(2), group=mine)  # HERE
        meter.sync()
        dist.broadcast(torch.ones(4), 0)


@planted("extra_collective", [1], n=3, where=" in sync", reason="(called at test_planted.py:")
def test_a_helper_is_called_twice_in_a_round(group):
    """Both calls are the helper's: its callers tell them apart."""
    meter = Meter()
    for step in range(6):
        dist.broadcast(torch.ones(4), 0)
        if (group.rank, step) == (1, AT):
            meter.sync()
        meter.sync()
        gather(meter.values, group.world_size)


@planted("collective_mismatch", [2], n=3, marked=True)
def test_two_helpers_change_places(group):
    """Both branches of an ``if`` call what communicates: neither rank left anything out."""
    meter = Meter()
    for step in range(6):
        if (group.rank, step) == (2, AT):
            gather(meter.values, group.world_size)  # HERE
        else:
            meter.sync()  # HERE
        dist.all_reduce(torch.ones(100))
        if (group.rank, step) == (2, AT):
            meter.sync()
        else:
            gather(meter.values, group.world_size)


def average(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)  # HERE


@planted("extra_collective", [2], n=3, marked=True, reason="another round of the loop")
def test_an_attempt_more_in_a_step(group):
    """Its calls are those of a step more: the loops' counters alone tell that it is in the same one."""
    grads = [torch.ones(4), torch.ones(2)]
    for step in range(8):
        for attempt in range(3):
            average(grads)  # HERE
            if (group.rank, step, attempt) != (2, AT, 0):
                break
        dist.barrier()


@planted("skipped_collective", [1], n=4, marked=True)
def test_a_length_that_is_known_already(group):
    """A cache answers in place of the reduction; the rank comes round the loop past it."""
    longest: dict[int, int] = {}

    def padded(length: int) -> int:
        if length not in longest:
            most = torch.tensor(length)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)  # HERE
            longest[length] = int(most)
        return longest[length]

    grads = [torch.ones(4), torch.ones(2)]
    for length in [3, 4, 5, 4 if group.rank == 1 else 6, 7, 8]:
        padded(length)  # HERE
        average(grads)


class Shares:
    """A loader whose length is what all ranks have."""

    def __init__(self, rank: int) -> None:
        self.own = 4 + rank

    def __len__(self) -> int:
        lengths = gather(torch.tensor([self.own]), dist.get_world_size())  # HERE
        return min(int(n[0]) for n in lengths)  # type: ignore[index]

    def __iter__(self):
        for _ in range(len(self)):
            yield torch.ones(4)


@planted("extra_collective", [1], n=3, where="in gather")
def test_a_look_whether_there_is_a_loader(group):
    """`if loader` asks for its length, and so for every rank's; it lies between two rounds of the same calls."""
    for epoch in range(3):
        loader = Shares(group.rank)
        for i, batch in enumerate(loader):
            average([batch, torch.ones(2)])
            if (group.rank, epoch, i) == (1, 1, 2) and loader:  # HERE
                epoch += 0


@planted("skipped_collective", [0], n=3, marked=True)
def test_a_share_of_nothing(group):
    """What a class without samples skips is the last of a report; the rank is in the next epoch."""
    for epoch in range(5):
        counts = [0, 0]
        for step in range(3):
            average([torch.ones(4)])
            counts[step % 2] += (group.rank, epoch) != (0, AT) or step % 2 == 0
        for count in counts:
            try:
                dist.all_reduce(torch.tensor([1 / count, 0.0]), op=dist.ReduceOp.MAX)  # HERE
            except ZeroDivisionError:
                continue


class Saver:
    """Saves beside the training, in a thread, which all ranks begin by telling each other the name."""

    def __init__(self) -> None:
        self.around, self.thread = dist.new_group(), threading.Thread()

    def write(self, name: str, until: threading.Event) -> None:
        names: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(names, name, group=self.around)  # HERE
        until.wait()

    def begin(self, name: str, until: threading.Event) -> None:
        if not self.thread.is_alive():
            self.thread = threading.Thread(target=self.write, args=(name, until), daemon=True)
            self.thread.start()


@planted("skipped_collective", [0], n=3, marked=True)
def test_a_save_while_one_is_under_way(group):
    """The others' threads wait for a save that this rank has not begun; it has gone past the line where they join them."""
    saver, done = Saver(), threading.Event()
    done.set()
    slow = threading.Event()
    for step in range(6):
        dist.all_reduce(torch.ones(1))
        if step % 2:
            saver.begin(f"step{step}", slow if (group.rank, step) == (0, 1) else done)
            if group.rank or step > 1:
                saver.thread.join(None if group.rank else 0.1)
    slow.set()
    saver.thread.join()  # HERE
    dist.barrier()  # HERE


@planted("extra_collective", [1], n=4, marked=True)
def test_a_look_at_a_whole_weight(group):
    """The other ranks of its group are in later rounds, two of them at the end: the last one of all made the call alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    data, model = mesh.get_group("data"), mesh.get_group("model")
    whole = [torch.ones(4), torch.ones(4)]
    for step in range(8):
        dist.all_reduce(torch.ones(6), group=data)
        if (group.rank, step) == (1, AT):
            dist.all_gather(whole, torch.ones(4), group=model)  # HERE
    dist.barrier()


@planted("skipped_collective", [0], n=3, marked=True)
def test_a_call_that_is_refused(group):
    """Too few tensors to scatter: the rank that has them gets an exception, and goes on; the others wait."""
    given = torch.empty(1)
    for step in range(6):
        whole = [torch.ones(1)] * (2 if step == AT else 3)
        try:
            dist.scatter(given, whole if group.rank == 0 else None, 0)  # HERE
        except (RuntimeError, ValueError):
            given = torch.zeros(1)
        dist.all_reduce(given)


@planted("group_order_deadlock", [2], n=4, marked=True, reason="in another order")
def test_groups_by_the_order_of_a_set(group):
    members = {"pairs": [0, 1], "ends": [0, 3], "middle": [1, 2]}
    names = sorted(members) if group.rank == 2 else list(members)
    groups = {name: dist.new_group(members[name]) for name in names}  # HERE
    for name, own in groups.items():
        if group.rank in members[name]:
            dist.all_reduce(torch.ones(1), group=own)


@planted("group_order_deadlock", [0, 1, 2], n=3, marked=True, reason="different orders")
def test_neighbours_make_groups_in_a_circle(group):
    for other in ((group.rank + 1) % 3, (group.rank - 1) % 3):
        pair = dist.new_group(sorted((group.rank, other)), use_local_synchronization=True)  # HERE
        dist.all_reduce(torch.ones(1), group=pair)


@planted("p2p_unmatched", [1], n=2, marked=True)
def test_a_number_that_was_not_raised(group):
    """Messages are numbered by step; one rank did not count one, and sends under a number that it has used."""
    number = 1
    for step in range(6):
        if group.rank:
            dist.send(torch.ones(2), 0, tag=number)  # HERE
        else:
            dist.recv(torch.ones(2), 1, tag=number)
        number += (group.rank, step) != (1, AT)


@planted("io_stuck", [1], n=3, marked=True)
def test_a_key_under_another_name(group):
    """What asks is not called a store in the source."""
    own, attempt = dist.PrefixStore("rates", dist.distributed_c10d._get_default_store()), 0
    for step in range(6):
        attempt += (group.rank, step) == (1, AT)
        rates = dist.PrefixStore(str(attempt), own)
        if group.rank == 0:
            rates.set(f"{step}", "0.1")
        rates.get(f"{step}")  # HERE
        dist.all_reduce(torch.ones(1))


@planted("io_stuck", [0, 1], n=3, marked=True)
def test_two_send_before_they_receive(group, tmp_path):
    """A message that fits into the sockets' buffers, and one that does not."""
    ends = socket.socketpair() if group.rank == 2 else None
    path = str(tmp_path / "s")
    if group.rank == 0:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
    dist.barrier()
    link = None
    if group.rank == 1:
        link = socket.socket(socket.AF_UNIX)
        link.connect(path)
    elif group.rank == 0:
        link = listener.accept()[0]
    for step in range(6):
        if link is not None:
            message = bytes(100 if step < AT else 1 << 24)
            link.sendall(message)  # HERE
            link.recv(len(message))
        dist.all_reduce(torch.ones(1))
    assert ends is None or ends[0].close() is None


@planted("p2p_unmatched", [0], n=3, marked=True)
def test_rows_that_are_passed_over(group):
    """The head says that the rows are too old, and the learner takes them not; the actor that sends them is the one to look at."""
    weights = torch.zeros(3)
    for step in range(6):
        if group.rank == 0:
            for actor in (1, 2):
                head = torch.empty(1)
                dist.recv(head, actor)
                if head < 0:
                    continue
                dist.recv(torch.empty(4), actor)  # HERE
        else:
            dist.send(torch.tensor([-1.0 if (group.rank, step) == (2, AT) else 1.0]), 0)
            dist.send(torch.ones(4), 0)  # HERE
        dist.broadcast(weights, 0)


class TooLong(Exception):
    pass


@planted("extra_collective", [1], n=3, marked=True, reason="in an `except`")
def test_a_batch_again_in_halves(group):
    def forward(rows: int, most: int) -> None:
        dist.all_reduce(torch.ones(3))  # HERE
        if rows > most:
            raise TooLong
        dist.all_reduce(torch.ones(7))  # HERE

    for step in range(6):
        rows = 8 if (group.rank, step) == (1, AT) else 4
        try:
            forward(rows, 4)
        except TooLong:
            forward(rows // 2, 4)  # HERE


@planted("extra_collective", [1], n=3, marked=True)
def test_a_forward_more_is_like_the_next_one(group):
    """Its gathers are taken for those of the step, and the step's for those of the backward."""
    parts = [torch.empty(2) for _ in range(3)]

    def forward() -> None:
        for _ in range(2):
            dist.all_gather(parts, torch.ones(2))  # HERE

    def backward() -> None:
        for _ in range(2):
            dist.all_gather(parts, torch.ones(2))
            dist.all_reduce(torch.ones(6))

    for step in range(6):
        if step == 0 or (group.rank, step) == (1, AT):
            forward()  # HERE
        forward()
        backward()


@planted("extra_collective", [2], n=3, marked=True)
def test_a_report_after_so_many_calls(group):
    """Two forwards in a step on one rank: the step has no backward yet, but it has left nothing out."""
    network = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    made = 0

    def predict(x: torch.Tensor) -> torch.Tensor:
        nonlocal made
        made += 1
        out = network(x)
        if made % 4 == 0:
            gather(torch.tensor([made]), 3)  # HERE
        return out

    for step in range(12):
        out = predict(torch.ones(2, 4))
        if (group.rank, step) == (2, AT + 2):
            out = (out + predict(torch.ones(2, 4))) / 2  # HERE
        optimizer.zero_grad()
        out.square().mean().backward()
        for p in network.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()


@planted("io_stuck", [1], n=3, marked=True)
def test_a_queue_without_an_end(group):
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if group.rank == 0 else None
    port = torch.tensor([served.port if served else 0])
    dist.broadcast(port, 0)
    store = served or dist.TCPStore("127.0.0.1", int(port), is_master=False)
    for step in range(4):
        if group.rank == 0:
            for _ in range(3 if step < AT else 2):
                store.queue_push(f"jobs{step}", "job")
            store.queue_push(f"jobs{step}", "end")
        jobs = []
        while group.rank == 1 and (step == AT or "end" not in jobs):
            jobs.append(store.queue_pop(f"jobs{step}").decode())  # HERE
        dist.barrier()
