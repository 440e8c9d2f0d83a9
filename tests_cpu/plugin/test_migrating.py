"""The adapters: suites that start their own processes run on ranks, without a change of their tests."""

import pytest

from pytest_nsa.testing import run_example

SPAWN = """
import torch.multiprocessing as mp
from torch.multiprocessing import spawn

def form(rank, n, path): dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=n)

def reduces(rank, n, path):
    form(rank, n, path)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == n

def raises(rank, n, path):
    form(rank, n, path)
    if rank == 1:
        raise ValueError("wrong data")
    dist.barrier()

def waits(rank, n, path):
    form(rank, n, path)
    if rank == 0:
        dist.barrier()

def notes(rank, path):
    assert os.environ["NOTE"] == "set by the test"
    open(f"{path}/{rank}", "w").write(os.getcwd())

def stores(rank, found): found[rank] = rank

def puts(rank, queue): queue.put(rank)

def adds(rank, value): value += rank

class Metric:
    def __init__(self): self.total = torch.ones(3)
    def __getstate__(self): return {"total": self.total.clone()}

def checks(rank, metric): assert metric.total.sum() == 3

@pytest.mark.parametrize("n", [2, 3])
def test_reduces(n, tmp_path): mp.spawn(reduces, args=(n, tmp_path / "store"), nprocs=n)

def test_by_its_name(tmp_path): spawn(reduces, (2, tmp_path / "store"), 2)

def test_expects(tmp_path):
    with pytest.raises(mp.ProcessRaisedException, match="ValueError: wrong data") as error:
        mp.start_processes(raises, (2, tmp_path / "store"), 2, start_method="fork")
    assert error.value.error_index == 1

def test_fails(tmp_path): mp.spawn(raises, (2, tmp_path / "store"), 2)

def test_waits(tmp_path): mp.spawn(waits, (2, tmp_path / "store"), 2)

def test_sees_variables_and_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTE", "set by the test")
    monkeypatch.chdir(tmp_path)
    mp.spawn(notes, (tmp_path,), 2)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [str(tmp_path)] * 2

def test_a_tensor_is_shared(tmp_path):
    value = torch.zeros(1)
    mp.spawn(adds, (value,), 2)
    assert value.item() == 1

def test_a_manager(tmp_path):
    with mp.Manager() as manager:
        found = manager.dict()
        mp.spawn(stores, (found,), 2)
        assert dict(found) == {0: 0, 1: 1}

def test_a_queue(tmp_path):
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(puts, (queue,), 2)
    assert {queue.get(), queue.get()} == {0, 1}

def test_an_object_that_makes_a_tensor_for_its_pickle(): mp.spawn(checks, (Metric(),), 3)

def test_a_tensor_is_copied(tmp_path):
    value = torch.zeros(1)
    mp.start_processes(adds, (value,), 2, start_method="fork")
    assert value.item() == 0

def test_without_processes(): assert "RANK" not in os.environ

def test_on_ranks(group): dist.barrier()
"""


# As torchsnapshot's: torch's launcher starts processes that import the test's module, and call the function below the decorator.
THEIR = {
    "their_project/__init__.py": "",
    "their_project/testing.py": """
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
""",
}
LAUNCHED = """
import torch.distributed.launcher as pet
from their_project.testing import run_with_pet

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

def doubled(value): return int(os.environ["RANK"]), 2 * value

def test_returns():
    config = pet.LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_endpoint="localhost:0")
    assert pet.elastic_launch(config, doubled)(4) == {0: (0, 8), 1: (1, 8)}
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
    def test_sum(self):  # on ranks
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 2

    @pytest.mark.world_size(1)
    def test_override(self): assert dist.get_world_size() == 1  # on ranks

class TestSeveral(DistributedTest):
    world_size = [1, 3]
    # on ranks # on ranks
    def test_size(self): assert os.environ["LOCAL_SIZE"] == str(dist.get_world_size())

class TestByItself(DistributedTest):
    init_distributed = False
    def test_no_group(self): assert not dist.is_initialized()  # on ranks

def test_plain(): assert "RANK" not in os.environ
"""

# As mosaicml-streaming's: a mark has the number; all processes have LOCAL_RANK 0.
STREAMING = {
    "common.py": """
class DistributedTest:
    world_size, is_dist_test = 1, True
    def _run_test(self, request): raise AssertionError("starts processes")
""",
    "conftest.py": DEEPSPEED["conftest.py"].replace("item.cls()(item._request)", "item.cls()._run_test(item._request)"),
}
STREAMING_TESTS = """
from common import DistributedTest

class TestTwo(DistributedTest):
    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("scale", [1, 3])
    def test_sum(self, scale):  # on ranks # on ranks
        value = torch.full((1,), float(scale))
        dist.all_reduce(value)
        assert value.item() == 2 * scale
        assert os.environ["LOCAL_RANK"] == "0"

    def test_one(self): assert dist.get_world_size() == 1  # on ranks

    @pytest.mark.world_size(2)
    def test_skips(self): pytest.skip("not here")  # on ranks
"""
MONAI = {
    "tests/__init__.py": "",
    "tests/test_utils.py": """
class DistCall:
    def __init__(self, nnodes=1, nproc_per_node=1):
        self.nnodes, self.nproc_per_node, self.backend = nnodes, nproc_per_node, "gloo"

    def __call__(self, test): raise AssertionError("starts processes")
""",
}
MONAI_TESTS = """
import unittest
from tests.test_utils import DistCall

class TestIt(unittest.TestCase):
    @DistCall(nnodes=1, nproc_per_node=2)
    def test_sum(self):  # on ranks
        value = torch.ones(1)
        dist.all_reduce(value)
        self.assertEqual(value.item(), 2)

    @DistCall(nproc_per_node=2)
    def test_fails(self): self.assertEqual(dist.get_rank(), 0)  # on ranks

    def test_plain(self): self.assertNotIn("RANK", os.environ)
"""


# A copy of torch's base, as mmengine has it.
COPIED = """
import unittest

class MultiProcessTestCase(unittest.TestCase):
    @property
    def world_size(self): return 2

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
COPY = {"their_project/__init__.py": "", "their_project/testing.py": COPIED}
ON_ONE = "TestDerived::test_fails_on_one"


def test_a_base_without_a_number_of_ranks_is_refused(pytester: pytest.Pytester) -> None:
    pytester.mkpydir("their_project").joinpath("testing.py").write_text(COPIED.replace("world_size", "size"))
    result = run_example(pytester, CASES, "-p", "pytest_nsa.adapters.multiprocess_test_case")
    assert "TestReduces: has no world_size before setUp: mark it world_size(n)" in result.stdout


@pytest.mark.parametrize(
    ("adapter", "files", "tests", "outcomes", "failed"),
    [
        ("spawn", {}, SPAWN, {"passed": 12, "failed": 2}, {"test_fails": (1, "raises"), "test_waits": (0, "waits")}),
        ("elastic", THEIR, LAUNCHED, {"passed": 2, "failed": 1}, {"test_hangs": (0, "test_hangs")}),
        ("multiprocess_test_case", COPY, CASES, {"passed": 2, "failed": 1}, {ON_ONE: (1, "test_fails_on_one")}),
        ("deepspeed", DEEPSPEED, DEEPSPEED_TESTS, {"passed": 6}, {}),
        ("streaming", STREAMING, STREAMING_TESTS, {"passed": 3, "skipped": 1}, {}),
        ("monai", MONAI, MONAI_TESTS, {"passed": 2, "failed": 1}, {"TestIt::test_fails": (1, "test_fails")}),
    ],
)
def test_the_tests_of_a_project_run_on_ranks(
    adapter: str, files: dict[str, str], tests: str, outcomes: dict[str, int], failed: dict[str, tuple[int, str]],
    pytester: pytest.Pytester,
) -> None:  # fmt: skip
    for name, text in files.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    # Programs fork beside the threads of numpy: from Python 3.12 on this warns.
    quiet = ("-W", "ignore:This process:DeprecationWarning", "-o", "ranks_hang_after=1.5")
    result = run_example(pytester, tests, "-p", f"pytest_nsa.adapters.{adapter}", *quiet)
    assert result.outcomes == outcomes, result.stdout
    found = {name: (*v.ranks, v.where.rpartition(" in ")[2]) for name, v in result.verdicts.items() if v.failed}
    assert found == failed
    assert "# on ranks" not in tests or len(result.verdicts) == tests.count("# on ranks")


def test_the_adapter_of_monai_outside_of_its_repository(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, "", "-p", "pytest_nsa.adapters.monai")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
