"""Programs in which memory runs out."""

from __future__ import annotations

from pytest_nsa.fixtures import DDP
from tests_cpu.faults.planting import net, planted, train


@planted(2, rank=1)
def test_out_of_memory(ddp: DDP, culprit: int) -> None:
    train(ddp.wrap(net()), ddp.rank, culprit=culprit, before=lambda: bytearray(1 << 60))
