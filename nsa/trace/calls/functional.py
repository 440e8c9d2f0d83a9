"""Functional collectives: operators that go from Python to C++ past the methods of a ProcessGroup, and wait by another operator.

`torch.distributed._functional_collectives` calls them, in a backward, too; so do DTensor and programs.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed._functional_collectives  # registers the operators
from torch._ops import OpOverloadPacket

# Older versions of torch have the second for functions with a backward.
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
_COLLECTIVES = (
    "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "broadcast", "broadcast_",
    "all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor",
    "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced", "all_to_all_single",
)  # fmt: skip
_WAITS = ("wait_tensor", "wait_tensors")
_SYMBOLS = ("FakeTensor", "FunctionalTensor")  # a compiler's, which runs an operator to know what it returns

Record = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class RecordedOperator(OpOverloadPacket):
    """An operator with calls that are recorded. It stays the object that it was: others keep it, and tables have it as a key."""

    record: ClassVar[Record]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return _recorded(type(self).record, self.__name__, super().__call__, args, kwargs)


class RecordedCollective(RecordedOperator):
    """An operator that begins a collective."""


class RecordedWait(RecordedOperator):
    """An operator that waits for the results of collectives."""


class _RecordedCall:
    """What an overload calls, as compiled graphs do. Compilers compare the overload's type, and its hash is that of this."""

    def __init__(self, operator: RecordedOperator, call: Any) -> None:
        self.operator, self.call = operator, call

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return _recorded(type(self.operator).record, self.operator.__name__, self.call, args, kwargs)

    def __hash__(self) -> int:
        return hash(self.call)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of a copy, which has no `call` yet
            raise AttributeError(name)
        return getattr(self.call, name)


def _recorded(
    record: Record, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    __tracebackhide__ = True
    given = list(tensors_of((*args, *kwargs.values())))  # none: a tracer's proxies
    if not given or any(tensor.is_meta or type(tensor).__name__ in _SYMBOLS for tensor in given):
        return call(*args, **kwargs)
    return record(name, call, args, kwargs)


def install(collective: Record, wait: Record) -> None:
    """Record the operators of this process. What torch's version does not have is skipped."""
    RecordedCollective.record, RecordedWait.record = staticmethod(collective), staticmethod(wait)
    for namespace in _NAMESPACES:
        for names, kind in ((_COLLECTIVES, RecordedCollective), (_WAITS, RecordedWait)):
            for name in names:
                operator = getattr(getattr(torch.ops, namespace), name, None)
                if operator is None:
                    continue
                operator.__class__ = kind
                if not isinstance(operator.default._op, _RecordedCall):
                    operator.default._op = _RecordedCall(operator, operator.default._op)


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among values, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


def reduction_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the reduction of a functional collective, 'sum'; '' of one that does not reduce."""
    given = kwargs.get("reduce_op", args[1] if len(args) > 1 else "")
    return given.lower() if "reduce" in name and isinstance(given, str) else ""
