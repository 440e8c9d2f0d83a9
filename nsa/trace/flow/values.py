"""A value of a program as a short text, without running the program's code."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any

from nsa.trace.secrets import masked_value

LONGEST = 60  # characters
_FEW = 6  # elements that are shown
_SCALARS = (bool, int, float, complex, type(None))
_ABSENT = object()


def describe(value: Any) -> str:
    """Return a number or a string as in Python, a tensor's number or shape, a container's size, else the name of the type."""
    kind = type(value)
    if kind in _SCALARS:
        return repr(value)
    if kind is str:
        return repr(value if len(value) <= LONGEST else value[: LONGEST - 1] + "…")
    if kind in (list, tuple, set, frozenset, dict):
        if len(value) <= _FEW and kind in (list, tuple) and all(type(v) in _SCALARS or type(v) is str for v in value):
            return repr(value)[:LONGEST]
        return f"{kind.__name__} of {len(value)}"
    if kind in (FunctionType, MethodType):
        return f"function {getattr(value, '__qualname__', '')}"[:LONGEST]
    if kind.__module__.partition(".")[0] == "torch" and kind.__name__ in ("Tensor", "Parameter"):
        return _describe_tensor(value)
    if kind is range:
        return repr(value)
    return f"<{kind.__name__}>"


def _describe_tensor(value: Any) -> str:
    try:
        if value.device.type == "cpu" and value.numel() == 1:
            return f"tensor {value.detach().item()!r}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    except Exception:  # under a mode of torch, or with a shape that is not known
        return "<Tensor>"


def find(chain: str, names: Mapping[str, Any], others: Mapping[str, Any]) -> str | None:
    """Return the value of a name or a chain of attributes as a text; None where it is not there.

    Attributes are looked up in the instances' own dictionaries alone: a property would run code of the program.
    """
    first, *rest = chain.split(".")
    value = names.get(first, _ABSENT)
    if value is _ABSENT:
        value = others.get(first, _ABSENT)
    for name in rest:
        held = getattr(value, "__dict__", None) if value is not _ABSENT else None
        value = held.get(name, _ABSENT) if type(held) is dict else _ABSENT
    if value is _ABSENT:
        return None
    if type(value) is str:
        name = rest[-1] if rest else first
        value = masked_value({name: value})[name]
    return describe(value)
