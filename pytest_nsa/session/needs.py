"""What a test needs from the machine, by its marks, fixtures and the settings: ranks of which kind, GPUs, cores; and its leases."""

import functools
import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import pytest

from pytest_nsa import marked
from pytest_nsa.observe.terminal import without_capture
from pytest_nsa.settings import FAKE_GPU_MEMORY, HAS_PROC, Settings
from pytest_nsa.system.gpu import FREED_S, look_at_gpus, memory_used, wait_until_freed
from pytest_nsa.system.leases import PART, Broker, Lease, default_folder

OLDEST_TORCH = "2.6"


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Tests of equal needs can use the same ranks. ``reuse`` names the class or module that shares its ranks, or is ''."""

    world_size: int
    backend: str
    device: str
    gpus: int = 0
    share_gpus: bool = False
    gpu_memory: int = 0  # bytes on each; 0: all of it
    cores: int = 0
    reuse: str = ""
    is_cold: bool = False  # each rank a new interpreter, for its hash seed
    environment: dict[str, str] = field(default_factory=dict, hash=False)  # of its ranks

    @property
    def may_be_forked_ahead(self) -> bool:
        """Whether ranks can be made ready before the test's turn: nothing is to be leased first."""
        return not self.is_cold and not self.gpus and not self.cores and self.device == "cpu"


def read_needs(item: pytest.Item, settings: Settings) -> Needs:
    """Return what a test on ranks needs."""
    default = marked.DEFAULT_WORLD_SIZE if settings.outer is None else settings.outer.world_size
    world_size = marked.get_size(item, default)
    gpu = item.get_closest_marker("gpu")
    gpus = 0 if gpu is None else gpu.kwargs.get("count") or min(world_size, settings.gpus)
    on_gpu = gpu is not None and not settings.fake_gpus
    # Under an outer launcher the GPUs have been assigned already, one per rank.
    own_gpu = on_gpu and (gpus >= world_size or settings.outer is not None)
    cores = marked.value(item, "cores", 0)
    if settings.outer is not None:
        gpus = cores = 0
    return Needs(
        world_size=world_size,
        backend=""
        if marked.makes_its_own_group(item)
        else marked.value(item, "backend") or settings.backend or ("nccl" if own_gpu else "gloo"),
        device="cuda" if on_gpu else "cpu",
        gpus=gpus,
        share_gpus=gpu is not None and gpu.kwargs.get("share", False),
        gpu_memory=0 if gpu is None else marked.get_memory(gpu) or 0,
        cores=cores,
        reuse=marked.reuse_scope(item),
        is_cold=item.get_closest_marker("hash_seeds") is not None,
        environment=marked.get_environment(item),
    )


def read_tracing(item: pytest.Item, settings: Settings) -> dict[str, Any]:
    """Return how a test's models are shared and traced, as fields of Job."""
    return {
        "parallel": next((name for name in ("ddp", "fsdp") if marked.takes(item, name)), "none"),
        "static_graph": item.get_closest_marker("static_graph") is not None,
        "fsdp_version": settings.fsdp_version,
        "traces": marked.get_traces(item),
        "check_divergence": settings.check_divergence or item.get_closest_marker("check_divergence") is not None,
    }


def why_not_light(item: pytest.Item, settings: Settings) -> str:
    """Return that a test asks for what this run's level of tracing does not record; '' where it does not."""
    if settings.traces_lightly and read_tracing(item, settings)["check_divergence"]:
        return "check_divergence needs what NSA_TRACE_LEVEL=light does not record: unset it"
    return ""


@functools.cache
def why_no_ranks() -> str:
    """Return why no test can run on ranks here, and what to do; '' where /proc and torch can be used. Does not import torch."""
    if not HAS_PROC:
        return "tests on ranks need /proc, by which ranks are observed: mount it (mount -t proc proc /proc)"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        if importlib.util.find_spec("torch") is not None:  # built in its own repository
            return ""
        return f"tests on ranks need torch, which {sys.executable} does not have: install torch>={OLDEST_TORCH}"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and tuple(map(int, numbers.groups())) < tuple(map(int, OLDEST_TORCH.split("."))):
        return f"tests on ranks need torch {OLDEST_TORCH} or newer, and {sys.executable} has {version}: upgrade it"
    return ""


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
