"""Programs in which native code or a compiler runs, or keeps the GIL."""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted


def at(group: Group, culprit: int, fault: Callable[[], Any]) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()
        dist.all_reduce(torch.ones(2))


@planted(2, rank=1)
def test_native_code_holds_the_gil(group: Group, culprit: int) -> None:
    at(group, culprit, lambda: ctypes.PyDLL(None).sleep(1000))


def hold_while_main_is_in_a_collective(native, store):
    """Call native code that keeps the GIL, once the main thread is in a collective; the others come to it then."""
    main = threading.main_thread().ident
    while not any(is_of_torch(frame) for frame in frames_of(sys._current_frames()[main])):
        time.sleep(0.01)
    store.set("is held", "")
    native()  # HERE


def frames_of(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_of_torch(frame):
    return frame.f_code.co_filename.endswith("distributed_c10d.py") and frame.f_code.co_name != "broadcast"


def reduce_while_a_thread_holds_the_gil(group, culprit, native):
    store, x = dist.distributed_c10d._get_default_store(), torch.ones(4)
    dist.broadcast(x, 0)
    if group.rank == culprit:
        threading.Thread(target=hold_while_main_is_in_a_collective, args=(native, store), daemon=True).start()
    else:
        store.wait(["is held"])
    for _ in range(3):
        dist.all_reduce(x)  # HERE


@planted(4)
def test_a_pattern_in_a_thread_keeps_the_gil_from_a_collective(group, faulty):
    pattern = r"(a?){40}a{40}" if faulty else r"a{40}"
    reduce_while_a_thread_holds_the_gil(group, 2, lambda: re.match(pattern, "a" * 40))  # HERE


@planted(3)
def test_an_idle_call_in_a_thread_keeps_the_gil_from_a_collective(group, faulty):
    reduce_while_a_thread_holds_the_gil(group, 1, lambda: ctypes.PyDLL(None).sleep(1000 if faulty else 0))  # HERE


def installed(tmp_path, name, text):
    """Write a module where packages are installed, and return a function that imports it."""
    folder = tmp_path / "lib" / "python3.11" / "site-packages"

    def load():
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text(text)
        sys.path.insert(0, str(folder))
        importlib.import_module(name)  # HERE

    return load


@planted(3, rank=2)
def test_a_package_parses_its_vocabulary_when_it_is_imported(group, tmp_path, culprit):
    text = "words = {}\nwhile len(words) < 10:\n    words[hash('a') % 7] = sorted(words)\n"
    at(group, culprit, installed(tmp_path, "vocabulary", text))


@planted(3, rank=2)
def test_a_function_of_many_operations_is_traced(group, culprit):
    def polynomial(x):
        for power in range(200_000):
            x = x * 0.5 + power
        return x

    at(group, culprit, lambda: torch.compile(polynomial, backend="eager")(torch.ones(2)))


@planted(2, rank=0)
def test_a_long_native_call(group: Group, culprit: int) -> None:
    import hashlib

    at(group, culprit, lambda: hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9))
