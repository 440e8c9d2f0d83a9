"""Whether a thread waits for other ranks, by its frames: in a function that waits, and not in incidental work below it."""

from __future__ import annotations

import pytest

from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.evidence.waiting import computes, torch_wait, waits_for_a_key

LIB = "/usr/lib/python3.11/site-packages/torch"
USER = Frame("/home/u/train.py", 7, "step")
EVENT = [Frame("/usr/lib/python3.11/threading.py", line, "wait") for line in (327, 629)]


def frames(*library: tuple[str, str]) -> list[Frame]:
    """Return a stack, its innermost frame first, called from the user's line."""
    return [*(Frame(f"{LIB}/{file}", 1, function) for file, function in library), USER]


@pytest.mark.parametrize(
    ("stack", "waits"),
    [
        (frames(("distributed/distributed_c10d.py", "barrier")), "barrier"),
        (
            frames(("distributed/distributed_c10d.py", "all_gather"), ("distributed/c10d_logger.py", "wrapper")),
            "all_gather",
        ),
        (frames(("distributed/rpc/api.py", "rpc_sync")), "rpc_sync"),
        (frames(("_ops.py", "__call__"), ("distributed/_functional_collectives.py", "wait_tensor")), "wait_tensor"),
        # RPC waits for an event that its own threads set; so does a thread pool, for no other rank.
        ([*EVENT, *frames(("distributed/rpc/api.py", "_all_gather"))], "_all_gather"),
        (
            [*EVENT, Frame("/usr/lib/python3.11/queue.py", 1, "get"), *frames(("distributed/rpc/api.py", "shutdown"))],
            "",
        ),
        ([*EVENT, USER], ""),
        # Functions of the same files that wait for no rank.
        (frames(("distributed/distributed_c10d.py", "get_rank")), ""),
        (frames(("distributed/tensor/_dispatch.py", "dispatch")), ""),
        # Incidental work: pickling, an import.
        (
            [
                Frame("<frozen importlib._bootstrap>", 1, "_load"),
                *frames(("distributed/distributed_c10d.py", "all_reduce")),
            ],
            "",
        ),
        (frames(("_tensor.py", "__reduce_ex__"), ("distributed/distributed_c10d.py", "broadcast_object_list")), ""),
        ([USER, *frames(("distributed/distributed_c10d.py", "barrier"))], ""),
    ],
)
def test_the_function_that_waits_is_the_innermost(stack: list[Frame], waits: str) -> None:
    assert torch_wait(stack) == waits


def test_a_store_is_not_a_queue_of_that_name() -> None:
    assert waits_for_a_key([USER], "store.wait(['ready'])")
    assert not waits_for_a_key([Frame("/usr/lib/python3.11/queue.py", 1, "get"), USER], "store.get()")
    assert not waits_for_a_key([USER], "model.wait()")


def test_the_main_thread_decides_whether_a_rank_computes() -> None:
    assert not computes({"cpu_share": 0.9, "main_cpu_share": 0.0})
    assert computes({"cpu_share": 0.9, "main_cpu_share": 0.7})
    assert computes({"cpu_share": 0.2, "main_cpu_share": 0.2, "wants_cpu": True})
