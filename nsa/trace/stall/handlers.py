"""Find exit handlers and finalizers that call a collective. A process runs them when it ends; a rank of pytest does not.

Under torchrun such a call waits for ranks that may have ended.
"""

from __future__ import annotations

import atexit
import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nsa.trace.frames import call_site, is_user_file

_COLLECTIVES = frozenset({
    "barrier", "monitored_barrier", "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "all_gather_object",
    "broadcast_object_list", "gather_object", "scatter_object_list",
})  # fmt: skip
_registered: list[tuple[Any, str]] = []  # the user's handlers, and where each was registered


def _code(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)


def collective_in(function: Any) -> str:
    """Return the name of a collective that the user's function itself calls; '' without one."""
    code = _code(function)
    if code is None or not is_user_file(code.co_filename):
        return ""
    return next((name for name in code.co_names if name in _COLLECTIVES), "")


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
        yield f"the exit handler {getattr(_code(function), 'co_name', '?')}", site, collective_in(function)
    kinds: dict[type, str] = {}
    for value in list(names.values()):
        finalizer = vars(value).get("__del__") if isinstance(value, type) else None
        if finalizer is not None and (call := collective_in(finalizer)):
            kinds[value] = call
    if not kinds:
        return
    gc.collect()
    for alive in {type(found) for found in gc.get_objects() if type(found) in kinds}:
        code = _code(vars(alive)["__del__"])
        yield f"the finalizer of {alive.__name__}", f"{code.co_filename}:{code.co_firstlineno} in __del__", kinds[alive]
