"""torch's own distributed suite, from its wheel: as torch runs it, with a process per rank and test, and on ranks.

Run by ../suites.py, which sets BACKEND, WORLD_SIZE and TEMP_DIR, as torch's runner does.
"""

import os
from pathlib import Path
from typing import Any

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

from pytest_nsa import OnRanks, world_size

_Suite: Any = DistributedTest._DistTestBase
_Backend: Any = TestDistBackend


if "ON_RANKS" in os.environ:

    @world_size(int(os.environ["WORLD_SIZE"]), group=None)
    class TestDistributed(OnRanks, _Backend, _Suite):
        """On ranks: the mixin, and one folder of barriers for all ranks, which else the parent's variables name."""

        def setUp(self) -> None:
            super().setUp()
            folder = Path(self.file_name).parent / "temp"
            for name in ("barrier", "test_dir"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            os.environ["TEMP_DIR"] = str(folder)
            self._spawn_processes()

else:

    class TestDistributed(_Backend, _Suite):  # type: ignore[no-redef]
        """As in torch's test_distributed_spawn.py."""

        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()


# They are collected where they are subclassed alone.
del TestDistBackend, _Backend, _Suite
