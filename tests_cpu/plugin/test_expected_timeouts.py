"""A timeout that a test expects stays a timeout: the rank that ends first keeps its connections, and nothing is announced."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

HEAD = """
from datetime import timedelta
SHORT = timedelta(seconds=2.5)
"""
# What rank 0 waits in while rank 1 has ended its test.
EXPECTED = {
    "wait": "dist.all_reduce(torch.ones(2), async_op=True).wait(SHORT)",
    "monitored_barrier": "dist.monitored_barrier(timeout=SHORT)",
    "group": "dist.all_reduce(torch.ones(2), group=group_of_both)",
    "recv": "dist.recv(torch.ones(2), 1, group=group_of_both)",
    "store": "dist.distributed_c10d._get_default_store().wait(['never'], SHORT)",
}
TEST = """
@world_size(2)
@pytest.mark.timeout(30)
def test_{name}(group):
    group_of_both = dist.new_group([0, 1], timeout=SHORT)
    if group.rank == 0:
        time.sleep(0.5)  # the other one has ended by now
        with pytest.raises(RuntimeError, match="(?i)(timed|time) ?out|rank 1 failed to pass"):
            {call}
"""


@pytest.mark.parametrize(
    "names",
    [("wait", "group"), pytest.param(("monitored_barrier", "recv", "store"), marks=pytest.mark.slow)],
    ids=", ".join,
)
def test_an_expected_timeout_stays_one(pytester: pytest.Pytester, names: tuple[str, ...]) -> None:
    result = run_example(pytester, HEAD + "".join(TEST.format(name=n, call=EXPECTED[n]) for n in names))
    assert result.outcomes == {"passed": len(names)}
    assert result.run is not None
    assert not (result.run / "announcements.jsonl").exists()


def test_a_rank_that_waits_without_a_limit_is_left_at_once(pytester: pytest.Pytester) -> None:
    source = """
    @world_size(2)
    def test_alone(group):
        if group.rank == 0:
            dist.barrier()
    """
    result = run_example(pytester, source)
    verdict = result.verdicts["test_alone"]
    assert (verdict.cause, verdict.ranks) == ("extra_collective", (0,))
    assert verdict.duration_s < 10  # of the 300 that it has
