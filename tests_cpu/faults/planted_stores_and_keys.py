"""Keys of a store that a rank does not set, sets under another name, or waits for."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.elastic.utils import store as stores

from tests_cpu.faults.planting import AT, planted


@planted("missing_collective", [1], n=3, marked=True, family="key", origin="generated 2026-11-23")
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


def meet(store, world, tag):
    """All ranks count at a key; none goes on before all have."""
    store.add(f"meet/{tag}", 1)  # HERE
    while int(store.add(f"meet/{tag}", 0)) < world:  # HERE
        time.sleep(0.005)  # HERE


@planted("missing_collective", [2], n=4, marked=True, family="key", origin="public reports 2026-11-25")
def test_one_meets_by_another_tag(group):
    for step in range(6):
        meet(default_store(), group.world_size, step + (group.rank == 2 and step >= 4))


@planted("missing_collective", [1], n=3, marked=True, family="key", origin="generated 2026-11-25")
def test_a_rank_waits_for_its_own_key(group):
    """Each rank sets a key with its number, and reads all of them: the number tells which rank left its key out."""
    store = dist.PrefixStore("round", dist.distributed_c10d._get_default_store())
    store.set_timeout(timedelta(minutes=20))
    for step in range(6):
        if (group.rank, step) != (1, AT):
            store.set(f"{step}/of/{group.rank}", "1")  # HERE
        for rank in range(3):
            store.get(f"{step}/of/{rank}")


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class BestModelBoard:
    def __init__(self, path, rank, world):
        self.rank, self.store = rank, dist.FileStore(str(path / "board"), world)
        self.offset = 0

    def exchange(self, epoch, score):
        if self.rank == 0:
            self.store.set(f"best/{epoch + self.offset}", f"{score:.4f}")  # HERE
            return score
        return float(self.store.get(f"best/{epoch}"))  # HERE


@planted("missing_collective", [0], n=4, marked=True, family="key", origin="bug reports 2026-11-23")
def test_store_key_off_by_one(tmp_path):
    """After its resume rank 0 writes the score under the key of the next epoch, and the others wait for a key that no rank sets."""
    rank, world = where()
    board = BestModelBoard(tmp_path, rank, world)
    for epoch in range(6):
        score = torch.rand(1)
        dist.all_reduce(score)  # HERE
        if epoch == 4 and rank == 0:
            board.offset = 1
        board.exchange(epoch, score.item())  # HERE
    dist.barrier()


@planted("missing_collective", [1], n=3, marked=True, family="extra", origin="generated 2026-11-23")
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


class Worker:
    """Hands gradients to a server by keys, and waits for the weights of its version."""

    def __init__(self, store, rank, version=0):
        self.store, self.rank, self.version = store, rank, version

    def step(self):
        self.store.set(f"gradient/{self.rank}/{self.version}", "1")  # HERE
        wait_for(self.store, f"weights/{self.version}")
        self.version += 1


def wait_for(store, key):
    while not store.check([key]):
        time.sleep(0.02)


@planted("missing_collective", [1], n=3, marked=True, family="extra", origin="public reports 2026-11-25")
def test_a_worker_counts_one_version_too_many(group):
    store = default_store()
    if group.rank == 0:
        for version in range(8):
            for rank in (1, 2):
                wait_for(store, f"gradient/{rank}/{version}")
                store.delete_key(f"gradient/{rank}/{version}")
            store.set(f"weights/{version}", "1")
        return
    worker = Worker(store, group.rank)
    for step in range(8):
        if (group.rank, step) == (1, 4):
            worker = Worker(store, group.rank, step + 1)
        worker.step()


@planted("extra_collective", [1], n=3, marked=True, family="extra", origin="public reports 2026-11-25")
def test_one_reduces_twice_while_all_wait_for_its_key(group):
    store = default_store()
    for step in range(6):
        store.set(f"{step}/of/{group.rank}", "1")
        for rank in range(group.world_size):
            store.get(f"{step}/of/{rank}")
        dist.all_reduce(torch.ones(1))
        if (group.rank, step) == (1, 2):
            dist.all_reduce(torch.ones(1))  # HERE


class Chapters:
    """Ranks meet at a store after each chapter; one that fails is counted as read."""

    def __init__(self, world_size: int) -> None:
        self.store, self.world_size, self.number = dist.distributed_c10d._get_default_store(), world_size, 0

    def read(self, fails: bool) -> None:
        if fails:
            self.number += 1
        stores.barrier(self.store, self.world_size, key_prefix=f"chapter/{self.number}", barrier_timeout=600)  # HERE
        self.number += 1


@planted("missing_collective", [1], n=4, marked=True, reason="chapter/4", family="extra", origin="unseen 2026-11-24")
def test_a_chapter_is_counted_twice(group):
    chapters = Chapters(group.world_size)
    for chapter in range(6):
        chapters.read(fails=(group.rank, chapter) == (1, 3))  # HERE


def store_of_all() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@contextmanager
def epoch(number: int):
    try:
        yield number
    finally:
        dist.barrier()


def published(rank: int, epoch: int, parts: list[str]) -> None:
    if parts:
        store_of_all().set(f"index/{epoch}/{rank}", ",".join(parts))  # HERE


@planted("missing_collective", [2], n=3, marked=True, reason="index/2/2", family="skip", origin="unseen 2026-11-25")
def test_an_empty_part_is_not_published(group):
    for epoch in range(4):
        parts = [] if (group.rank, epoch) == (2, 2) else [f"{epoch}-{group.rank}"]
        published(group.rank, epoch, parts)
        if parts:
            store_of_all().wait([f"index/{epoch}/{r}" for r in range(3)])
        dist.barrier()


@planted(
    "missing_collective", [0], n=3, marked=True, reason="ended its test", family="skip", origin="unseen 2026-11-25"
)
def test_a_teacher_that_publishes_only_what_is_better(group):
    best = 0.0
    for number, score in enumerate([0.2, 0.4, 0.3]):
        if group.rank:
            store_of_all().wait([f"teacher/{number}"])
        elif score > best:
            best = score
            store_of_all().set(f"teacher/{number}", "1")  # HERE


@planted("skipped_collective", [2], n=4, marked=True, family="skip", origin="unseen 2026-11-25")
def test_a_rank_that_has_left_waits_for_a_key(group):
    """One rank still reduces over all ranks, while the others leave out the one that has left and waits to be asked back."""
    all_ranks, without = dist.new_group(), dist.new_group([0, 1, 2])
    for step in range(8):
        if group.rank == 3 and step == 4:
            store_of_all().wait(["back/3"])
            break
        knows = step >= 4 and group.rank != 2
        dist.all_reduce(torch.ones(4), group=without if knows else all_ranks)  # HERE
    if group.rank == 0:
        store_of_all().set("back/3", "1")


class RoundBarrier:
    """A barrier in the store that a worker passes once."""

    def __init__(self, done: set[str]) -> None:
        self.store, self.done = dist.distributed_c10d._get_default_store(), done

    def wait(self, name: str) -> None:
        if name in self.done:
            return
        self.store.add(name, 1)
        while self.store.add(name, 0) < dist.get_world_size():
            time.sleep(0.02)  # HERE
        self.done.add(name)


@planted("missing_collective", [2], n=5, reason="wait for a key of a store", family="skip", origin="libraries")
def test_a_worker_that_thinks_it_has_passed(group):
    barrier = RoundBarrier(done={"epoch2"} if group.rank == 2 else set())
    for epoch in range(4):
        barrier.wait(f"epoch{epoch}")
        dist.all_reduce(torch.ones(32))


@planted("skipped_collective", [0], n=3, marked=True, family="skip", origin="generated 2026-11-25")
def test_a_reader_of_keys_leaves_the_reduction_out(group):
    store = dist.PrefixStore("meta", dist.distributed_c10d._get_default_store())
    store.set_timeout(timedelta(minutes=20))
    for step in range(6):
        store.set(f"{step}/of/{group.rank}", "1")
        for rank in range(3):
            store.get(f"{step}/of/{rank}")
        if (group.rank, step) != (0, AT):
            dist.all_reduce(torch.ones(1))  # HERE


@planted("missing_collective", [1], n=2, marked=True, family="skip", origin="generated 2026-11-25")
def test_the_other_leads_for_the_first_time_and_sets_nothing(group):
    """Only the rank that waits has set such a key, when it led; there is no third one."""
    store = dist.PrefixStore("lead", dist.distributed_c10d._get_default_store())
    for step in range(5):
        if step % 2 != group.rank:
            store.wait([f"round/{step}"], timedelta(minutes=20))  # HERE
        elif step != 1:
            store.set(f"round/{step}", "1")  # HERE
        dist.all_reduce(torch.ones(1))


class StoreBarrier:
    def __init__(self, path, world):
        self.store, self.world, self.round = dist.FileStore(str(path / "sync"), world), world, 0

    def wait(self):
        self.round += 1
        if self.store.add(f"in/{self.round}", 1) == self.world:
            self.store.set(f"go/{self.round}", "1")  # HERE
        self.store.wait([f"go/{self.round}"])  # HERE


@planted("missing_collective", [2], n=3, marked=True, family="skip", origin="bug reports 2026-11-23")
def test_store_barrier_no_shard(tmp_path):
    """Rank 2 has no shard to write and returns before the store's barrier; the others wait there for its arrival."""
    rank, world = where()
    barrier = StoreBarrier(tmp_path, world)

    def export(epoch):
        rows = [] if rank == 2 and epoch == 3 else list(range(4))
        if not rows:
            return  # HERE
        (tmp_path / f"shard-{rank}-{epoch}").write_text(str(rows))
        barrier.wait()  # HERE

    for epoch in range(5):
        dist.all_reduce(torch.ones(2))  # HERE
        export(epoch)
    dist.barrier()


log = logging.getLogger("shares")


@planted("missing_collective", [2], n=4, marked=True, reason="ckpt/4/2", family="skip", origin="unseen 2026-11-25")
def test_a_commit_waits_for_the_keys_of_all_and_one_shard_has_failed(group, tmp_path):
    store = dist.distributed_c10d._get_default_store()
    for step in range(7):
        dist.all_reduce(torch.ones(4))
        if step % 2 == 0:
            try:
                lost = "lost" if (group.rank, step) == (2, 4) else ""
                torch.save(step, tmp_path / lost / f"{group.rank}.{step}")
            except (OSError, RuntimeError):
                log.warning("shard of step %d is not saved", step)
            else:
                store.set(f"ckpt/{step}/{group.rank}", "saved")  # HERE
            if group.rank == 0:
                store.wait([f"ckpt/{step}/{r}" for r in range(4)])


class KeyBarrier:
    def __init__(self, rank, size):
        self.rank, self.size, self.rounds = rank, size, {}

    def wait(self, name):
        count = self.rounds[name] = self.rounds.get(name, 0) + 1
        default_store().set(f"{name}/{count}/{self.rank}", "here")  # HERE
        default_store().wait([f"{name}/{count}/{r}" for r in range(self.size)])  # HERE


@planted("missing_collective", [1], n=4, marked=True, family="skip", origin="unseen 2026-11-25")
def test_a_barrier_by_keys_that_a_rank_left_out_before_the_last_one(group):
    """It waits for keys, too, such as no other rank has set."""
    barrier = KeyBarrier(group.rank, 4)
    for epoch in range(3):
        if (group.rank, epoch) != (1, 1):
            barrier.wait("validated")
    barrier.wait("done")


@planted("rank_stopped", [1], n=2, family="stop", origin="review")
def test_a_rank_that_looked_into_the_store_and_was_stopped(group):
    store = dist.distributed_c10d._get_default_store()
    if group.rank == 1:
        store.add("arrived", 1)
        os.kill(os.getpid(), signal.SIGSTOP)
    store.wait(["released"], timedelta(seconds=60))
