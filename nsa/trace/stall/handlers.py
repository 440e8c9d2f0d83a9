"""Find exit handlers and finalizers that call a collective. A process runs them when it ends; a rank of pytest does not.

Under torchrun such a call waits for ranks that may have ended.
"""

from __future__ import annotations

import atexit
import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from nsa.trace.frames import call_site, is_user_file

_COLLECTIVES = frozenset({
    "barrier", "monitored_barrier", "all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "all_gather",
    "all_gather_into_tensor", "all_gather_single", "all_gather_coalesced", "gather", "gather_single", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv",
    "batch_isend_irecv", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
})  # fmt: skip
_registered: list[tuple[Any, str]] = []  # the user's handlers, and where each was registered


def _function(value: Any) -> Any:
    while isinstance(value, functools.partial):
        value = value.func
    return inspect.unwrap(getattr(value, "__func__", value))


def collective_in(value: Any) -> str:
    """Return the name of a collective of torch that the user's function itself calls; '' without one."""
    function = _function(value)
    code = getattr(function, "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return ""
    called = next((name for name in code.co_names if name in _COLLECTIVES), "")
    # Pipes have `send`, too: the function, or a module, must be torch's.
    return called if called and any(_is_of_torch(name, function.__globals__) for name in code.co_names) else ""


def _is_of_torch(name: str, names: Mapping[str, Any]) -> bool:
    """Return whether ``name`` is a module or a function of torch; ``names`` are a function's globals, which may import more."""
    value = names.get(name)
    if isinstance(value, ModuleType):
        of = value.__name__
    elif isinstance(value, FunctionType):
        of = value.__module__ or name
    else:
        of = name
    return of == "torch" or of.startswith("torch.")


@functools.cache
def install() -> None:
    """Remember the exit handlers that are registered from now on. Once per process; a fork inherits them."""
    register: Callable[..., Any] = atexit.register
    unregister: Callable[..., None] = atexit.unregister

    @functools.wraps(register)
    def remembering(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if collective_in(function):
            _registered.append((function, call_site()))
        return register(function, *args, **kwargs)

    @functools.wraps(unregister)
    def forgetting(function: Callable[..., Any], /) -> None:
        _registered[:] = [entry for entry in _registered if entry[0] != function]
        unregister(function)

    atexit.register, atexit.unregister = remembering, forgetting


def forget() -> None:
    """Reset for another test in this process."""
    _registered.clear()


def lasting_handlers(names: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (description, location, collective) of exit handlers, and of finalizers of live objects of the classes in ``names``.

    ``names`` are the globals of the test's module.
    """
    for function, site in _registered:
        yield f"the exit handler {getattr(_function(function), '__name__', '?')}", site, collective_in(function)
    kinds: dict[type, str] = {}
    for value in list(names.values()):
        finalizer = vars(value).get("__del__") if isinstance(value, type) else None
        if finalizer is not None and (call := collective_in(finalizer)):
            kinds[value] = call
    if not kinds:
        return
    gc.collect()
    for alive in {type(found) for found in gc.get_objects() if type(found) in kinds}:
        code = _function(vars(alive)["__del__"]).__code__
        yield f"the finalizer of {alive.__name__}", f"{code.co_filename}:{code.co_firstlineno} in __del__", kinds[alive]
