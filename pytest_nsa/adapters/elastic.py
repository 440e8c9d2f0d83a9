"""`-p pytest_nsa.adapters.elastic`: what a test starts with torch's `elastic_launch` on one node runs on ranks."""

from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from pytest_nsa.adapters import pickled_call
from pytest_nsa.adapters.pickled_call import calls_on_ranks, pytest_collection_modifyitems

__all__ = ["calls_on_ranks", "pytest_collection_modifyitems", "pytest_configure"]

_launch_agent = api.launch_agent


def pytest_configure() -> None:
    """Replace the function that `elastic_launch` calls."""
    api.launch_agent = _launch_on_ranks


def _launch_on_ranks(config: api.LaunchConfig, entrypoint: Any, args: list[Any], *others: Any, **named: Any) -> Any:
    is_here = config.min_nodes == config.max_nodes == 1
    returned = pickled_call.run(entrypoint, args, config.nproc_per_node, takes_rank=False) if is_here else None
    if returned is None:
        return _launch_agent(config, entrypoint, args, *others, **named)
    if returned.report:
        failures = {rank: ProcessFailure(rank, 0, 1, "") for rank in returned.ranks or (0,)}
        for failure in failures.values():
            failure.message = returned.report
        raise ChildFailedError(getattr(entrypoint, "__qualname__", str(entrypoint)), failures)
    return returned.values
