"""Programs in which the graph or its recomputation is not what DDP expects."""

from __future__ import annotations

import torch

from pytest_nsa import fixtures
from tests_cpu.faults.planting import Net, planted, train


@planted(2)
def test_reentrant_checkpointing_with_unused_parameters(ddp: fixtures.DDP, faulty: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=faulty)
            return self.head(x)

    torch.manual_seed(0)
    train(ddp.wrap(Checkpointed(), find_unused_parameters=True), ddp.rank)
