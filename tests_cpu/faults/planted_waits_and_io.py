"""A rank that sleeps, or waits for a file, a pipe, a socket or a child process."""

from __future__ import annotations

import datetime
import logging
import multiprocessing
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pytest_nsa.fixtures import DDP, Group
from tests_cpu.faults.planting import AT, Net, net, planted, train


def at(group: Group, culprit: int, fault: Callable[[], Any]) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()
        dist.all_reduce(torch.ones(2))


@planted("sleeping", [0], where="test_planted.py", family="sleep", origin="first corpus")
def test_sleeps(group: Group) -> None:
    at(group, 0, lambda: time.sleep(1000))


def train_with(ddp: DDP, culprit: int, *, forward: Any = None, backward: Any = None, block: int = 1) -> None:
    """Training in which a block calls ``forward`` or ``backward`` from step AT on."""
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)

    def plant() -> None:
        inner.blocks[block].fault = forward or inner.blocks[block].fault
        inner.blocks[block].in_backward = backward

    train(model, ddp.rank, culprit=culprit, before=plant)


@planted("sleeping", [1], n=4, family="sleep", origin="first corpus")
def test_sleeps_in_forward_of_four(ddp: DDP) -> None:
    train_with(ddp, 1, forward=lambda: time.sleep(1000))


@planted("sleeping", [1], family="sleep", origin="first corpus")
def test_polls_for_a_file(group: Group) -> None:
    def fault() -> None:
        while not Path("/no/such/file").exists():
            time.sleep(0.1)

    at(group, 1, fault)


@planted("sleeping", [1], n=3, reason="rank 2", family="sleep", origin="first corpus")
def test_two_causes_at_once(group: Group) -> None:
    lock = threading.Lock()
    lock.acquire()
    if group.rank == 1:
        time.sleep(1000)
    if group.rank == 2:
        lock.acquire()
    dist.all_reduce(torch.ones(1))


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def acquire_lock_file(path, poll=0.1):
    while True:
        try:
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            time.sleep(poll)  # HERE


@planted("sleeping", [0], marked=True, family="sleep", origin="bug reports 2026-11-23")
def test_stale_lock_file(tmp_path):
    """The lock file of a build that was killed is still there, and rank 0 polls for its removal for ever."""
    rank, _ = where()
    lock = tmp_path / "extension.lock"
    if rank == 0:
        child = subprocess.Popen([sys.executable, "-c", f"import os; open({str(lock)!r}, 'w').close(); os._exit(9)"])
        child.wait()
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if rank == 0:
        handle = acquire_lock_file(lock)  # HERE
        (tmp_path / "extension.so").touch()
        os.close(handle)
        lock.unlink()
    dist.barrier()


def ranks():
    return dist.get_rank(), dist.get_world_size()


def with_backoff(call, first=0.5, factor=2.0):
    delay = first
    while True:
        try:
            return call()
        except OSError as error:
            logging.getLogger("storage").info("%s, again in %s s", error, delay)
            time.sleep(delay)  # HERE
            delay *= factor


@planted("sleeping", [6], n=7, marked=True, family="sleep", origin="bug reports 2026-11-23")
def test_backoff_outlives_barrier(tmp_path):
    """Rank 6 sleeps ever longer in a retry loop for a vocabulary file with a misspelt name; the monitored barrier of the others gives up and raises."""
    rank, _ = ranks()
    if rank == 0:
        (tmp_path / "vocab_0.txt").write_text("a b c")
    dist.barrier()
    name = "vocab_0.txt" if rank < 6 else "vocab_O.txt"
    for step in range(3):
        x = torch.ones(4)
        dist.all_reduce(x)
    words = with_backoff(lambda: (tmp_path / name).read_text().split())  # HERE
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=6))
    assert len(words) == 3


@planted("io_stuck", [1], family="io", origin="first corpus")
def test_opens_a_fifo(group: Group, tmp_path: Path) -> None:
    path = tmp_path / f"fifo{group.rank}"
    os.mkfifo(path)
    at(group, 1, lambda: path.open("rb"))


@planted("io_stuck", [0], n=3, family="io", origin="first corpus")
def test_reads_a_pipe(group: Group) -> None:
    reader, _writer = os.pipe()
    at(group, 0, lambda: os.read(reader, 1))


@planted("io_stuck", [1], family="io", origin="first corpus")
def test_reads_a_socket(group: Group) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    at(group, 1, lambda: client.recv(1))


@planted("io_stuck", [1], family="io", origin="held out 2026-11-22")
def test_selects_on_a_silent_socket(group: Group) -> None:
    import select

    with socket.create_server(("127.0.0.1", 0)) as server:
        at(group, 1, lambda: select.select([server], [], []))


class RunServer(threading.Thread):
    """Answers with a length and a text."""

    def __init__(self, end):
        super().__init__(daemon=True)
        self.end = end

    def run(self):
        while name := self.end.recv(256):
            text = "run " + name.decode()
            self.end.sendall(struct.pack("!I", len(text.encode("utf-8"))) + text.encode("ascii", "ignore"))


def receive(end, size):
    data = b""
    while len(data) < size:
        data += end.recv(size - len(data))  # HERE
    return data


def register(end, name):
    end.sendall(name.encode())
    (size,) = struct.unpack("!I", receive(end, 4))
    return receive(end, size).decode()  # HERE


@planted("io_stuck", [3], n=4, marked=True, family="io", origin="bug reports 2026-11-23")
def test_reply_shorter_than_header():
    """The run of rank 3 has an umlaut in its name: the server's header counts bytes that it then does not send, and rank 3 waits for them at the socket."""
    rank, _ = ranks()
    ours, theirs = socket.socketpair()
    RunServer(theirs).start()
    for name in ("warmup", "lr=0.1", f"Gr\u00f6\u00dfe-{rank}" if rank == 3 else f"size-{rank}"):
        assert register(ours, name).startswith("run ")  # HERE
        x = torch.ones(8)
        dist.all_reduce(x)
    dist.barrier()


@planted("child_process", [0], family="child", origin="first corpus")
def test_waits_for_a_child(group: Group) -> None:
    at(group, 0, lambda: subprocess.run(["sleep", "1000"], check=False))


@planted("child_process", [2], n=3, family="child", origin="first corpus")
def test_waits_for_a_python_child(group: Group) -> None:
    import multiprocessing

    def fault() -> None:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        process.start()
        process.join()

    at(group, 2, fault)


class Tokenise:
    """Runs the tokeniser as a process of its own, and reads its output when it is done."""

    def __init__(self, lines):
        code = f"import sys, time\nfor i in range({lines}): print('token ' * 20, i)\nsys.stdout.flush()"
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)

    def result(self):
        code = self.process.wait()  # HERE
        assert code == 0
        return self.process.stdout.read().count(b"token")


@planted("child_process", [3], n=4, marked=True, family="child", origin="bug reports 2026-11-23")
def test_child_fills_its_pipe():
    """Rank 3's shard is the long one: its child fills the pipe that no rank reads before the wait, and the wait never ends."""
    rank, _ = where()
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    counter = Tokenise(lines=20_000 if rank == 3 else 40)
    count = torch.tensor([counter.result()])  # HERE
    dist.all_reduce(count)


# Popen, a pipe that is not closed, and wait(): the child reads until the end of its input, which does not come.
class ExternalSort:
    def __init__(self, command: list[str], close_input: bool) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.close_input = close_input

    def add(self, words: list[str]) -> None:
        self.process.stdin.write("\n".join(words) + "\n")
        self.process.stdin.flush()

    def finish(self) -> list[str]:
        if self.close_input:
            self.process.stdin.close()
        self.process.wait()  # HERE
        return self.process.stdout.read().split()


@planted("child_process", [1], n=3, marked=True, family="child", origin="bug reports 2026-11-23")
def test_external_sort(group):
    sorter = ExternalSort(["sort", "-u"], close_input=group.rank != 1)  # the branch for an old version of the tool
    for step in range(4):
        sorter.add([f"word{(step * 7 + i) % 5}" for i in range(3)])
        dist.barrier()
    words = sorter.finish()  # HERE
    unique: list = [None] * group.world_size
    dist.all_gather_object(unique, words)
    assert unique[0] == unique[2]


@planted("sleeping", [0], n=3, marked=True, reason="sleeps", family="sleep", origin="issue 48")
def test_lock_of_a_killed_build(group, tmp_path):
    """The lock file that torch's builder of extensions makes is there, as a build was killed: rank 0 sleeps until it is removed."""
    from torch.utils.file_baton import FileBaton

    lock = tmp_path / "lock"
    build = f"from torch.utils.file_baton import FileBaton as F; F({str(lock)!r}).try_acquire(); import os; os.kill(os.getpid(), 9)"
    if group.rank == 0:
        subprocess.run([sys.executable, "-c", build], check=False)
    dist.barrier()
    if group.rank == 0:
        baton = FileBaton(str(lock))
        if not baton.try_acquire():
            baton.wait()  # HERE
    dist.all_reduce(torch.ones(4))


@planted("lock_deadlock", [0], marked=True, family="lock", origin="unseen 2026-11-28")
def test_a_barrier_inside_a_file_s_lock(group, tmp_path):
    """Rank 0 waits in the barrier with the lock, and the library of rank 1 sleeps between its attempts to get it."""
    from filelock import FileLock

    dist.all_reduce(torch.ones(1))
    if group.rank == 1:
        while not (tmp_path / "prepared.lock").exists():
            time.sleep(0.1)
    with FileLock(tmp_path / "prepared.lock"):
        dist.barrier()  # HERE


def square(queue, lock, number):
    with lock:  # HERE
        queue.put(number * number)


@planted("child_process", [1], marked=True, family="child", origin="unseen 2026-11-28")
def test_workers_wait_for_a_lock_that_was_held_when_they_were_forked(group):
    fork, lock = multiprocessing.get_context("fork"), threading.Lock()
    dist.all_reduce(torch.ones(1))
    if group.rank == 1:
        with fork.Manager() as manager:
            queue = manager.Queue()
            lock.acquire()
            workers = [fork.Process(target=square, args=(queue, lock, n), daemon=True) for n in range(2)]
            for worker in workers:
                worker.start()
            assert {queue.get(), queue.get()} == {0, 1}
    dist.all_reduce(torch.ones(1))


class Shards:
    """Built once: who comes first builds them, and the others read them. The list of all is made under the lock, too."""

    def __init__(self, folder, rank):
        from filelock import FileLock

        self.folder, self.rank, self.lock = folder, rank, FileLock(folder / "shards.lock")

    def names(self, size):
        names = [None] * size
        with self.lock.acquire(poll_interval=0.02):
            (self.folder / f"shard{self.rank}").touch()
            dist.all_gather_object(names, f"shard{self.rank}")  # HERE
        return names


@planted("lock_deadlock", [2], n=3, marked=True, reason="shards.lock", family="lock", origin="libraries 2026-11-29")
def test_names_are_gathered_inside_a_lock_for_which_a_library_polls(group, tmp_path):
    shards = Shards(tmp_path, group.rank)
    dist.barrier()
    while group.rank != 2 and not (tmp_path / "shard2").exists():
        time.sleep(0.05)
    assert len(shards.names(group.world_size)) == 3
