"""Functions of torch and of Python that a thread runs without a frame of the user's: they have the line that gave them to it."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import HEADER, run_example

EXAMPLE = """
import asyncio

@world_size(2)
@pytest.mark.timeout(60)
def test_in_asyncio(group):
    async def meet():
        if group.rank == 0:
            await asyncio.to_thread(dist.barrier)  # HERE test_in_asyncio

    asyncio.run(meet())

@world_size(2)
@pytest.mark.timeout(60)
def test_in_a_pool(group):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        if group.rank == 0:
            pool.submit(dist.all_reduce, torch.ones(2)).result()  # HERE test_in_a_pool

@world_size(2)
@pytest.mark.timeout(60)
def test_in_a_thread(group):
    thread = threading.Thread(target=dist.barrier)
    if group.rank == 0:
        thread.start()  # HERE test_in_a_thread
        thread.join()
    dist.all_reduce(torch.ones(2))

@world_size(2)
@pytest.mark.timeout(60)
def test_sleeps(group):
    async def pause():
        if group.rank == 1:
            await asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)  # HERE test_sleeps

    asyncio.run(pause())
    dist.barrier()
"""


def test_what_a_thread_runs_has_the_line_that_gave_it(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, EXAMPLE, "-o", "ranks_hang_after=4")
    lines = {
        text.rpartition(" ")[2]: number
        for number, text in enumerate((HEADER + EXAMPLE).splitlines(), 1)
        if "# HERE" in text
    }
    found = {name: verdict.where.partition(" in ")[0] for name, verdict in result.verdicts.items()}
    assert found == {name: f"test_example.py:{line}" for name, line in lines.items()}
    assert {name: v.cause for name, v in result.verdicts.items()}["test_sleeps"] == "sleeping"
