"""Looks at other threads' stacks: what they return, and that they do no harm."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa.trace.stall.heartbeat import dump_flight_recorder
from nsa.trace.stall.stacks import as_dump, look
from pytest_nsa.evidence.stacks import parse_dump

# C++ makes and drops a thread's state for each of these callbacks, while another thread looks.
CALLBACKS = """
import os, sys, tempfile, threading
import torch, torch.distributed as dist
from nsa.trace.stall.stacks import look

torch.set_num_threads(1)
store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
dist.init_process_group("gloo", rank=0, world_size=1, store=store)
ends, looks = threading.Event(), 0

def watch():
    global looks
    while not ends.is_set():
        assert threading.main_thread().ident in look()
        looks += 1

watcher = threading.Thread(target=watch)
watcher.start()
for _ in range(int(sys.argv[1])):
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(8)]
    for future in [w.get_future().then(lambda f: f.value()[0] + 1) for w in works]:
        future.wait()
ends.set()
watcher.join()
del works, future
dist.destroy_process_group()  # its threads must not outlive the interpreter
print("looks:", looks)
"""


def waits(inside: threading.Event, ends: threading.Event) -> None:
    inside.set()
    ends.wait()


def test_a_look_returns_each_thread_s_functions_innermost_first() -> None:
    inside, ends = threading.Event(), threading.Event()
    thread = threading.Thread(target=waits, args=(inside, ends))
    thread.start()
    inside.wait()
    try:
        found = look()
        alone = look(thread.ident)
    finally:
        ends.set()
        thread.join()
    assert [p.code.co_name for p in found[threading.main_thread().ident or 0]][:2] == [
        "look",
        "test_a_look_returns_each_thread_s_functions_innermost_first",
    ]
    assert "waits" in [p.code.co_name for p in found[thread.ident or 0]]
    assert list(alone) == [thread.ident]
    assert look(-1) == {-1: []}


def test_a_look_is_read_as_a_dump() -> None:
    main = threading.main_thread().ident or 0
    stacks = look()
    (stack,) = [s for s in parse_dump(as_dump(stacks, main)) if s.is_main]
    assert [(f.file, f.line, f.function) for f in stack.frames] == [
        (p.code.co_filename, p.line, p.code.co_name) for p in stacks[main]
    ]


@pytest.mark.parametrize("rounds", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_look_stands_threads_that_come_and_go(rounds: int) -> None:
    done = subprocess.run([sys.executable, "-c", CALLBACKS, str(rounds)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.rpartition("looks: ")[2]) > 0


@pytest.mark.parametrize("name", ["_dump_fr_trace_json", "_dump_nccl_trace_json"])
def test_the_flight_recorder_has_another_name_in_torch_2_6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def dump(includeCollectives: bool, onlyActive: bool) -> bytes:
        return b'{"entries": []}'

    monkeypatch.setattr(torch._C, "_distributed_c10d", SimpleNamespace(**{name: dump}))
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "100")
    assert dump_flight_recorder(tmp_path / "flight_recorder.json")
    assert (tmp_path / "flight_recorder.json").read_bytes() == b'{"entries": []}'
    monkeypatch.setattr(torch._C, "_distributed_c10d", SimpleNamespace())
    assert not dump_flight_recorder(tmp_path / "none.json")
