"""A rank leaves behind what would keep its process from ending elsewhere: its test gets a warning."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

LEAVES = """
import threading
from concurrent.futures import ThreadPoolExecutor

@world_size(2)
def test_leaves_a_thread(group):
    if group.rank == 1:
        threading.Thread(target=threading.Event().wait, name="uploader").start()

@world_size(2)
def test_leaves_idle_and_daemon_threads(group):
    pool = ThreadPoolExecutor(2)
    assert pool.submit(int, "1").result() == 1
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def test_a_thread_that_is_no_daemon_is_reported(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, LEAVES)
    assert result.outcomes == {"passed": 2, "warnings": 1}
    assert "rank 1 left the thread uploader at" in result.stdout
    assert "it is no daemon: a process of torchrun would wait for it" in " ".join(result.stdout.split())
