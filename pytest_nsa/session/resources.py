"""The GPUs and cores of this process's tests: leased before a test's ranks start, kept while they stay, then given back."""

from __future__ import annotations

import functools
import os
import sys

import pytest

from pytest_nsa import marked
from pytest_nsa.observe.terminal import without_capture
from pytest_nsa.session.needs import Needs
from pytest_nsa.settings import FAKE_GPU_MEMORY, Settings
from pytest_nsa.system.gpu import FREED_S, look_at_gpus, memory_used, wait_until_freed
from pytest_nsa.system.leases import PART, Broker, Lease, default_folder


@functools.cache
def gpu_memory(settings: Settings) -> int:
    """Return the bytes of the smallest GPU of this machine, by nvidia-smi; 0 if it does not answer."""
    if settings.fake_gpus:
        return FAKE_GPU_MEMORY
    found = [int(gpu["memory.total"]) for gpu in look_at_gpus() if str(gpu["memory.total"]).isdecimal()]
    return min(found, default=0) << 20


class Resources:
    """What one pytest process has leased."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config, self.settings = config, settings
        self._for: Needs | None = None
        self._leases: dict[str, Lease] = {}
        self._memory: dict[str, int] = {}  # in use, when they were leased, on the GPUs that this process does not share
        self._waits_for_memory = True

    def holds_for_others(self, needs: Needs) -> bool:
        """Return whether leases are kept for ranks that stayed, which a test with these needs cannot use."""
        return self._for is not None and needs != self._for and bool(self._leases)

    def take(self, needs: Needs, test: str) -> dict[str, Lease]:
        """Wait for what ``test`` needs; leases of earlier tests with equal needs are used again. Cores before GPUs, always."""
        if self._for is not None and needs != self._for:
            self.release()
        if self._for is None:
            if needs.cores:
                self._leases["core"] = self._broker("core").lease(
                    needs.cores, share=False, holder=test, report=self._report
                )
            if needs.gpus:
                # If the memory of a GPU is not known, a test does not share it.
                of = gpu_memory(self.settings) // PART if needs.gpu_memory else 0
                parts = min(-(-needs.gpu_memory // PART), of)
                self._leases["gpu"] = self._broker("gpu").lease(
                    needs.gpus, share=needs.share_gpus, holder=test, report=self._report, parts=parts, of=of
                )
                if not needs.share_gpus and not parts and not self.settings.fake_gpus:
                    self._memory = memory_used(self._leases["gpu"].names)
            self._for = needs
        return self._leases

    def release(self) -> None:
        """Release all leases; a GPU once its memory is free again, or after `FREED_S` with a line to the terminal."""
        above = wait_until_freed(self._memory, FREED_S) if self._memory and self._waits_for_memory else {}
        for name, size in above.items():
            self._report(
                f"GPU {name} has {size >> 20} MiB more in use than before its test, {FREED_S:.0f} s after the test"
            )
            self._waits_for_memory = False  # another program uses it: no test of this session waits again
        self._memory = {}
        for lease in self._leases.values():
            lease.release()
        self._leases.clear()
        self._for = None

    def _broker(self, kind: str) -> Broker:
        names = self.settings.gpu_ids if kind == "gpu" else [str(c) for c in sorted(os.sched_getaffinity(0))]
        return Broker(folder=default_folder(), kind=kind, names=names)

    def _report(self, text: str) -> None:
        """Print a line to the terminal while a test waits; also from an xdist worker, which shares the controller's stderr."""
        with without_capture(self.config):
            print(f"\nnsa: {text}", file=sys.__stderr__, flush=True)


def lacks_gpu(item: pytest.Item, settings: Settings) -> str:
    """Return why ``item`` cannot have the GPUs that it requests; '' when it can."""
    mark = item.get_closest_marker("gpu")
    there = settings.gpus
    if mark is None or not marked.counts(item, mark):
        return ""
    if there >= (mark.kwargs.get("count") or 1):
        return _lacks_gpu_memory(mark, settings)
    if not there:
        return "needs a GPU, and this machine shows none (no /dev/nvidia*, or CUDA_VISIBLE_DEVICES hides them)"
    return f"needs {mark.kwargs['count']} GPUs, and this machine shows {there}"


def _lacks_gpu_memory(mark: pytest.Mark, settings: Settings) -> str:
    wanted = marked.get_memory(mark)
    has = gpu_memory(settings) if wanted else 0
    if not wanted or not has or wanted <= has:
        return ""
    return f"needs {mark.kwargs['memory']} on a GPU, and the smallest here has {has >> 30} GiB"
