"""A value of a program as a short text, without running the program's code."""

import functools
import zlib
from collections.abc import Mapping
from types import FunctionType, MappingProxyType, MemberDescriptorType, MethodType
from typing import Any

from nsa.trace.secrets import masked_value

LONGEST = 60  # characters
_FEW = 6  # elements that are shown
_SCALARS = (bool, int, float, complex, type(None))
ABSENT = object()
_holders: dict[tuple[int, str], tuple[type, type | None]] = {}
PLAIN = frozenset((*_SCALARS, str, list, tuple, set, frozenset, dict, range))


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
        code = getattr(value, "__code__", None)  # two lambdas of a function differ in their code alone
        return f"function {getattr(value, '__qualname__', '')}"[:LONGEST] + (
            f" #{zlib.crc32(code.co_code) % 997}" if code else ""
        )
    if kind.__module__.partition(".")[0] == "torch" and kind.__name__ in ("Tensor", "Parameter"):
        return _describe_tensor(value)
    if kind is range:
        return repr(value)
    return f"<{kind.__name__}>"


def _describe_tensor(value: Any) -> str:
    try:
        if value.device.type == "cpu" and value.numel() == 1:
            return f"tensor {value.detach().item()!r}"
        return _describe_shape(value.dtype, value.shape)
    except Exception:  # under a mode of torch, or with a shape that is not known
        return "<Tensor>"


@functools.lru_cache(1024)
def _describe_shape(dtype: Any, shape: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def find(chain: str, names: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """Return the value of a name or a chain of attributes; `ABSENT` where it is not there.

    Attributes are those that instances and classes hold: a property would run code of the program.
    """
    if "." not in chain:
        value = names.get(chain, ABSENT)
        return others.get(chain, ABSENT) if value is ABSENT else value
    first, *rest = chain.split(".")
    value = names.get(first, ABSENT)
    if value is ABSENT:
        value = others.get(first, ABSENT)
    for name in rest:
        held: Any = getattr(value, "__dict__", None) if value is not ABSENT else None
        found = held.get(name, ABSENT) if type(held) in (dict, MappingProxyType) else ABSENT
        value = _of_class(value, name) if found is ABSENT and value is not ABSENT else found
    return value


def _of_class(owner: Any, name: str) -> Any:
    """Return the plain value that a class has for its instances, or the value in a slot of an instance; `ABSENT` for others."""
    holder = _find_holder(type(owner), name)
    value = holder.__dict__.get(name, ABSENT) if holder is not None else ABSENT
    if type(value) is MemberDescriptorType:
        try:
            return value.__get__(owner)
        except AttributeError:
            return ABSENT
    return value if type(value) in PLAIN else ABSENT


def _find_holder(kind: type, name: str) -> type | None:
    """Return the class that has an attribute for instances of a class. A model's modules and parameters are in none."""
    known = _holders.get((id(kind), name))  # the hash of a class may run code of the program
    if known is None or known[0] is not kind:
        known = kind, next((of for of in kind.__mro__ if name in of.__dict__), None)
        _holders[id(kind), name] = known
    return known[1]


@functools.lru_cache(4096)
def masked_text(name: str, text: str) -> str:
    """Return a text that is the value of a name, masked if it is a secret."""
    masked: str = masked_value({name.rpartition(".")[2]: text})[name.rpartition(".")[2]]
    return masked
