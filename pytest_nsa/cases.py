"""A mixin for test cases that start their own processes: it runs their methods on the plugin's ranks instead.

    from pytest_nsa import OnRanks, world_size

    @world_size(2, group=None)
    class TestMine(OnRanks, MultiProcessTestCase): ...

``MultiProcessTestCase`` of torch (with DistributedTestBase, DTensorTestBase, FSDPTest and the like) starts a process per rank in
setUp and joins them; ``MultiProcContinuousTest`` starts them once and sends them the names of tests. In front of either, this
mixin provides ``self.rank``, ``self.world_size`` and ``self.file_name`` of this rank, and starts no process: what torch's
processes would run, the base's ``_run`` or ``_init_pg`` included, runs in the ranks.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_nsa.rank.context import RankContext, current_rank


class OnRanks:
    """A mixin for unittest.TestCase. Its properties are read-only: what a base class assigns to them is ignored."""

    task_queues: tuple[Any, ...] = ()
    _is_in_run = False

    def _context(self) -> RankContext:
        context = current_rank()
        if context is None:
            raise RuntimeError(f"{type(self).__name__}: has no number of ranks: add @world_size(2) to the class")
        return context

    @property
    def rank(self) -> int:
        """This rank's number; -1 outside of a rank, as in the process from which torch starts the others."""
        context = current_rank()
        return context.rank if context is not None else -1

    @rank.setter
    def rank(self, value: Any) -> None:
        pass

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._context().job.world_size

    @world_size.setter
    def world_size(self, value: Any) -> None:
        pass

    @property
    def file_name(self) -> str:
        """The path of a file that does not exist yet, for a FileStore or file://. Equal on all ranks, different per test."""
        return str(Path(self._context().job.folder) / "case_store")

    @file_name.setter
    def file_name(self, value: Any) -> None:
        pass

    # MultiProcessTestCase

    def _spawn_processes(self, *_: Any, **__: Any) -> None:
        """No-op: the ranks are there."""

    def _start_processes(self, *_: Any, **__: Any) -> None:
        """No-op, as above."""

    def join_or_run(self, fn: Callable[[], Any]) -> Any:
        """Wrap the test's method: run ``cls._run`` in this rank, where torch would join the processes that run it.

        ``_run`` makes a second instance, and calls ``run_test`` of it; bases override it to make their group.
        """

        @functools.wraps(fn)
        def wrapper(self: OnRanks) -> None:
            if self._is_in_run:
                fn()
                return
            run: Any = getattr(type(self), "_run", None)
            name = getattr(self, "_testMethodName", "")
            # Older copies of the base do not take it.
            more = {"fake_pg": getattr(self, "fake_pg", False)} if _takes(run, "fake_pg") else {}
            try:
                run(self.rank, name, self.file_name, None, **more)
            except SystemExit as ended:  # so ends a process that was started for one test
                if ended.code:
                    raise

        return types.MethodType(wrapper, self)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        """Run the method in this process; its exceptions are raised here, and no pipe gets them."""
        _seed()
        self._is_in_run = True
        getattr(self, test_name)()
        if getattr(self, "destroy_pg_upon_exit", False):
            _destroy_group()

    # MultiProcContinuousTest

    @classmethod
    def _ensure_processes_spawned(cls) -> None:
        """Make the group as torch's workers do, but a new one per test: torch's live as long as the class."""
        context = current_rank()
        make_group = getattr(cls, "_init_pg", None)
        if context is not None and make_group is not None:
            make_group(context.rank, context.job.world_size, str(Path(context.job.folder) / "case_store"))

    def _worker_run_main_wait(self, fn: Callable[[], Any]) -> Any:
        @functools.wraps(fn)
        def wrapper(self: OnRanks) -> None:
            fn()
            _destroy_group()  # not after a failure: it may wait for ranks that never call it

        return types.MethodType(wrapper, self)


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def _seed() -> None:
    """Seed as torch's own tests do; without expecttest, which those need, seed torch alone with the same number."""
    try:
        from torch.testing._internal.common_utils import set_rng_seed
    except ModuleNotFoundError:
        import torch

        torch.manual_seed(1234)
    else:
        set_rng_seed(1234)  # that of torch 2.6 has no default


def _destroy_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
