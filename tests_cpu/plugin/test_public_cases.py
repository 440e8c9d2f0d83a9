"""Hangs that users of other harnesses reported in public, planted here: each ends by its stall, with rank and line, and the other
tests' results stay. What they reported, in order: pytorch#194943, ROCm/pytorch#3526, deepspeedai/DeepSpeed#7334,
keras-team/keras#23590, NVIDIA/TransformerEngine#3384, pytorch/helion#2098.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from xml.etree import ElementTree

import pytest

from pytest_nsa.testing import HEADER, ExampleResult, run_example, run_in

LIMIT_S = 60  # of each test: none may need it

# Workers that are kept for a class: one stalls, and the harness waits for its answer for ever. The subclass inherits them, dead.
CONTINUOUS = """
from torch.testing._internal import common_distributed as bases

@pytest.mark.skipif(not hasattr(bases, "MultiProcContinuousTest"), reason="torch 2.6 has another base")
@world_size(2, group=None)
class TestBase(OnRanks, getattr(bases, "MultiProcContinuousTest", bases.MultiProcessTestCase)):
    @classmethod
    def backend_str(cls): return "gloo"

    def test_a_passes(self): dist.barrier()

    def test_b_stalls(self):
        if self.rank == 1: time.sleep(1000)
        dist.barrier()

    def test_c_dies(self):
        if self.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def test_d_comes_after(self): dist.barrier()

class TestSubclass(TestBase):
    def test_e_of_the_subclass(self): dist.barrier()
"""

# A pool of four that is reused: its members meet in destroy_process_group, and one does not come.
REUSED = """
@pytest.fixture
def torn_down():
    yield
    dist.barrier()
    dist.destroy_process_group()

@reuse
class TestPool:
    @world_size(4)
    def test_before(self, group): dist.barrier()

    @world_size(4)
    def test_does_not_come(self, group, torn_down):
        if group.rank == 3: threading.Event().wait()

    @world_size(4)
    def test_after(self, group): dist.barrier()
"""

# gloo groups beside xdist: a fixed port is taken by the first process that binds it; each test needs one of its own.
PORTS = """
@world_size(2, group=None)
@pytest.mark.parametrize("again", range(4))
def test_groups_come_and_go(again):
    for _ in range(3):
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()

@world_size(2, group=None)
def test_a_port_that_is_taken():
    os.environ["MASTER_PORT"] = os.environ["TAKEN_PORT"]
    dist.init_process_group("gloo")
"""

# A launcher in a subprocess: JUnit XML has "exit code 1", and no rank's traceback.
TRACEBACK = """
def scale(tensor, by):
    if by == 0: raise ValueError("rank's own reason")
    return tensor / by

@world_size(2)
def test_one_rank_raises(group): scale(torch.ones(1), 1 - group.rank)
"""

# A limit that counts the start of NCCL: here both take more than half of it.
START = """
@world_size(2, group=None)
@pytest.mark.timeout(8)
def test_after_a_slow_start():
    dist.init_process_group("gloo")
    ends = torch.tensor([time.time() + 4.5], dtype=torch.float64)
    dist.broadcast(ends, 0)
    done = torch.zeros(1)
    while not done.item():
        done.fill_(time.time() > ends.item())
        dist.broadcast(done, 0)
"""
SLOW_START = """
import time

def pytest_nsa_environment(config, rank, world_size):
    time.sleep(4.5)
"""


@dataclass(frozen=True, kw_only=True)
class Cases:
    """A run of all but the last, and the text of each failure in its JUnit XML."""

    result: ExampleResult
    junit: dict[str, str]

    @property
    def have_the_base(self) -> bool:
        return "skipped" not in self.result.outcomes


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    pytest.importorskip("expecttest", reason="torch's own test utilities import it")
    folder = tmp_path_factory.mktemp("public")
    sources = {"continuous": CONTINUOUS, "reused": REUSED, "ports": PORTS, "traceback": TRACEBACK}
    for name, source in sources.items():
        (folder / f"test_{name}.py").write_text(f"{HEADER}pytestmark = pytest.mark.timeout({LIMIT_S})\n{source}")
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAKEN_PORT", str(other.getsockname()[1]))
        result = run_in(folder, "-n", "2", "-o", "ranks_hang_after=3", f"--junitxml={folder / 'junit.xml'}")
    found = ElementTree.parse(folder / "junit.xml").iter("testcase")
    failures = {str(case.get("name")): "".join(str(f.text) for f in case.iter("failure")) for case in found}
    return Cases(result=result, junit=failures)


EXPECTED = {
    "TestBase::test_b_stalls": ("sleeping", (1,), "in test_b_stalls"),
    "TestSubclass::test_b_stalls": ("sleeping", (1,), "in test_b_stalls"),
    "TestBase::test_c_dies": ("rank_died", (1,), "in test_c_dies"),
    "TestSubclass::test_c_dies": ("rank_died", (1,), "in test_c_dies"),
    "TestPool::test_does_not_come": ("lock_deadlock", (3,), "in test_does_not_come"),
    "test_a_port_that_is_taken": ("network_unusable", (0,), "in test_a_port_that_is_taken"),
    "test_one_rank_raises": ("rank_exception", (1,), "in scale"),
}
OF_THE_BASE = [name for name in EXPECTED if name.startswith(("TestBase", "TestSubclass"))]


@pytest.mark.parametrize("name", EXPECTED)
def test_it_ends_by_its_stall_with_rank_and_line(cases: Cases, name: str) -> None:
    if name in OF_THE_BASE and not cases.have_the_base:
        pytest.skip("this torch has no MultiProcContinuousTest")
    cause, ranks, place = EXPECTED[name]
    verdict = cases.result.verdicts[name]
    assert (verdict.cause, verdict.ranks) == (cause, ranks)
    assert verdict.where.endswith(place)
    assert verdict.duration_s < LIMIT_S / 2
    assert place in cases.junit[name.rpartition("::")[2]]  # of JUnit XML


def test_the_other_tests_results_stay(cases: Cases) -> None:
    # The classes: a, d of both, e; the pool: before and after; the ports: four.
    if cases.have_the_base:
        assert cases.result.outcomes == {"passed": 11, "failed": len(EXPECTED)}
    else:
        assert cases.result.outcomes == {"passed": 6, "failed": len(EXPECTED) - len(OF_THE_BASE), "skipped": 9}


def test_junit_has_the_traceback_of_the_rank(cases: Cases) -> None:
    text = cases.junit["test_one_rank_raises"]
    assert "ValueError: rank's own reason" in text
    assert 'if by == 0: raise ValueError("rank\'s own reason")' in text


@pytest.mark.slow
def test_the_limit_does_not_count_the_start(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(SLOW_START)
    result = run_example(pytester, START)
    assert result.outcomes == {"passed": 1}
