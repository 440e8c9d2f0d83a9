"""The files that a loop looks for while it sleeps, read from the frames of a thread."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.file_baton import FileBaton

from nsa.trace.stall.looked_for import files_looked_for


class OwnLock:
    """A lock by a file that only one process can make."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def acquire(self) -> None:
        while True:
            try:
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                return
            except FileExistsError:
                time.sleep(0.001)


def pause() -> None:
    time.sleep(0.001)


def until_removed(path: str) -> None:
    while os.path.exists(path):
        pause()


def until_there(folder: Path) -> None:
    while not (folder / "ready").exists():
        time.sleep(0.001)


def until_set(done: threading.Event) -> None:
    while not done.is_set():
        time.sleep(0.001)


def seen(body: Callable[..., None], *arguments: Any, release: Callable[[], Any], looks: int = 10_000) -> Any:
    """Return what is found of a thread that runs ``body``, at the first of ``looks`` that finds something."""
    thread = threading.Thread(target=body, args=arguments)
    thread.start()
    try:
        for _ in range(looks):
            found = files_looked_for(sys._current_frames().get(thread.ident or 0))
            if found:
                return found
            time.sleep(0.0005)
        return []
    finally:
        release()
        thread.join()


WAITS: dict[str, Callable[[Path], None]] = {
    "FileBaton": lambda lock: FileBaton(str(lock), wait_seconds=0.001).wait(),
    "own_lock": lambda lock: OwnLock(lock).acquire(),
    "own_function": lambda lock: until_removed(str(lock)),
}


@pytest.mark.parametrize("kind", WAITS)
def test_a_lock_file_that_a_process_left(kind: str, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    (found,) = seen(WAITS[kind], lock, release=lock.unlink)
    assert (found["path"], found["is_open"]) == (str(lock), False)
    assert found["unchanged_s"] >= 0


def test_a_lock_file_that_is_held(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w"):
        (found,) = seen(until_removed, str(lock), release=lock.unlink)
    assert found["is_open"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    found = seen(until_there, tmp_path, release=(tmp_path / "ready").touch)
    assert found == [{"path": str(tmp_path / "ready")}]


def test_a_loop_that_looks_for_no_file() -> None:
    done = threading.Event()
    assert seen(until_set, done, release=done.set, looks=50) == []
