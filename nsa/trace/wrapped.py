"""What a rank gives DDP: names, dtypes and shapes of a model's parameters, in the order by which DDP pairs them."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nsa.trace.frames import call_site
from nsa.trace.names import plain_name

MOST = 4096  # parameters of a model that are recorded

OnWrap = Callable[[str, list[int], list[str]], None]


def watch_wraps(on_wrap: OnWrap | None, on_wrapped: Callable[[DistributedDataParallel], None]) -> None:
    """Call ``on_wrap(line, ranks, parameters)`` as DDP begins to wrap a model, and ``on_wrapped(ddp)`` when it has.

    To be called once per process.
    """
    init = DistributedDataParallel.__init__

    @functools.wraps(init)
    def wrapping(ddp: DistributedDataParallel, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        if on_wrap is not None:
            with contextlib.suppress(TypeError, ValueError, RuntimeError, AttributeError):  # arguments that DDP refuses
                given = inspect.signature(init).bind(ddp, module, *args, **kwargs).arguments
                group, mesh = given.get("process_group"), given.get("device_mesh")
                ranks = dist.get_process_group_ranks(group if mesh is None else mesh.get_group(mesh_dim=0))
                on_wrap(call_site(), ranks, describe_parameters(module))
        init(ddp, module, *args, **kwargs)
        on_wrapped(ddp)

    DistributedDataParallel.__init__ = wrapping


def describe_parameters(module: torch.nn.Module) -> list[str]:
    """Return 'layer.weight float32[8,4]' for each parameter that DDP tracks, ' frozen' behind those that are not trained."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    named = [(name, p) for name, p in module.named_parameters() if name not in ignored]
    return [f"{plain_name(name)} {_kind(p)}{'' if p.requires_grad else ' frozen'}" for name, p in named[:MOST]]


def _kind(parameter: torch.Tensor) -> str:
    shape = ",".join(map(str, parameter.shape))
    return f"{str(parameter.dtype).removeprefix('torch.')}[{shape}]"
