"""What a record of a collective says of its payload: how many rows go to each rank."""

from __future__ import annotations

import pytest
import torch

from nsa.trace.calls.arguments import split_sizes


@pytest.mark.parametrize(
    ("takes", "gives", "note"),
    [
        ([1, 3], [2, 2], "gives 2,2 takes 1,3"),
        ([], [3, 1], "gives 3,1 takes 2,2"),
        ([1, 3], [], "gives 2,2 takes 1,3"),
        ([], [], ""),
    ],
    ids=["both", "what it gives", "what it takes", "even"],
)
def test_the_rows_of_an_exchange(takes: list[int], gives: list[int], note: str) -> None:
    assert split_sizes((torch.empty(4), torch.empty(4), takes, gives), 2) == note


def test_what_torch_refuses_is_left_to_torch() -> None:
    assert split_sizes((torch.tensor(1), torch.tensor(1), [], [1, 1]), 2) == "gives 1,1 takes 0,0"
