"""What a test needs from the machine: ranks of which kind, GPUs, cores. Read from its marks, fixtures and the settings."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import pytest

from pytest_nsa import marked
from pytest_nsa.settings import HAS_PROC, Settings

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
