"""A rank that waits in an event loop, for a pool, in an import, for a file that it polls, or in a recursion."""

import asyncio
import concurrent.futures
import datetime
import fcntl
import importlib
import json
import multiprocessing
import os
import queue
import selectors
import socket
import sqlite3
import sys
import time

import torch
import torch.distributed as dist

from tests_cpu.faults.planting import AT, planted


def rounds(group, culprit, fault):
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()
        dist.all_reduce(torch.ones(2))


@planted("lock_deadlock", [2], n=3, marked=True, family="lock", origin="second witness")
def test_a_task_awaits_an_event_that_no_task_sets(group):
    async def consume(step):
        ready = asyncio.Event()
        if (group.rank, step) != (2, AT):
            ready.set()
        await ready.wait()  # HERE
        return step

    for step in range(6):
        dist.all_reduce(torch.tensor(float(asyncio.run(consume(step)))))


@planted("io_stuck", [1], marked=True, family="io", origin="second witness")
def test_an_executor_of_the_loop_reads_a_silent_socket(group):
    mine, _theirs = socket.socketpair()

    def read():
        return mine.recv(1)  # HERE

    async def fetch():
        return await asyncio.get_running_loop().run_in_executor(None, read)

    rounds(group, 1, lambda: asyncio.run(fetch()))


@planted("io_stuck", [0], n=3, marked=True, family="io", origin="second witness")
def test_a_thread_of_the_loop_reads_a_pipe_without_a_writer(group, tmp_path):
    path = tmp_path / "shards"

    def load():
        os.mkfifo(path)
        with open(path) as shards:  # HERE
            return shards.read()

    async def fetch():
        return await asyncio.to_thread(load)

    rounds(group, 0, lambda: asyncio.run(fetch()))


def installed(tmp_path, name, text):
    """Write a module where packages are installed, and return a function that imports it."""
    folder = tmp_path / "lib" / "python3.11" / "site-packages"

    def load():
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text(text)
        sys.path.insert(0, str(folder))
        importlib.import_module(name)  # HERE

    return load


@planted("slow", [1], marked=True, reason="imports", family="busy", origin="second witness")
def test_a_package_computes_its_tables_when_it_is_imported(group, tmp_path):
    text = (
        "import torch\ntable = torch.randn(200, 200)\nfor _ in range(10_000_000):\n    table = table @ table.T / 200\n"
    )
    rounds(group, 1, installed(tmp_path, "tables", text))


@planted("slow", [2], n=3, marked=True, reason="imports", family="busy", origin="second witness")
def test_a_package_parses_its_vocabulary_when_it_is_imported(group, tmp_path):
    text = "words = {}\nwhile len(words) < 10:\n    words[hash('a') % 7] = sorted(words)\n"
    rounds(group, 2, installed(tmp_path, "vocabulary", text))


@planted("child_process", [1], marked=True, reason="pool", family="child", origin="second witness")
def test_a_pool_s_process_waits_for_ever(group):
    def count():
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(time.sleep, [0, 1000])  # HERE

    rounds(group, 1, count)


@planted("child_process", [0], n=3, marked=True, reason="pool", family="child", origin="second witness")
def test_a_result_of_an_executor_of_processes(group):
    def tokenize():
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(time.sleep, 1000).result()  # HERE

    rounds(group, 0, tokenize)


def take(path):
    """Return the file with its lock, which is tried again until it is free."""
    file = open(path, "w")
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            time.sleep(0.2)  # HERE


@planted("lock_deadlock", [0], n=3, marked=True, family="lock", origin="second witness")
def test_a_cache_is_locked_across_a_barrier(group, tmp_path):
    path = tmp_path.parent / "cache.lock"
    for step in range(5):
        if step == AT:
            if group.rank == 0:
                lock = take(path)
            dist.barrier()
            if group.rank > 0:
                lock = take(path)
            dist.all_reduce(torch.ones(1))  # HERE
            lock.close()
        dist.all_reduce(torch.ones(2))


@planted("io_stuck", [2], n=3, marked=True, family="io", origin="second witness")
def test_the_lines_of_a_pipe_that_stays_open(group):
    there, mine = os.pipe()
    os.write(mine, b"0\n1\n2\n3\n")
    lines = os.fdopen(there)
    for line in lines:  # HERE
        dist.all_reduce(torch.tensor(float(line)))
        if int(line) == AT and group.rank != 2:
            break
    dist.barrier()


@planted("io_stuck", [1], marked=True, family="io", origin="second witness")
def test_a_document_whose_end_is_not_written(group):
    there, mine = os.pipe()
    os.write(mine, b'{"rate": 0.1, "steps": [1, 2')
    rounds(group, 1, lambda: json.load(os.fdopen(there)))  # HERE


@planted("io_stuck", [1], n=3, marked=True, family="io", origin="second witness")
def test_a_selector_of_connections_that_bring_nothing(group):
    mine, _theirs = socket.socketpair()
    selector = selectors.DefaultSelector()
    selector.register(mine, selectors.EVENT_READ)
    rounds(group, 1, lambda: selector.select())  # HERE


@planted("init_timeout", [2], n=3, marked=True, family="meeting", origin="second witness")
def test_a_store_of_metrics_that_nobody_serves(group):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    limit = datetime.timedelta(seconds=1000)
    rounds(group, 2, lambda: dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=limit))  # HERE


def ways(stairs):
    """In how many ways one climbs so many stairs, one or two at a time."""
    if stairs < 2:
        return 1
    after_one = ways(stairs - 1)
    after_two = ways(stairs - 2)
    return after_one + after_two


@planted("infinite_loop", [1], marked=True, family="endless", origin="second witness")
def test_a_recursion_that_forgets_what_it_counted(group):
    for step in range(5):
        total = ways(90 if (group.rank, step) == (1, AT) else 10)  # HERE
        dist.all_reduce(torch.tensor(float(total)))


@planted("compiling", [2], n=3, family="busy", origin="second witness")
def test_a_function_of_many_operations_is_traced(group):
    def polynomial(x):
        for power in range(200_000):
            x = x * 0.5 + power
        return x

    rounds(group, 2, lambda: torch.compile(polynomial, backend="eager")(torch.ones(2)))


@planted("child_process", [1], n=3, marked=True, reason="pool", family="child", origin="second witness")
def test_the_last_of_several_results_of_processes(group):
    def score():
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
            work = [pool.submit(time.sleep, seconds) for seconds in (0, 0.1, 1000)]
            concurrent.futures.wait(work)  # HERE

    rounds(group, 1, score)


@planted("lock_deadlock", [1], n=3, marked=True, family="lock", origin="unseen 2026-11-28")
def test_a_call_of_a_pool_waits_for_another_call_of_it(group):
    pool = concurrent.futures.ThreadPoolExecutor(1)

    def pair(index):
        return index + pool.submit(abs, index).result()  # HERE

    rounds(group, 1, lambda: pool.submit(pair, 1).result())


@planted("sleeping", [1], n=3, marked=True, family="sleep", origin="unseen 2026-11-28")
def test_a_file_is_polled_for_while_all_have_one_database_open(group, tmp_path):
    """In this mode each reader holds a shared lock on the database's index."""
    table = sqlite3.connect(tmp_path / "cache.db", timeout=10)
    if group.rank == 0:
        table.execute("pragma journal_mode=wal")
        table.execute("create table rows (key, value)")
        table.commit()
    group.barrier()
    table.execute("select * from rows").fetchall()

    def polled():
        while not (tmp_path / "never").exists():
            time.sleep(0.1)  # HERE

    rounds(group, 1, polled)


@planted(
    "lock_deadlock", [0], n=2, marked=True, reason="polls for a lock on", family="lock", origin="review 2026-11-28"
)
def test_two_write_to_a_database_in_wal_mode(group, tmp_path):
    """Each has a shared lock on the database's index, too."""
    table = sqlite3.connect(tmp_path / "cache.db", timeout=1000, isolation_level=None)
    if group.rank == 0:
        table.execute("pragma journal_mode=wal")
        table.execute("create table rows (key, value)")
    group.barrier()
    table.execute("select * from rows").fetchall()
    if group.rank == 0:
        table.execute("begin immediate")
        table.execute("insert into rows values (1, 2)")
        group.barrier()
        group.barrier()  # HERE
        table.execute("commit")
    else:
        group.barrier()
        table.execute("insert into rows values (2, 3)")  # HERE
        group.barrier()


@planted("child_process", [1], n=2, marked=True, reason="pool", family="child", origin="review 2026-11-28")
def test_a_thread_of_a_pool_takes_from_a_queue_while_a_process_works(group):
    items, threads = queue.Queue(), concurrent.futures.ThreadPoolExecutor(1)
    threads.submit(items.get)
    if group.rank == 1:
        context = multiprocessing.get_context("fork")
        concurrent.futures.ProcessPoolExecutor(1, mp_context=context).submit(time.sleep, 1000).result()  # HERE
    group.barrier()
    items.put(None)
