"""Keep a tracer's function out of graphs under torch.compile."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` in a form that compiled code calls at run time: in a graph it would be executed only at compile time.

    Only torch.compiler.disable hides it from the compiler, but that imports the compiler, which most ranks do not need.
    """
    hidden: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not hidden and "torch._dynamo" in sys.modules:
            hidden.append(torch.compiler.disable(function))
            with contextlib.suppress(AttributeError):  # nor is this frame to be compiled, once for each function
                torch._C._dynamo.eval_frame.skip_code(called.__code__)  # type: ignore[attr-defined]
        return (hidden[0] if hidden else function)(*args, **kwargs)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    return called
