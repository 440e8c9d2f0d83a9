"""Programs in which a signal stops the process."""

from __future__ import annotations

import os
import signal

from torch import nn

from pytest_nsa.fixtures import DDP
from tests_cpu.faults.planting import planted, train


@planted(3, rank=0)
def test_is_stopped_of_three(ddp: DDP, culprit: int) -> None:
    train(ddp.wrap(nn.Linear(8, 1)), ddp.rank, culprit=culprit, before=lambda: os.kill(os.getpid(), signal.SIGSTOP))
