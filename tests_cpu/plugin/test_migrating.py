"""docs/migrating.md: what its recipes do with suites that start their own processes, without a change of their tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_nsa.testing import run_example

ROOT = Path(__file__).resolve().parents[2]

# As torchsnapshot's: torch's launcher starts processes that import the test's module, and call the function below the decorator.
LAUNCHER = """
import functools, importlib, uuid
import torch.distributed.launcher as pet

def _entry(module, name, args):
    getattr(importlib.import_module(module), name).__wrapped__(*args)

def run_with_pet(nproc):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            config = pet.LaunchConfig(
                min_nodes=1, max_nodes=1, nproc_per_node=nproc, run_id=str(uuid.uuid4()), rdzv_backend="c10d",
                rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.2, start_method="spawn")
            pet.elastic_launch(config, entrypoint=_entry)(function.__module__, function.__name__, args)
        return wrapper
    return decorate

run_with_pet_async = None
"""
LAUNCHED = """
from their_project.testing import run_with_pet, run_with_pet_async

def names():
    return {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")}

@run_with_pet(nproc=2)
def test_reduces():
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    rank = dist.get_rank()
    assert names() == {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}

@run_with_pet(nproc=2)
def test_hangs():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
"""
COROUTINE = """
@run_with_pet_async(nproc=2)
async def test_coroutine():
    import asyncio
    dist.init_process_group("gloo")
    await asyncio.to_thread(dist.barrier)
"""
# As DeepSpeed's: a class with a number; a hook of its conftest.py starts the processes.
DEEPSPEED = {
    "deepspeed/__init__.py": """
import torch.distributed as dist
from . import comm

def init_distributed(dist_backend):
    if not dist.is_initialized():
        dist.init_process_group(dist_backend)
""",
    "deepspeed/comm/__init__.py": "from torch.distributed import barrier\n",
    "common.py": """
class DistributedTest:
    world_size, backend, init_distributed, set_dist_env, is_dist_test = 2, "gloo", True, True, True
    def __call__(self, request): raise AssertionError("starts processes")
""",
    "conftest.py": """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
""",
}
DEEPSPEED_TESTS = """
from common import DistributedTest

class TestTwo(DistributedTest):
    def test_sum(self):
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 2

    @pytest.mark.world_size(1)
    def test_override(self): assert dist.get_world_size() == 1

class TestSeveral(DistributedTest):
    world_size = [1, 3]
    def test_size(self): assert os.environ["LOCAL_SIZE"] == str(dist.get_world_size())

class TestByItself(DistributedTest):
    init_distributed = False
    def test_no_group(self): assert not dist.is_initialized()

def test_plain(): assert "RANK" not in os.environ
"""


def test_a_decorator_of_torch_s_launcher(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    recipe, for_coroutines = re.findall(
        r"```python\n(.*?)```", page.partition("## torch.distributed.launcher")[2], re.S
    )[:2]
    pytester.mkpydir("their_project").joinpath("testing.py").write_text(LAUNCHER)
    pytester.makeconftest(
        f"import asyncio, functools\n{recipe}\n{for_coroutines}\n"
        "their_project.testing.run_with_pet_async = run_on_ranks_async\n"
    )
    result = run_example(pytester, LAUNCHED + COROUTINE)
    assert result.outcomes == {"passed": 2, "failed": 1}, result.stdout
    verdict = result.verdicts["test_hangs"]
    assert verdict.ranks == (0,)
    assert "in test_hangs" in verdict.where


# A copy of torch's base, as mmengine has it.
COPIED = """
import unittest

class MultiProcessTestCase(unittest.TestCase):
    def __init__(self, name="runTest"):
        super().__init__(name)
        if name != "runTest":
            setattr(self, name, self.join_or_run(getattr(self, name)))

    def join_or_run(self, function): raise AssertionError("joins processes")

    def _spawn_processes(self): raise AssertionError("starts processes")

    @classmethod
    def _run(cls, rank, test_name, file_name, parent_pipe):
        self = cls(test_name)
        self.rank, self.file_name = rank, file_name
        self.run_test(test_name, parent_pipe)
"""
CASES = """
from their_project.testing import MultiProcessTestCase

class TestReduces(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def run_test(self, test_name, parent_pipe):
        self.value = torch.ones(1)
        super().run_test(test_name, parent_pipe)

    def test_sum(self):
        dist.init_process_group("gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=self.world_size)
        dist.all_reduce(self.value)
        self.assertEqual(self.value.item(), 2)

class TestDerived(TestReduces):
    def test_fails_on_one(self):
        self.assertEqual(self.rank, 0)
"""


def test_a_copy_of_torch_s_base_by_a_conftest(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    (recipe,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "__bases__" in text]
    pytester.mkpydir("their_project").joinpath("testing.py").write_text(COPIED)
    pytester.makeconftest(recipe)
    result = run_example(pytester, CASES)
    assert result.outcomes == {"passed": 2, "failed": 1}, result.stdout
    verdict = result.verdicts["TestDerived::test_fails_on_one"]
    assert (verdict.cause, verdict.ranks) == ("assertion", (1,))


def test_deepspeed_s_classes(pytester: pytest.Pytester) -> None:
    """By the plugin that runs DeepSpeed's own suite, on classes of its form."""
    for name, text in DEEPSPEED.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    plugin = ROOT / "benchmarks" / "clients" / "deepspeed_on_ranks.py"
    (pytester.path / plugin.name).write_text(plugin.read_text(encoding="utf-8"))
    result = run_example(pytester, DEEPSPEED_TESTS, "-p", "deepspeed_on_ranks")
    assert result.outcomes == {"passed": 6}, result.stdout
    assert len(re.findall(r"5 of 6 tests on ranks", result.stdout)) == 1
