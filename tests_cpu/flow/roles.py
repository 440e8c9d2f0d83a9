"""Programs of ranks with different parts: they send, receive, set and await keys. No torch.

``call`` begins a call; ``call("stuck")`` ends the recording of a rank that waits for no other. The statement to find ends in
``# HERE``.
"""

import asyncio
import contextlib
import functools
import queue
import threading
import time

from tests_cpu.flow.programs import Call


def publishes_not_every_version(rank: int, call: Call) -> None:
    for version in range(6):
        if rank:
            call("wait", kind="wait", key=f"weights/{version}")
            if version == 3:
                return
            continue
        norm = 9.0 if version == 3 else 1.0
        if norm > 5.0:  # HERE
            continue
        call("set", kind="set", key=f"weights/{version}")
    call("barrier")


def numbers_what_it_publishes(rank: int, call: Call) -> None:
    if rank:
        for version in range(1, 6):
            call("wait", kind="wait", key=f"weights/{version}")
        return
    version, last = 0, 0.0
    for loss in (0.9, 0.7, 0.6, 0.6, 0.5):
        if loss == last:  # HERE
            continue
        version, last = version + 1, loss
        call("set", kind="set", key=f"weights/{version}")


def sends_no_part_of_a_layer(rank: int, call: Call) -> None:
    def owned(layer: int) -> range:
        if rank == 1 and layer == 2:  # HERE
            return range(0)
        return range(2 + layer)

    for layer in range(4):
        for _row in owned(layer):
            if rank == 0:
                call("recv", kind="receive", peer=1)
            elif rank == 1:
                call("send", kind="send", peer=0)
        if layer == 2:
            call("stuck")


def sends_fewer_than_others(rank: int, call: Call) -> None:
    if rank == 0:
        for part in range(9):
            call("recv_anysource", kind="receive", peer=-2, note=str(part))
        return
    prompts = [part for part in range(3) if (rank, part) != (3, 1)]
    for _prompt in prompts:  # HERE
        call("send", kind="send", peer=0)


def stops_before_a_thread_has_ended(rank: int, call: Call) -> None:
    for epoch in range(3):
        total = 0
        for _batch in range(4):
            total += 9 if (rank, epoch) == (1, 1) else 1
            if total > 8:  # HERE
                break
        call("stuck" if (rank, epoch) == (1, 1) else "join", kind="none")
        call("all_reduce")


def waits_in_its_part(rank: int, call: Call) -> None:
    call("barrier")
    if rank == 0:
        call("stuck")
        return
    call("all_reduce")


def reads_a_version_ahead(rank: int, call: Call) -> None:
    def read() -> None:
        nonlocal version
        version += 1
        call("wait", kind="wait", key=f"plan/{version}")
        if version > step:
            call("stuck")

    version, backlog = 0, 0
    for step in range(1, 5):
        if rank == 0:
            call("set", kind="set", key=f"plan/{step}")
        read()
        backlog += 4 if (rank, step) == (2, 3) else 1
        if backlog > 5:  # HERE
            read()
        call("all_reduce")


def has_cached_its_plan(rank: int, call: Call) -> None:
    @functools.cache
    def plan(rows: int) -> int:
        call("all_gather")
        if rows == 3:
            call("stuck")
        return rows

    for rows in (1, 2, 1 if rank == 1 else 3):
        size = plan(rows)  # HERE
        call("send", kind="send", peer=(rank + 1) % 3, what=str(size))
    call("stuck")


def has_read_its_plan_from_a_file(rank: int, call: Call) -> None:
    def make() -> int:
        call("all_gather")
        call("stuck")
        return 3

    saved = 2 if rank == 1 else 0
    size = saved or make()  # HERE
    call("receive", kind="receive", peer=0, what=str(size))
    call("stuck")


def waits_for_a_neighbour_that_has_stopped(rank: int, call: Call) -> None:
    def swap(peer: int) -> None:
        call("recv", kind="receive", peer=peer)
        call("stuck")

    peer = {1: 0}.get(rank)
    peer is not None and swap(peer)
    call("all_gather")
    call("stuck")


def waits_for_a_key_of_another_name(rank: int, call: Call) -> None:
    def get_rank() -> int:
        return rank

    name = "ac" if rank == 2 else "ab"
    if get_rank() == 0:
        call("set", kind="set", key=f"data/{name}")
    call("wait", kind="wait", key=f"data/{name}")  # HERE


def keeps_a_permit(rank: int, call: Call) -> None:
    permits = threading.Semaphore(2)
    for size in (1, 9, 2, 9, 3):
        call("all_reduce" if permits.acquire(timeout=0) else "stuck", kind="none")
        if size > 5:  # HERE
            continue
        permits.release()


def raises_while_it_holds_a_lock(rank: int, call: Call) -> None:
    def add(value: int) -> None:
        lock.acquire()
        if value < 0:  # HERE
            raise ValueError(value)
        lock.release()

    lock = threading.Lock()
    for value in (1, 2, -1):
        with contextlib.suppress(ValueError):
            add(value)
        with call("stuck") or contextlib.nullcontext() if lock.locked() else lock:
            pass


def waits_for_what_a_thread_has_not_set(rank: int, call: Call) -> None:
    def fill(size: int) -> None:
        if size % 4:  # HERE
            return
        full.set()

    for size in (8, 4, 7):
        full = threading.Event()
        thread = threading.Thread(target=fill, args=(size,))
        thread.start()
        thread.join()
        call("all_reduce" if full.wait(0) else "stuck", kind="none")


def waits_for_a_worker_that_passes_over_a_part(rank: int, call: Call) -> None:
    def work() -> None:
        for part in iter(parts.get, None):
            if part == 2:  # HERE
                continue
            results.put(part)

    parts, results = queue.Queue[int | None](), queue.Queue[int]()
    thread = threading.Thread(target=work)
    thread.start()
    for part in range(3):
        parts.put(part)
    parts.put(None)
    thread.join()
    for _part in range(3):
        results.get() if results.qsize() else call("stuck")


def waits_for_a_worker_that_waits_for_a_version(rank: int, call: Call) -> None:
    def work() -> None:
        for number in range(3):
            with is_new:
                is_new.wait_for(
                    lambda n=number: asked.append(n) or len(versions) > n, timeout=9
                )  # longer than the test
            results.put(number)

    is_new, results, versions, asked = threading.Condition(), queue.Queue[int](), [0], list[int]()
    threading.Thread(target=work, daemon=True).start()
    for step in range(3):
        while step not in asked:
            time.sleep(0)
        results.get() if step < 2 else call("stuck")
        if step == 1:  # HERE
            continue
        if step == 0:
            with is_new:
                versions.append(step)
                is_new.notify_all()


def waits_in_a_coroutine(rank: int, call: Call) -> None:
    def push(token: int, is_whole: asyncio.Event) -> None:
        if token:  # HERE
            return
        is_whole.set()

    async def wait(is_whole: asyncio.Event) -> None:
        await is_whole.wait()

    async def answer(tokens: tuple[int, ...]) -> None:
        is_whole = asyncio.Event()
        task = asyncio.create_task(wait(is_whole))
        await asyncio.sleep(0)
        for token in tokens:
            push(token, is_whole)
        if not is_whole.is_set():
            call("stuck")
            task.cancel()

    asyncio.run(answer((3, 0)))
    asyncio.run(answer((3, 2)))


def waits_before_it_uses_a_batch(rank: int, call: Call) -> None:
    def read() -> int:
        call("stuck" if rank == 1 else "load", kind="none")
        return 4

    def use(size: int) -> None:
        call("all_reduce", what=str(size))

    use(read())
    call("barrier")


def sends_its_rows_to_another(rank: int, call: Call) -> None:
    def push(rows: tuple[int, ...]) -> None:
        for row in rows:
            call("send", kind="send", peer=row % 2)  # HERE

    if rank < 2:
        for day in range(3):
            call("recv", kind="receive", peer=2, note=str(day))
        return
    for rows in ((0, 1), (2, 3), (5,)):
        push(rows)
    call("stuck")


class Driver:
    def run(self, call: Call) -> None:
        for _order in range(4):
            call("broadcast")
            self.work(call)

    def work(self, call: Call) -> None:
        call("all_reduce")


class Worker(Driver):
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    def run(self, call: Call) -> None:
        for _order in range(4):
            call("broadcast")
            self.blocks -= 1
            if self.blocks < 0:  # HERE
                continue
            self.work(call)


def has_less_room_than_other_workers(rank: int, call: Call) -> None:
    node = Worker(2 if rank == 2 else 9) if rank else Driver()
    node.run(call)
