"""Run a pytest test on N ranks; when they hang, report which rank, where and why.

The marks are importable as plain decorators::

    from pytest_nsa import branch, world_size

    @world_size(2)
    @branch("sel")
    def test_backward(ddp, branch): ...

Importing this imports neither torch nor anything that needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pytest_nsa.host_fixtures import host_fixture
from pytest_nsa.marks import (
    LayerRange,
    backend,
    branch,
    check_divergence,
    cores,
    fails_as,
    gc_range,
    gpu,
    hash_seeds,
    rank_env,
    rerun,
    reuse,
    scenario,
    static_graph,
    trace,
    trace_kinds,
    world_size,
)

if TYPE_CHECKING:
    from pytest_nsa.cases import OnRanks
    from pytest_nsa.diagnosis.verdict import Verdict
    from pytest_nsa.session.launch import Outcome

__all__ = [
    "LayerRange",
    "OnRanks",
    "Outcome",
    "Verdict",
    "backend",
    "branch",
    "check_divergence",
    "cores",
    "fails_as",
    "gc_range",
    "gpu",
    "hash_seeds",
    "host_fixture",
    "rank_env",
    "rerun",
    "reuse",
    "scenario",
    "static_graph",
    "trace",
    "trace_kinds",
    "world_size",
]

_LATE = {
    "OnRanks": "pytest_nsa.cases", "Outcome": "pytest_nsa.session.launch", "Verdict": "pytest_nsa.diagnosis.verdict",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a class when it is first used: every pytest run imports this package, with ranks or without."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATE[name]), name)
