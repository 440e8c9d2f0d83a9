"""Derivatives of our operators for autograd; forward mode and the transforms of `torch.func` are refused.

`torch.library.register_autograd` of torch (2.6 to 2.13) drops the tangents of forward mode without an error. `register` takes its
place: a kernel for the dispatch keys of autograd on a CPU, a GPU and the meta device, which go before the one that torch registers
for all devices.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

_LIBRARY = torch.library.Library("nsa", "FRAGMENT")
_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMeta")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def operator(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``nsa::name`` with its body, and its fake kernel, which returns shapes and dtypes; return torch's operator.

    Not by `torch.library.custom_op`, which imports torch's compiler at the first call: 160 MiB and a second.
    """
    _LIBRARY.define(f"{name}{schema}", tags=_TAGS)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nsa::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.nsa, name).default


def register(
    call: Any, backward: Callable[..., Any], setup_context: Callable[[Any, Any, Any], None] | None = None
) -> None:
    """Give an `operator` its derivative: static methods of `torch.autograd.Function`.

    An input with a tangent, and a transform that differentiates, raise NotImplementedError, which names the backend that serves.
    """
    name = call._schema.name.partition("::")[2]

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return call(*inputs)

    Node.__name__ = Node.__qualname__ = f"{name}_node"
    Node.backward = staticmethod(backward)
    Node.setup_context = staticmethod(setup_context or _keep_nothing)

    def run(*inputs: Any) -> Any:
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if has_tangent(*tensors) or (needs_gradient and torch._C._are_functorch_transforms_active()):
            raise NotImplementedError(
                "NSA's fast kernels have no forward-mode derivative and none by torch.func: use backend='reference' for it"
            )
        if needs_gradient:
            return Node.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return call(*inputs)

    for key in _KEYS:
        _LIBRARY.impl(name, run, key)


def has_tangent(*inputs: Any) -> bool:
    """Return whether any of the tensors among ``inputs`` has a tangent, of the forward mode that is active."""
    return any(forward_ad.unpack_dual(x).tangent is not None for x in inputs if isinstance(x, torch.Tensor))


def is_transformed(*inputs: torch.Tensor) -> bool:
    """Return whether a transform of `torch.func` or a tangent may ask for more than our operators' backward."""
    return torch._C._are_functorch_transforms_active() or has_tangent(*inputs)


def refuse(*_: Any) -> Any:
    """Refuse the derivative of a backward. RuntimeError."""
    raise RuntimeError("NSA's fast kernels have no second derivative: use backend='reference' for it")


def _keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    """No-op: the backward reads nothing."""
