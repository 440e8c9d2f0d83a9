"""Keep a tracer's function out of graphs under torch.compile."""

import contextlib
import functools
import sys
from collections.abc import Callable
from types import CodeType
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
        return (hidden[0] if hidden else function)(*args, **kwargs)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    leave_uncompiled(called.__code__)  # type: ignore[attr-defined]  # not as it is called: the compiler has seen the frame by then
    return called


def leave_uncompiled(code: CodeType, *, calls: bool = False) -> None:
    """Have the compiler skip frames of ``code``, without importing it, and those that they call if ``calls`` (from torch 2.7
    on); no-op where torch has neither way.
    """
    frames = torch._C._dynamo.eval_frame
    with contextlib.suppress(AttributeError):
        if hasattr(frames, "skip_code"):  # torch 2.6
            frames.skip_code(code)
        else:
            action = frames._FrameAction
            called = action.SKIP if calls else action.DEFAULT
            frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, called))
