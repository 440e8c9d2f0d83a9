"""What a rank gives DDP: names, dtypes and shapes of a model's parameters, in the order by which DDP pairs them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from nsa.trace.frames import call_site
from nsa.trace.names import plain_name

MOST = 4096  # parameters of a model that are recorded

OnWrap = Callable[[str, list[int], list[str]], None]


def report_wrap(
    on_wrap: OnWrap, init: Callable[..., None], module: Any, args: tuple[Any, ...], given: Mapping[str, Any]
) -> None:
    """Call ``on_wrap(line, ranks, parameters)`` for a call of DDP's ``init`` that begins; not for arguments that DDP refuses."""
    __tracebackhide__ = True
    with contextlib.suppress(TypeError, ValueError, RuntimeError, AttributeError):
        arguments = inspect.signature(init).bind(None, module, *args, **given).arguments
        group, mesh = arguments.get("process_group"), arguments.get("device_mesh")
        ranks = dist.get_process_group_ranks(mesh.get_group(mesh_dim=0) if mesh is not None else group)
        on_wrap(call_site(), ranks, describe_parameters(module))


def describe_parameters(module: torch.nn.Module) -> list[str]:
    """Return 'layer.weight float32[8,4]' for each parameter that DDP tracks, ' frozen' behind those that are not trained."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    named = [(name, p) for name, p in module.named_parameters() if name not in ignored]
    return [f"{plain_name(name)} {_kind(p)}{'' if p.requires_grad else ' frozen'}" for name, p in named[:MOST]]


def _kind(parameter: torch.Tensor) -> str:
    shape = ",".join(map(str, parameter.shape))
    return f"{str(parameter.dtype).removeprefix('torch.')}[{shape}]"
