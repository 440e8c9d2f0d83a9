"""What the tracers record of a store: the keys that the main thread waits for, and those that it looks for."""

import datetime
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nsa.trace.board import Board
from nsa.trace.calls import stores
from nsa.trace.calls.stores import Limit, StoreRecorder
from pytest_nsa.evidence.board import BoardReader, BoardSnapshot
from tests_cpu.warm import WarmPython


class Recorded:
    """A class of stores whose calls are recorded, and what its board says within each of them."""

    def __init__(self, folder: Path) -> None:
        self.board = Board(folder / "board.bin", rank=0, world_size=1)
        self.recorder = StoreRecorder(self.board, Limit(self.board))
        self._reader = BoardReader(folder / "board.bin")
        self.within: list[BoardSnapshot] = []
        recorded = self

        class Store:
            timeout = datetime.timedelta(seconds=8)

            def get(self, key: str) -> None:
                recorded.within.append(recorded.now())
                if key == "raises":
                    raise RuntimeError(key)

            def wait(self, keys: list[str], timeout: Any = None) -> None:
                recorded.within.append(recorded.now())
                self.get(keys[0] + "/inner")
                recorded.within.append(recorded.now())

            def check(self, keys: list[str]) -> bool:
                return False

        for name in ("get", "wait"):
            self.recorder.wrap_wait(Store, name)
        self.recorder.wrap_look(Store, "check")
        self.store = Store()

    def now(self) -> BoardSnapshot:
        snapshot = self._reader.read()
        assert snapshot is not None
        return snapshot


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def test_every_method_of_a_store_is_recorded() -> None:
    """But for those that nothing depends on: settings, copies, and the end of a key."""
    others = {"timeout", "set_timeout", "clone", "has_extended_api", "delete_key"}
    recorded = {*stores._WAITS, *stores._WAITS_OF_A_CLASS, *stores._LOOKS, *stores._SETS}
    assert {name for name in dir(dist.Store) if not name.startswith("_")} - others <= recorded


def test_a_call_within_another_gives_way_to_its_key_and_its_limit(recorded: Recorded) -> None:
    recorded.store.wait(["phase/1"], datetime.timedelta(seconds=20))
    before, inner, after = recorded.within
    assert [board.key for board in (before, inner, after)] == ["phase/1", "phase/1/inner", "phase/1"]
    assert inner.limit_time < before.limit_time - 5  # 8 s, the store's own, within the 20 s of the outer call
    assert after.limit_time == before.limit_time
    assert (recorded.now().key, recorded.now().limit_time) == ("", 0.0)


def test_a_look_names_its_keys_until_the_next_one(recorded: Recorded) -> None:
    recorded.store.check(["flag/1", "flag/2"])
    assert recorded.now().key == "flag/1, flag/2"
    recorded.store.get("done")  # waits, and goes back to what was looked for
    assert (recorded.within[0].key, recorded.now().key) == ("done", "flag/1, flag/2")
    recorded.store.check(["flag/3"])
    assert recorded.now().key == "flag/3"


def test_another_thread_s_calls_are_not_the_main_thread_s(recorded: Recorded) -> None:
    def other() -> None:
        recorded.store.get("other")
        recorded.store.check(["other"])

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert [board.key for board in (*recorded.within, recorded.now())] == ["", ""]


def test_of_each_line_and_kind_the_first_and_the_last_key_are_recorded(recorded: Recorded) -> None:
    class Store:
        def set(self, key: str, value: str) -> None: ...

        def add(self, key: str, amount: int) -> int:
            return 0

    used: list[tuple[str, str]] = []
    recorded.recorder.on_set = lambda *use: used.append(use)
    recorded.recorder.wrap_set(Store, "set")
    recorded.recorder.wrap_look(Store, "add")

    def publish(key: str) -> None:
        Store().set(key, "1")

    for number in range(3):
        publish(f"part/{number}")
        publish(f"of/{number}/all")
        Store().add(f"count/{number}", 1)
        Store().add(f"count/{number}", 0)  # a look
    publish("part/2")
    assert [key for key, _ in used] == ["part/0", "of/0/all", "count/0", "part/2"]
    here, caller = used[0][1].split(" < ")[:2]
    assert here.startswith(f"{__file__}:")
    assert here.endswith(" in publish")
    assert caller.startswith("test_stores.py:")
    del used[:]
    recorded.recorder.record_latest()
    assert [key for key, _ in used] == ["part/2", "of/2/all", "count/2", "part/2"]


ENDS = """
import shutil
import torch.distributed as dist
from nsa.trace.training import trace_training

traced = trace_training("run", 0, 1)
store = dist.HashStore()
store.set("epoch", "1")
traced.end()
recorded = open("run/rank0/events.jsonl").read()
shutil.rmtree("run")
store.set("end", "1")  # from a line that has set no key before
print('"key_set"' in recorded)
"""


def test_a_key_that_is_set_after_the_trace_has_ended_is_not_recorded(warm: WarmPython, tmp_path: Path) -> None:
    """As a launched session's last key: the folder of a test that passed is gone by then."""
    done = warm.call("-c", ENDS, cwd=tmp_path, stderr=subprocess.STDOUT)
    assert (done.returncode, done.stdout) == (0, "True\n")
