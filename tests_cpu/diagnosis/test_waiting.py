"""Whether a thread waits for other ranks, by its frames: in a function that waits, and not in incidental work below it; and whether
a program that has ended waits for ever.
"""

import pytest

from pytest_nsa.evidence.source import Snippet, Sources
from pytest_nsa.evidence.stacks import Frame, ThreadStack
from pytest_nsa.evidence.waiting import computes, torch_wait, wait_for_ever, waits_for_a_key

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


@pytest.mark.parametrize(
    ("loop", "for_ever"),
    [
        ("while not done: time.sleep(0.1)", True),
        ("while count < total and not self.stop.is_set(): time.sleep(pause)", True),
        ("while not done.wait(0.1): pass", True),
        # A property, a file, a clock or the body may end these.
        ("while not self.done: time.sleep(0.1)", False),
        ("while not path.exists(): time.sleep(0.1)", False),
        ("while time.monotonic() < end: time.sleep(0.1)", False),
        ("while not done: report(); time.sleep(0.1)", False),
        ("while rows: write(rows.pop()); time.sleep(0.1)", False),
        ("while not flags[0]: time.sleep(0.1)", False),
        ("while True: time.sleep(0.1)", False),
        ("for _ in range(50): time.sleep(0.1)", False),
        ("time.sleep(50)", False),
    ],
)
def test_a_program_that_has_ended_waits_for_ever_if_a_thread_polls_what_no_other_can_change(
    loop: str, for_ever: bool
) -> None:
    main = ThreadStack((EVENT[0], Frame("/usr/lib/python3.11/threading.py", 1583, "_shutdown")), is_main=True)
    poller = ThreadStack((*(EVENT if ".wait(" in loop else ()), USER), is_main=False)
    sources = Sources([Snippet(USER.file, USER.line - 1, f"def {USER.function}(done):\n    {loop}")])
    assert wait_for_ever([main, poller], sources, has_children=False) == for_ever
    assert not wait_for_ever([main, poller], sources, has_children=True)
    running = ThreadStack((*EVENT, Frame(USER.file, 1, "<module>")), is_main=True)
    assert not wait_for_ever([running, poller], sources, has_children=False)
