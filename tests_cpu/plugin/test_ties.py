"""What rests on a tie is not certain: half of the ranks did the one, half the other, and no round before shows which is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nsa.testing import HEADER, ExampleResult, run_in

TIES = """
@world_size(2)
def test_a_first_call_that_one_of_two_makes(group):
    found = torch.tensor([1.0, 0.0])[group.rank]
    if found:
        dist.broadcast(torch.ones(1), 0)
    dist.barrier()

@world_size(4)
def test_a_group_whose_other_members_serve(group):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for step in range(3):
        dist.all_reduce(torch.ones(1))
    if group.rank < 2:
        dist.barrier(group=pairs[group.rank])
    dist.broadcast(torch.ones(1), 0)

@world_size(2)
def test_a_message_in_a_first_round(group):
    if group.rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
        dist.recv(torch.ones(1), 0)
    dist.barrier()
"""
KNOWN = """
@world_size(2)
def test_a_call_that_each_round_before_had(group):
    for step in range(6):
        if not (group.rank == 1 and step == 3):
            dist.broadcast(torch.ones(1), 0)
        dist.barrier()

@world_size(2)
def test_a_call_under_a_condition_on_the_rank(group):
    if group.rank < 1:
        dist.broadcast(torch.ones(1), 0)
    dist.barrier()

@world_size(3)
def test_a_first_call_that_most_make(group):
    if group.rank != 2:
        dist.broadcast(torch.ones(1), 0)
    dist.barrier()

class Layer(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.linear, self.rank = torch.nn.Linear(4, 4), rank

    def forward(self, x):
        if self.rank:
            dist.recv(torch.ones(4), 0)
        else:
            dist.send(torch.ones(4), 1)
        return self.linear(x)

@world_size(2)
def test_a_receive_that_is_recomputed(group):
    from torch.utils.checkpoint import checkpoint
    layer, x = Layer(group.rank), torch.ones(4, requires_grad=True)
    out = checkpoint(layer, x, use_reentrant=False) if group.rank else layer(x)
    out.sum().backward()
    dist.barrier()
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> ExampleResult:
    folder: Path = tmp_path_factory.mktemp("ties")
    (folder / "test_example.py").write_text(HEADER + TIES + KNOWN)
    return run_in(folder, "-o", "timeout=8")


@pytest.mark.parametrize("name", [line[4:-8] for line in TIES.splitlines() if line.startswith("def test_")])
def test_is_not_certain(result: ExampleResult, name: str) -> None:
    verdict = result.verdicts[name]
    assert verdict.outcome == "HANG"
    assert not verdict.certain
    assert verdict.confidence < 0.95


@pytest.mark.parametrize(
    ("name", "cause", "ranks"),
    [
        ("test_a_call_that_each_round_before_had", "skipped_collective", (1,)),
        ("test_a_call_under_a_condition_on_the_rank", "extra_collective", (0,)),
        ("test_a_first_call_that_most_make", "skipped_collective", (2,)),
        ("test_a_receive_that_is_recomputed", "p2p_unmatched", (1,)),
    ],
)
def test_what_something_shows_is_named_and_more_likely(
    result: ExampleResult, name: str, cause: str, ranks: tuple[int, ...]
) -> None:
    verdict = result.verdicts[name]
    assert (verdict.cause, verdict.ranks) == (cause, ranks)
    assert verdict.confidence > 0.5  # more than all other explanations together
