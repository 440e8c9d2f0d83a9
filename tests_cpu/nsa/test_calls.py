"""Which calls of torch are recorded, and what a record of a collective says of its payload: how many rows go to each rank."""

import _thread
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nsa.trace.calls import collectives, functional
from nsa.trace.calls.arguments import split_sizes

BATCHES = {"_end_coalescing"}  # ends a batch of calls, each of which is recorded
MEMBERSHIP = {"reconfigure"}  # takes no data: who is in the group
MESSAGES = {"isend", "irecv", "batch_p2p_ops"}


@pytest.mark.parametrize(
    ("payload", "takes", "gives", "note"),
    [
        (torch.empty(4), [1, 3], [2, 2], "gives 2,2 takes 1,3"),
        (torch.empty(4), [], [3, 1], "gives 3,1 takes 2,2"),
        (torch.empty(4), [1, 3], [], "gives 2,2 takes 1,3"),
        (torch.empty(4), [], [], ""),
        (torch.tensor(1), [], [1, 1], "gives 1,1 takes 0,0"),
    ],
    ids=["both", "what it gives", "what it takes", "even", "what torch refuses"],
)
def test_the_rows_of_an_exchange(payload: torch.Tensor, takes: list[int], gives: list[int], note: str) -> None:
    assert split_sizes((payload, payload, takes, gives), 2) == note


def test_every_method_of_a_group_that_returns_a_work_is_recorded() -> None:
    """A method that a new torch has must be added to the table; `dist` calls it in the place of an older one."""
    texts = {name: str(getattr(dist.ProcessGroup, name).__doc__) for name in dir(dist.ProcessGroup)}
    begin = {name for name, text in texts.items() if "Work" in text.partition("->")[2].partition("\n")[0]}
    assert {"broadcast", "send"} <= begin
    assert begin - BATCHES - MEMBERSHIP <= {*collectives._METHODS, *collectives._POINT_TO_POINT}


def test_every_functional_collective_is_recorded() -> None:
    """Operators that take a group's name, but for messages: compilers alone make those."""
    functional.install(_original, _original)
    names = {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("_c10d_functional::")
    }
    begin = {name for name in names if "group_name" in str(getattr(torch.ops._c10d_functional, name).default._schema)}
    assert "all_reduce" in begin
    recorded = {
        name for name in names if isinstance(getattr(torch.ops._c10d_functional, name), functional.RecordedCollective)
    }
    assert begin - MESSAGES == recorded


def test_a_side_thread_is_one_that_python_started() -> None:
    """A thread of torch's autograd is known to Python as a dummy, or not at all."""
    found: queue.Queue[bool] = queue.Queue()
    threading.Thread(target=lambda: found.put(collectives._is_in_side_thread())).start()
    assert found.get(timeout=30)
    _thread.start_new_thread(lambda: found.put(collectives._is_in_side_thread()), ())
    assert not found.get(timeout=30)
    _thread.start_new_thread(
        lambda: found.put(bool(threading.current_thread()) and collectives._is_in_side_thread()), ()
    )
    assert not found.get(timeout=30)
    assert not collectives._is_in_side_thread()


def _original(name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return original(*args, **kwargs)
