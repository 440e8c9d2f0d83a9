"""Tests that replace the clock, os.write or functions of the interpreter: evidence is as of any test."""

# options: -o timeout=20
import builtins
import json
import os
import threading
import time

import pytest
import torch.distributed as dist


@pytest.mark.timeout(4)
def test_a_frozen_clock(group, monkeypatch):  # -> lock_deadlock 1
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    if group.rank == 1:
        threading.Event().wait()
    dist.barrier()


def refuse(*_, **__):
    raise OSError("replaced")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed")])
def test_a_disk_that_a_test_fills(group, monkeypatch, error):  # -> assertion 1: AssertionError: assert 1 == 0
    def fail(*_):
        raise error

    monkeypatch.setattr(os, "write", fail)
    assert group.rank == 0


def test_functions_of_the_interpreter(group, monkeypatch):  # -> assertion 1: AssertionError: assert 1 == 0
    for owner, name in ((builtins, "open"), (json, "dumps"), (json, "loads"), (os, "kill"), (os, "getpid")):
        monkeypatch.setattr(owner, name, refuse)
    dist.barrier()
    assert group.rank == 0
