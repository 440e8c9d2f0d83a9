"""Which threads would keep a process from ending."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

from nsa.trace.stall.threads import lasting_threads


def test_the_manager_of_a_pool_lasts_while_work_is_pending() -> None:
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
    assert pool.submit(int, "1").result() == 1
    manager = pool._executor_manager_thread
    while manager.pending_work_items:  # it removes an item after the result is set
        time.sleep(0.001)
    assert manager not in lasting_threads()
    pool.submit(time.sleep, 1000)
    assert manager in lasting_threads()
    for process in pool._processes.values():
        process.kill()
    manager.join()
