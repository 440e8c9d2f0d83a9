"""A hypothesis test on ranks: all ranks run the same examples in step, so that a failure on one rank fails all.

Otherwise each rank would draw other examples, and a rank that fails would shrink while the others wait for it in a collective.
Here all ranks have one seed, nothing is replayed from a database, no deadline applies, and after each example the ranks exchange
the outcome through the group's store.
"""

import sys
from datetime import timedelta
from functools import wraps
from typing import Any

import pytest

from pytest_nsa.rank.context import RankContext

_INNER = "_nsa_inner"
GRACE_S = 3.0  # for the others to finish an example that failed here: they may wait for this rank


class ExampleFailed(Exception):
    """An example failed on some rank. Raised on all ranks from one line, so that hypothesis shrinks alike on all."""


class OutOfStep(BaseException):
    """Another rank did not finish the example: hypothesis must stop. Carries this rank's failure as its cause."""


def is_hypothesis_test(item: pytest.Item) -> bool:
    """Return whether hypothesis drives the test."""
    return hasattr(getattr(item, "obj", None), "hypothesis")


def _function(item: Any) -> Any:
    """Return the function that @given made; of a method, the function that it is bound from."""
    return getattr(item.obj, "__func__", item.obj)


def relax(item: Any) -> None:
    """Turn off hypothesis' deadline, which one rank may miss, and its health checks, which would make fixtures on the host."""
    hypothesis: Any = sys.modules["hypothesis"]
    test = _function(item)
    test._hypothesis_internal_use_settings = hypothesis.settings(
        parent=test._hypothesis_internal_use_settings, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )


def prepare(ctx: RankContext, item: Any) -> None:
    """In a rank: make a hypothesis test run in step with the others."""
    import torch.distributed as dist

    test, hypothesis = _function(item), sys.modules["hypothesis"]
    hypothesis.seed(ctx.job.seed)(test)  # also turns the database off
    relax(item)
    inner = test.hypothesis.inner_test
    inner = getattr(inner, _INNER, inner)  # a reused rank has wrapped it before
    store = dist.PrefixStore(f"examples-{ctx.job.seed}", dist.distributed_c10d._get_default_store())
    count = 0

    @wraps(inner)
    def in_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        error: BaseException | None = None
        try:
            inner(*args, **kwargs)
        except (Exception, pytest.fail.Exception) as raised:
            if type(raised).__module__.startswith("hypothesis"):
                raise  # assume() and the like: the same on all ranks, as the examples are
            error = raised
        failed = _exchange(store, ctx, count, error)
        if failed:
            raise ExampleFailed(f"the example failed on rank{'s' * (len(failed) > 1)} {', '.join(failed)}") from error

    setattr(in_step, _INNER, inner)
    test.hypothesis.inner_test = in_step


def _exchange(store: Any, ctx: RankContext, count: int, error: BaseException | None) -> list[str]:
    """Return the ranks on which this example failed. Raises OutOfStep if it failed here and another rank does not finish it."""
    ranks = [str(rank) for rank in range(ctx.job.world_size)]
    store.set(f"{count}/{ctx.rank}", "failed" if error is not None else "fine")
    keys = [f"{count}/{rank}" for rank in ranks]
    if error is None:
        store.wait(keys)
    else:
        try:
            store.wait(keys, timedelta(seconds=GRACE_S))
        except Exception:
            from nsa.trace.stall.exceptions import record_exception

            record_exception(ctx.folder, error, "call")
            raise OutOfStep(
                f"this example failed here, and another rank is not at its end after {GRACE_S:.0f} s"
            ) from error
    return [rank for rank in ranks if store.get(f"{count}/{rank}") == b"failed"]


def restore_own_error(call: pytest.CallInfo[Any]) -> bool:
    """Replace the exception that kept the ranks in step by this rank's failure; return False if only other ranks failed."""
    if call.excinfo is None:
        return True
    error = call.excinfo.value
    if not isinstance(error, ExampleFailed | OutOfStep):
        return True
    cause = error.__cause__
    if cause is None:
        call.excinfo = _make_info(pytest.fail.Exception(str(error), pytrace=False))
        return False
    for note in getattr(error, "__notes__", ()):  # hypothesis writes the falsifying example there
        cause.add_note(note)
    call.excinfo = _make_info(cause)
    return True


def _make_info(error: BaseException) -> pytest.ExceptionInfo[BaseException]:
    """Return pytest's own form of an exception, as its versions before 7.4 make it, too."""
    return pytest.ExceptionInfo.from_exc_info((type(error), error, error.__traceback__))  # type: ignore[arg-type]
