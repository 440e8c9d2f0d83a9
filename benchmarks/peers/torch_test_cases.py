"""The trivial test in torch's own test cases: prints the seconds of each test as a JSON list.

Usage: torch_test_cases.py MultiProcessTestCase|MultiProcContinuousTest COUNT   (needs expecttest)
"""

import json
import sys
import time
import unittest
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

MAX_TESTS = 50


def reduce_once() -> None:
    """What each test does."""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


class Fresh(MultiProcessTestCase):
    """Ranks spawned for each test."""

    world_size = 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def trivial(self) -> None:
        """Form the group, reduce."""
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        reduce_once()
        dist.destroy_process_group()


class Kept(MultiProcContinuousTest):
    """Ranks that stay for the class."""

    world_size = 2

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def trivial(self) -> None:
        """Reduce."""
        reduce_once()


for number in range(MAX_TESTS):
    setattr(Fresh, f"test_{number:02}", lambda self: self.trivial())
    setattr(Kept, f"test_{number:02}", lambda self: self.trivial())


class Timed(unittest.TestResult):
    """Notes how long each test took."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self._started = time.perf_counter()

    def stopTest(self, test: Any) -> None:
        super().stopTest(test)
        self.times.append(time.perf_counter() - self._started)


if __name__ == "__main__":
    case = Fresh if sys.argv[1] == "MultiProcessTestCase" else Kept
    names = [f"test_{number:02}" for number in range(int(sys.argv[2]))]
    result = Timed()
    unittest.TestSuite([case(name) for name in names])(result)
    assert result.wasSuccessful(), result.errors + result.failures
    print(json.dumps(result.times))
