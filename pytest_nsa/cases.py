"""For test cases that were written to start their own processes: the same methods on ranks that are there already.

    from pytest_nsa import OnRanks, world_size

    @world_size(2, group=None)
    class TestMine(OnRanks, MultiProcessTestCase): ...

``MultiProcessTestCase`` of torch (also by way of DistributedTestBase and the like) starts a process per rank in setUp, and joins
them; in front of it this mixin gives ``self.rank``, ``self.world_size`` and ``self.file_name`` of this rank, and starts none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_nsa.rank.context import RankContext, current_rank


class OnRanks:
    """A mixin for unittest.TestCase. Its properties cannot be set: what a base assigns to them is passed over."""

    def _context(self) -> RankContext:
        context = current_rank()
        if context is None:
            raise RuntimeError(f"{type(self).__name__}: runs on no ranks: add @world_size(2) to the class")
        return context

    @property
    def rank(self) -> int:
        """This rank's number; -1, as torch numbers the process that starts the others, where there is none."""
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
        """A file that does not exist yet, the same on all ranks and another for each test: for a FileStore or file://."""
        return str(Path(self._context().job.folder) / "case_store")

    @file_name.setter
    def file_name(self, value: Any) -> None:
        pass

    def _spawn_processes(self, *_: Any, **__: Any) -> None:
        """No-op: the ranks are there."""

    def _start_processes(self, *_: Any, **__: Any) -> None:
        """No-op, as above."""
