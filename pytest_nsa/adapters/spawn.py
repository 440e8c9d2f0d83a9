"""`-p pytest_nsa.adapters.spawn`: what a test starts with `torch.multiprocessing.spawn` or `start_processes` runs on ranks.

Calls with ``join=False``, and arguments that cannot be pickled, start processes as before.
"""

import sys
from typing import Any

import torch.multiprocessing

from pytest_nsa.adapters import pickled_call
from pytest_nsa.adapters.pickled_call import calls_on_ranks, pytest_collection_modifyitems

__all__ = ["calls_on_ranks", "pytest_collection_modifyitems", "pytest_configure"]

_start_processes = torch.multiprocessing.start_processes


def pytest_configure() -> None:
    """Replace the function that both ways call."""
    module: Any = sys.modules["torch.multiprocessing.spawn"]  # the package has a function of this name
    module.start_processes = torch.multiprocessing.start_processes = _start_on_ranks


def _start_on_ranks(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *others: Any, **named: Any) -> Any:
    copies = named.get("start_method", "spawn") == "fork"
    returned = pickled_call.run(fn, args, nprocs, takes_rank=True, copies=copies) if join else None
    if returned is None:
        return _start_processes(fn, args, nprocs, join, *others, **named)
    if returned.report:
        raise torch.multiprocessing.ProcessRaisedException(returned.report, min(returned.ranks, default=0), 0)
    return None
