"""What a record of a collective says of its payload: the counts that ranks tell each other."""

from __future__ import annotations

import pytest
import torch

from nsa.trace.calls.arguments import announced_counts


@pytest.mark.parametrize("name", ["alltoall_base", "_allgather_base"])
def test_counts_for_each_rank_are_kept(name: str) -> None:
    counts = torch.tensor([4, 0, 2])
    assert announced_counts(name, (torch.empty(3), counts, [], []), 3) == "tells 4,0,2"


@pytest.mark.parametrize(
    "given",
    [
        torch.ones(3),
        torch.tensor([1, 2]),
        torch.ones(3, 1, dtype=torch.int64),
        torch.tensor([1, 2, 3], dtype=torch.int8),
    ],
    ids=["no whole numbers", "not one for each", "a matrix", "bytes"],
)
def test_other_payloads_are_not_kept(given: torch.Tensor) -> None:
    assert announced_counts("alltoall_base", (torch.empty(3), given, [], []), 3) == ""


def test_a_gathered_tensor_in_a_list_is_what_is_told() -> None:
    counts = torch.tensor([7, 1], dtype=torch.int32)
    assert announced_counts("allgather", ([[counts, counts]], [counts]), 2) == "tells 7,1"
    assert announced_counts("allreduce", ([counts],), 2) == ""
