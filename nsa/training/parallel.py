"""How ranks share a model: the process group, DDP, FSDP, or gradients averaged by hand."""

import inspect
import os
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from nsa.config import ConfigError, ParallelConfig
from nsa.trace.calls.debug_level import lower_detail
from nsa.trace.stall.network import unresolved, unusable_network

FSDP_BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Rank, world size and device of this process. A single process is rank 0 of 1, without a group."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device for 'auto', 'cpu' or 'cuda'; if there are more ranks than GPUs, they share them. Raises ConfigError."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU; use --device cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def choose_backend(wanted: str, device: torch.device, world_size: int) -> str:
    """Return 'nccl' if each rank has a GPU to itself, else 'gloo' (which takes CUDA tensors too). Raises ConfigError."""
    if wanted == "nccl" and device.type != "cuda":
        raise ConfigError("TORCH_BACKEND=nccl: needs GPUs, and the device is cpu; use gloo")
    if wanted != "auto":
        return wanted
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    return "nccl" if device.type == "cuda" and local <= torch.cuda.device_count() else "gloo"


def wait_for_name(seconds: float) -> None:
    """Wait until the name of the host where ranks meet resolves: if nodes start together, this may take a while.

    Raises ConfigError if it does not resolve within ``seconds``.
    """
    name, deadline = os.environ.get("MASTER_ADDR", ""), time.monotonic() + seconds
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:  # torchrun has resolved it
        return
    while problem := name and unresolved(name):
        if time.monotonic() >= deadline:
            raise ConfigError(problem)
        time.sleep(0.5)


def join_group(backend: str, timeout_s: float = 1800.0, name_s: float = 60.0) -> None:
    """Join the group that the launcher's variables describe. Waits ``timeout_s`` at most for the other ranks, ``name_s`` for the
    host's name to resolve. Raises ConfigError for an address, an interface or a port that cannot be used.

    TORCH_DISTRIBUTED_DEBUG=DETAIL, which ends DDP on gloo by SIGSEGV, becomes INFO there.
    """
    lowered = lower_detail(backend)
    if lowered:
        dist.set_debug_level(dist.DebugLevel.INFO)  # torch has read the variable at its import
        if os.environ.get("RANK", "0") == "0":
            print(f"[train] {lowered}; this run uses INFO instead", file=sys.stderr, flush=True)
    wait_for_name(name_s)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:  # raised by any backend, or by the store
        network = unusable_network(str(error))
        if not network:
            raise
        raise ConfigError(network) from error


def share(module: nn.Module, options: ParallelConfig, device: torch.device, *, bf16: bool) -> nn.Module:
    """Return ``module``, shared as ``options.mode`` requests; a collective. ``bf16``: FSDP's mixed precision."""
    if options.mode == "ddp":
        return wrap_ddp(module, options, device)
    if options.mode == "fsdp":
        return wrap_fsdp(module, device, bf16=bf16)
    if options.mode == "average":
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor, src=0)
    return module


def file_mark(mode: str) -> str:
    """Return '_fsdp' under FSDP, for the names of statistics and memory dumps: k_stats_fsdp.csv, mem_fsdp_step1_rank0.json."""
    return "_fsdp" if mode == "fsdp" else ""


def describe_dtypes(mode: str, *, bf16: bool) -> dict[str, str]:
    """Return the dtypes in which a step computes and ranks reduce gradients, which the parameters' dtypes do not show."""
    if bf16 and mode == "fsdp":
        compute, reduction = (str(FSDP_BF16[name]) for name in ("param_dtype", "reduce_dtype"))
        return {"compute": f"{compute} (FSDP casts the parameters)", "reduction": f"{reduction} (FSDP's reduce_dtype)"}
    cast = "torch.bfloat16 (autocast: matrix products and attention; all else as autocast rules)"
    return {
        "compute": cast if bf16 else "as the parameters",
        "reduction": "none (one process)" if mode == "none" else "as the parameters",
    }


def accumulating(model: nn.Module, options: ParallelConfig, *, last: bool) -> AbstractContextManager[None]:
    """Return the context of a micro-step: with ``no_sync``, only the last one reduces the gradients, which are summed until then.

    Under a static graph each micro-step reduces: DDP records the graph in its first backward, and asserts that it reduced.
    """
    if not options.no_sync or options.static_graph:
        return nullcontext()
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(last)
        return nullcontext()
    no_sync = getattr(model, "no_sync", None)  # of DDP
    return nullcontext() if last or no_sync is None else no_sync()


def average_gradients(parameters: Iterable[torch.nn.Parameter], cap_mb: float) -> None:
    """Replace every gradient by its mean over all ranks, reduced in buckets of at most ``cap_mb`` MB (or one parameter)."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    bucket: list[torch.Tensor] = []
    for index, gradient in enumerate(gradients):
        bucket.append(gradient)
        upcoming = gradients[index + 1] if index + 1 < len(gradients) else None
        size = sum(g.nbytes for g in bucket)
        if upcoming is not None and upcoming.dtype == gradient.dtype and size + upcoming.nbytes <= cap_mb * 1e6:
            continue
        flat = torch.cat([g.flatten() for g in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for target, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            target.copy_(mean.view_as(target))
        bucket = []


def wrap_ddp(model: nn.Module, options: ParallelConfig, device: torch.device) -> nn.Module:
    """Return ``model`` in DistributedDataParallel, with ``options``."""
    # torch 2.13 has renamed this option, and warns about the old name.
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        static_graph=options.static_graph,
        find_unused_parameters=options.find_unused_parameters,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        bucket_cap_mb=options.bucket_cap_mb,
        **{buffers: options.broadcast_buffers},
    )


def has_fsdp2(device: torch.device) -> bool:
    """Return whether this torch's FSDP2 runs on ``device``: that of torch 2.6 needs events, which its CPU streams lack."""
    return device.type != "cpu" or hasattr(torch.cpu.Stream, "record_event")


def wrap_fsdp(model: nn.Module, device: torch.device, *, bf16: bool) -> nn.Module:
    """Shard ``model`` in place: each block a unit, and the rest one."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not has_fsdp2(device):
        raise ConfigError(f"FSDP2 of torch {torch.__version__} does not run on CPU; use --parallel ddp")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    settings: dict[str, Any] = {"mesh": mesh}
    if bf16:
        settings["mp_policy"] = MixedPrecisionPolicy(**FSDP_BF16)
    for block in getattr(model, "blocks", []):
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model
