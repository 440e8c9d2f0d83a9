"""A rank that is done first: its threads go on while another one may need them, and one that waits in vain gets its error."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

SOURCE = """
from concurrent.futures import ThreadPoolExecutor

from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.timeout(30)


@world_size(2)
def test_autograd_waits(group):
    model = DistributedDataParallel(nn.Linear(8, 8))
    loss = model(torch.randn(4, 8)).sum()
    if group.rank == 0:
        with pytest.raises(RuntimeError):
            loss.backward()


@world_size(2)
def test_it_polls(group):
    dist.barrier()
    if group.rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        while not work.is_completed():
            time.sleep(0.01)


@world_size(2)
def test_a_future_is_waited_for(group):
    dist.barrier()
    if group.rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()


@world_size(2)
def test_a_thread_waits(group):
    dist.barrier()
    if group.rank == 0:
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError):
            pool.submit(dist.all_reduce, torch.ones(1)).result()


@world_size(2)
def test_one_raises_before_its_backward(group):
    model = DistributedDataParallel(nn.Linear(8, 8))
    assert group.rank == 0
    model(torch.randn(4, 8)).sum().backward()
"""


THREADS = """
@world_size(2)
def test_a_thread_that_sends_later(group):
    def send_later():
        time.sleep(3)
        dist.send(torch.ones(1), 1)

    if group.rank == 0:
        threading.Thread(target=send_later).start()
    else:
        dist.recv(torch.ones(1), 0)


@world_size(2)
@pytest.mark.timeout(5)
def test_a_thread_that_never_sends(group):
    def send_then():
        threading.Event().wait()
        dist.send(torch.ones(1), 1)

    if group.rank == 0:
        threading.Thread(target=send_then).start()
    else:
        dist.recv(torch.ones(1), 0)


@world_size(2)
def test_a_thread_that_no_rank_needs(group):
    if group.rank == 0:
        threading.Thread(target=threading.Event().wait).start()
"""


def test_a_rank_ends_after_the_threads_that_another_one_may_need(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, THREADS)
    assert (result.outcomes["passed"], result.outcomes["failed"]) == (2, 1)
    verdict = result.verdicts["test_a_thread_that_never_sends"]
    assert (verdict.cause, verdict.ranks) == ("lock_deadlock", (0,))
    assert verdict.where.endswith("in send_then")


def test_a_rank_that_is_left_alone_gets_its_error(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, SOURCE)
    assert result.outcomes == {"passed": 4, "failed": 1}
    verdict = result.verdicts["test_one_raises_before_its_backward"]
    assert (verdict.cause, verdict.ranks, verdict.certain) == ("rank_exception", (1,), True)
    assert "missing_collective" not in result.stdout
