"""What an update depends on, except gradients: the optimizer's settings, and the states that were loaded.

If ranks diverge, a difference in these may be the reason. Recorded only while a rank writes checksums.
"""

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from nsa.trace.frames import call_site, describe, user_frames

MOST = 64  # loads per test that are kept
_SETTINGS = ("lr", "weight_decay", "momentum", "betas", "eps")


@dataclass(frozen=True, slots=True)
class Load:
    """A call of ``load_state_dict`` by the user's code: the kind of object (``what``), the line (``site``), the ``norm`` of the
    state's numbers, and the ``error`` that it raised, or ''.
    """

    what: str
    site: str
    norm: float
    error: str
    owner: weakref.ref[Any]


class TrainingState:
    """What a rank has loaded and set since its test began."""

    def __init__(self) -> None:
        self._loads: list[Load] = []
        self._set_at: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        # By id: a module's hash may need what its class makes after `torch.nn.Module.__init__`, as that of torchmetrics does.
        self._made_at: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}
        self._is_loading = False

    def load(self, owner: Any, state: Any, call: Callable[[], Any], *, what: str) -> Any:
        """Load a state by ``call`` and record it. Only the outermost call counts, as a model also loads its modules' states."""
        __tracebackhide__ = True
        if self._is_loading or len(self._loads) >= MOST:
            return call()
        site, norm, error = call_site(), math.sqrt(sum(_squares(state))), ""
        self._is_loading = True
        try:
            return call()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:200]
            raise
        finally:
            self._is_loading = False
            self._loads.append(Load(what, site, norm, error, weakref.ref(owner)))

    def made_equal(self, model: torch.nn.Module) -> None:
        """Forget what was loaded into a model, because DDP has broadcast the parameters of one rank to all."""
        own = {id(p) for p in model.parameters()}
        self._loads = [load for load in self._loads if load.what != "model" or not _concerns(load.owner(), own)]

    def made_module(self, module: torch.nn.Module, _: Any, make: Callable[[], None]) -> None:
        """Make a module by ``make``, and record the user's line that makes it, outside of any ``__init__``."""
        make()
        frames = user_frames(sys._getframe(1))
        line = describe(next((f for f in frames if f.f_code.co_name != "__init__"), None))
        number, made_at = id(module), self._made_at
        made_at[number] = weakref.ref(module, lambda _: made_at.pop(number, None)), line

    def made_at(self, module: torch.nn.Module) -> str:
        """Return the user's line that made a module; '' if unknown."""
        made, line = self._made_at.get(id(module), (None, ""))
        return line if made is not None and made() is module else ""

    def made(self, optimizer: Optimizer, _: Any, make: Callable[[], None]) -> None:
        """Make an optimizer by ``make``, and record the user's line."""
        make()
        self._set_at[optimizer] = call_site()

    def set(self, scheduler: Any, _: Any, call: Callable[[], Any]) -> Any:
        """Step a scheduler by ``call``; if that changes its optimizer's learning rates, record the user's line."""
        __tracebackhide__ = True
        optimizer = scheduler.optimizer
        before = [_plain(group["lr"]) for group in optimizer.param_groups]
        result = call()
        if [_plain(group["lr"]) for group in optimizer.param_groups] != before:
            self._set_at[optimizer] = call_site()
        return result

    def of(self, model: torch.nn.Module, optimizer: Optimizer | None) -> dict[str, object]:
        """Return what a model's update depends on: its ``loads``, and the ``settings`` of its optimizer, set at line ``set_at``."""
        found: dict[str, object] = {}
        if self._loads:
            own = {id(p) for p in model.parameters()}
            found["loads"] = [
                [load.what, load.site, load.norm, load.error] for load in self._loads if _concerns(load.owner(), own)
            ]
        if optimizer is not None:
            groups = optimizer.param_groups
            found["settings"] = [{n: _plain(of[n]) for n in _SETTINGS if n in of} for of in groups]
            found["set_at"] = self._set_at.get(optimizer, "")
        return found


_current: TrainingState | None = None


def keep(state: TrainingState | None) -> None:
    """Record loads and settings in ``state`` from now on; with None, do not record them."""
    global _current
    _current = state


def made_equal(model: torch.nn.Module) -> None:
    """Record that DDP has wrapped a model."""
    if _current is not None:
        _current.made_equal(model)


def watch_loads() -> None:
    """Wrap the methods that load states and set learning rates, once per process."""
    for kind, what in ((torch.nn.Module, "model"), (Optimizer, "optimizer"), (torch.amp.GradScaler, "scaler")):
        _wrap(kind, "load_state_dict", functools.partial(TrainingState.load, what=what))
    for kind in [k for k in vars(lr_scheduler).values() if isinstance(k, type) and issubclass(k, LRScheduler)]:
        if "step" in vars(kind):
            _wrap(kind, "step", TrainingState.set)
        if "load_state_dict" in vars(kind):
            _wrap(kind, "load_state_dict", functools.partial(TrainingState.load, what="scheduler"))
    _wrap(Optimizer, "__init__", TrainingState.made)
    _wrap(torch.nn.Module, "__init__", TrainingState.made_module)


def _wrap(kind: Any, name: str, record: Callable[[TrainingState, Any, Any, Callable[[], Any]], Any]) -> None:
    """Wrap a method: where states are recorded, ``record`` calls it, with its owner and the call's first argument."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if _current is None:
            return method(self, *args, **kwargs)
        first = next(iter((*args, *kwargs.values())), None)
        return record(_current, self, first, lambda: method(self, *args, **kwargs))

    setattr(kind, name, noted)


def _concerns(owner: Any, parameters: set[int]) -> bool:
    """Return whether a loaded object belongs to a model: the model, its optimizer, or any scaler or scheduler."""
    if owner is None:
        return False
    if isinstance(owner, torch.nn.Module):
        return any(id(p) in parameters for p in owner.parameters())
    if isinstance(owner, Optimizer):
        return any(id(p) in parameters for group in owner.param_groups for p in group["params"])
    return True


def _plain(value: Any) -> object:
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _squares(state: Any) -> Iterator[float]:
    if isinstance(state, torch.Tensor):
        if state.is_floating_point() and not hasattr(state, "placements") and not state.is_sparse:
            yield float(state.detach().double().square().sum())
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _squares(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _squares(value)
    elif isinstance(state, float) and math.isfinite(state):
        yield state * state
