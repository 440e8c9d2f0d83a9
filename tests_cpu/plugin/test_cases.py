"""Other people's kinds of tests on ranks: unittest.TestCase, groups that a test makes itself."""

import pytest

from pytest_nsa.testing import run_example

CASE = """
import unittest

@world_size(2)
class TestIt(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.shared = dist.get_rank()

    def setUp(self):
        self.value = torch.ones(1)
        self.addCleanup(print, "cleaned up", dist.get_rank(), flush=True)

    def tearDown(self): dist.barrier()

    def test_passes(self):
        dist.all_reduce(self.value)
        self.assertEqual((self.value.item(), self.shared), (2, dist.get_rank()))

    def test_skips(self): self.skipTest("not here")

    @unittest.skip("never")
    def test_is_skipped(self): raise ValueError

    @unittest.expectedFailure
    def test_is_expected(self): self.assertEqual(1, 2)

    def test_sub(self):
        for i in range(3):
            with self.subTest(i=i): self.assertLess(i, 3)

    @world_size(3)
    def test_of_three(self): self.assertEqual(dist.get_world_size(), 3)

class TestFails(unittest.TestCase):
    @world_size(2)
    def test_fails_on_rank_1(self): self.assertEqual(dist.get_rank(), 0, "rank 1 is wrong")

    @world_size(2)
    def test_hangs(self):
        if dist.get_rank() == 0: dist.barrier()

    @world_size(2)
    @unittest.expectedFailure
    def test_unexpected(self): pass

    def test_on_the_host(self): self.assertFalse(dist.is_initialized())
"""


def test_a_unittest_case_runs_on_ranks_with_all_that_belongs_to_it(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, CASE, "-s")
    assert result.outcomes == {"passed": 4, "failed": 3, "skipped": 2, "xfailed": 1}
    assert "[rank 0] cleaned up 0" in result.stdout
    assert "[rank 1] cleaned up 1" in result.stdout
    failed = {name.partition("::")[2]: v for name, v in result.verdicts.items() if v.failed}
    assert (failed["test_fails_on_rank_1"].cause, failed["test_fails_on_rank_1"].ranks) == ("assertion", (1,))
    assert "rank 1 is wrong" in failed["test_fails_on_rank_1"].reason
    assert (failed["test_hangs"].cause, failed["test_hangs"].ranks) == ("extra_collective", (0,))
    assert "Unexpected success" in failed["test_unexpected"].reason


GROUP = """
@world_size(2, group=None)
def test_makes_its_own():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 2
    dist.destroy_process_group()

def test_makes_another(group):
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.barrier()

@world_size(2, group=None)
def test_takes_both(group): pass

@world_size(2, group=None)
def test_hangs():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0: dist.barrier()
"""


@pytest.mark.parametrize("launch", ["auto", pytest.param("cold", marks=pytest.mark.slow)])
def test_ranks_may_make_their_own_group(pytester: pytest.Pytester, launch: str) -> None:
    result = run_example(pytester, GROUP, f"--ranks-launch={launch}")
    assert result.outcomes == {"passed": 2, "errors": 1, "failed": 1}
    assert "world_size(..., group=None) makes none: remove one of the two" in result.stdout
    assert (result.verdicts["test_hangs"].cause, result.verdicts["test_hangs"].ranks) == ("extra_collective", (0,))


def test_a_test_that_another_plugin_would_run_in_one_process_is_an_error(pytester: pytest.Pytester) -> None:
    """As pytest-asyncio does: its items are functions of a class of its own."""
    pytester.makeconftest(
        """
        import asyncio, inspect, pytest

        class Coroutine(pytest.Function):
            def runtest(self): asyncio.run(self.obj())

        @pytest.hookimpl(tryfirst=True)
        def pytest_pycollect_makeitem(collector, name, obj):
            if inspect.iscoroutinefunction(obj) and name.startswith("test"):
                return [Coroutine.from_parent(collector, name=name)]
        """
    )
    source = """
    @world_size(2)
    async def test_on_ranks(): pass

    async def test_alone(): pass
    """
    result = run_example(pytester, source)
    assert result.outcomes == {"passed": 1, "errors": 1}
    assert "test_on_ranks: would not run on ranks: another plugin runs it (Coroutine)" in result.stdout
