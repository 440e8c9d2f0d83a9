"""Hooks that update the board for any nn.Module: phase, step, module, gradients. No change to the model is needed.

They are cheap and always on: ``nn.Module.__call__`` wrapped, one post-accumulate hook per parameter, torch.autograd.backward
and the optimizer's own hooks. Not torch's global forward hooks: even an empty one costs 10 µs per call of a module,
as torch then leaves its fast path, and torch.compile warns about them.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from nsa.trace import logger
from nsa.trace.board import UNKNOWN, Board
from nsa.trace.calls.compiled import outside_graphs
from nsa.trace.ddp_buckets import ddp_models_in, ensure_hook, give_way_to_user_hooks, note_kept_gradients
from nsa.trace.divergence.checksums import Checksums
from nsa.trace.divergence.models import count_joins, remember_wrapper
from nsa.trace.divergence.training_state import watch_loads
from nsa.trace.files import wall_clock
from nsa.trace.finite import is_finite
from nsa.trace.frames import call_site
from nsa.trace.gradients import is_flattened
from nsa.trace.graph import NodeCount, next_number
from nsa.trace.names import plain_name
from nsa.trace.wrapped import OnWrap, watch_wraps


def _is_hooked(parameter: torch.Tensor, handle: RemovableHandle | None) -> bool:
    """Return whether a hook is this parameter's. Decided by the hook: torch cannot swap a parameter that has weak references."""
    hooks = parameter._post_accumulate_grad_hooks
    return handle is not None and hooks is not None and handle.hooks_dict_ref() is hooks


def _ignore(*_: Any, **__: Any) -> None:
    """No-op."""


def _is_inside_a_step() -> bool:
    """Return whether the optimizer's step that begins is called by another optimizer's step."""
    frame: FrameType | None = sys._getframe()
    steps = 0
    while frame is not None:
        code = frame.f_code
        steps += code.co_name == "wrapper" and code.co_filename.endswith("torch/optim/optimizer.py")
        frame = frame.f_back
    return steps > 1


def _parallel_kind(root: nn.Module) -> str:
    if ddp_models_in(root):
        return "ddp"
    is_sharded = any(type(m).__name__.startswith(("FSDP", "FullyShardedDataParallel")) for m in root.modules())
    return "fsdp" if is_sharded else "none"


@dataclass(slots=True, eq=False)
class Known:
    """A module that has been called. It is found by its ``id``, as the hook of every call must be fast.

    ``of`` is the number of modules of the root in which it was named; ``is_leaf``: a module of torch that calls no other and
    makes few autograd nodes, so that its return need not be observed.
    """

    module: weakref.ref[nn.Module]
    name: str
    padded: bytes
    place: int
    of: int = 0
    is_leaf: bool = False


def _is_leaf(module: nn.Module) -> bool:
    is_torch_s = type(module).__module__.startswith("torch.nn.modules.")
    return is_torch_s and not isinstance(module, nn.RNNBase) and next(module.children(), None) is None


_BACKWARD = Known(weakref.ref(nn.Identity()), "backward", b"", UNKNOWN)


class Observer:
    """Installs the hooks in this process.

    ``on_change()`` is called at each new phase, ``on_names(parameters, modules)`` with a new model's names, ``on_model(kind,
    needs_every_gradient)`` with how it is shared (ddp, fsdp or none) and whether that needs a gradient of each parameter,
    ``on_anomaly(kind, step, **facts)`` at an unusual step: "forward_failed", "no_backward", "not_synchronised", "not_finite";
    ``on_wrap(line, ranks, parameters)`` as DDP wraps a model.
    """

    on_anomaly: Callable[..., None]
    on_change: Callable[[], None]
    on_names: Callable[[list[str], list[str]], None]
    on_model: Callable[[str, bool], None]
    on_wrap: OnWrap

    def __init__(self, board: Board) -> None:
        self.board = board
        self._known: dict[int, Known] = {}
        self._hooks: dict[int, RemovableHandle] = {}  # by id of the parameter
        self._calls: list[Known] = []  # the modules with a call that has not returned, and a backward that has not
        self._nodes = NodeCount(board)
        self.forget()

    def forget(self) -> None:
        """Clear what is kept per model before the next test or training in this process."""
        self.on_change = self.on_model = self.on_names = self.on_anomaly = self.on_wrap = _ignore
        self.checksums: Checksums | None = None
        self._known.clear()
        self._calls.clear()
        self._failure = (0, "", "")  # id and text of the exception that ended a forward, and the module that raised it
        self._forward = ""  # state of the current step: '', running, done, failed, or backward
        self._gave_numbers = True  # whether the current step's forward returned finite numbers
        self.parameter_names: list[str] = []
        self._remove_hooks()
        self._roots: WeakSet[nn.Module] = WeakSet()
        self._shared: WeakSet[DistributedDataParallel] = WeakSet()  # DDP modules: roots, or inside of roots
        self._reducing: WeakSet[DistributedDataParallel] = WeakSet()  # those of the models
        # The roots with the most trained parameters: their calls are steps.
        self._models: WeakSet[nn.Module] = WeakSet()
        self._first: WeakSet[nn.Module] = WeakSet()  # the one with which the current step began
        self._updating = 0  # how many optimizers' steps run, one inside the other

    def install(self) -> None:
        """Register all hooks, once per process."""
        self._wrap_calls()
        register_optimizer_step_pre_hook(outside_graphs(self._before_optimizer))
        register_optimizer_step_post_hook(outside_graphs(self._after_optimizer))
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def observed_backward(*args: Any, **kwargs: Any) -> None:
            if _BACKWARD in self._calls:  # reentrant checkpointing runs a backward inside a backward
                return backward(*args, **kwargs)
            self._calls.append(_BACKWARD)
            self._forward = "backward"
            self._note_loss(args[0] if args else kwargs.get("tensors"))
            for shared in self._shared:
                note_kept_gradients(shared)
            self.board.begin_backward()
            self._phase("backward")
            try:
                backward(*args, **kwargs)
            finally:
                del self._calls[-1:]
                self._phase("body")
            if self.checksums is not None:
                self.checksums.after_backward(self.board.count("step"))

        torch.autograd.backward = observed_backward
        give_way_to_user_hooks()
        watch_wraps(lambda *wrap: self.on_wrap(*wrap), remember_wrapper)
        count_joins()
        watch_loads()

    def _before_optimizer(self, *_: Any) -> None:
        if self._updating and not _is_inside_a_step():  # an earlier step has raised
            self._updating = 0
        self._updating += 1
        if self.checksums is not None and self._updating == 1:
            self.checksums.before_update()
        self._phase("optimizer")

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._updating -= 1
        if self._updating > 0:  # an outer optimizer's step still runs
            return
        self._updating = 0
        self._phase("body")
        if self.checksums is not None:
            self.checksums.after_update(self.board.count("step"), optimizer)

    def _note_loss(self, tensors: Any) -> None:
        """Report, before a backward, a loss that is not finite (on a CPU: no synchronisation), and that DDP will not reduce."""
        loss = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        step = self.board.count("step")
        if not is_finite(loss) and loss.numel() == 1:
            self.on_anomaly("not_finite", step, value=str(loss.item()), site=call_site())
        if self._reducing and not any(model.require_backward_grad_sync for model in self._reducing):
            self.on_anomaly("not_synchronised", step)

    def end_step(self) -> None:
        """Report a step without backward, when the next forward begins or the test ends."""
        if self._forward == "done":
            self.on_anomaly("no_backward", self.board.count("step"), finite=self._gave_numbers)
        self._forward, self._failure = "", (0, "", "")

    def _phase(self, name: str) -> None:
        self.board.phase(name)
        place = call_site()
        if place:  # so that a killed rank's line is known even if no beat followed
            text = self.board.padded(place, "line")
            self.board.put("line", text)
            self.board.put("phase_line", text)
            self.board.number("line_time", wall_clock())
        self.on_change()

    def _wrap_calls(self) -> None:
        call, is_compiling, get_ident = nn.Module.__call__, torch.compiler.is_dynamo_compiling, threading.get_ident
        # Does directly what torch's __call__ does, to save a frame; unless a user has replaced it.
        is_torch_s = call is getattr(nn.Module, "_wrapped_call_impl", None)
        main = threading.main_thread().ident  # a fork of the main thread keeps it
        board, calls, known_modules, observe_tree = self.board, self._calls, self._known, self._call_with_children

        @functools.wraps(call)
        def observed_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            # In a graph, the call would be recorded only once, at compile time, and the code below cannot be traced.
            if is_compiling():
                return call(module, *args, **kwargs)
            # Calls of other threads are not observed, except those of autograd's threads during a backward.
            if get_ident() != main and not (calls and calls[0] is _BACKWARD):
                return call(module, *args, **kwargs)
            run = (module._compiled_call_impl or module._call_impl) if is_torch_s else functools.partial(call, module)
            known = known_modules.get(id(module))
            if known is None or not known.is_leaf or not calls:
                return observe_tree(module, known, run, args, kwargs)
            board.called(known.place, known.padded)
            try:
                return run(*args, **kwargs)
            except BaseException as error:
                self._failed(error, known.name)
                raise

        nn.Module.__call__ = observed_call

    def _call_with_children(
        self, module: nn.Module, known: Known | None, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a module that calls others, or the outermost module; count its autograd nodes."""
        __tracebackhide__ = True
        calls, nodes = self._calls, self._nodes
        is_root = not calls
        if is_root:
            self._failure = (0, "", "")  # the id of a freed exception may be reused
            self._before_root(module)
            known = self._known.get(id(module))
        known = known or self._learn(module, type(module).__name__, UNKNOWN)
        number = next_number()
        if number >= nodes.due and calls:
            nodes.made(number, calls[-1].name)
        calls.append(known)
        self.board.called(known.place, known.padded)
        try:
            output = run(*args, **kwargs)
        except BaseException as error:
            self._failed(error, known.name)
            if calls:  # empty if a test ended inside the call
                calls.pop()
            if is_root:
                self._after_root(module, None, error)
            raise
        number = next_number()
        if number >= nodes.due:
            nodes.made(number, known.name)
        if calls:
            calls.pop()
        if is_root:
            self._after_root(module, output, None)
        return output

    def _before_root(self, module: nn.Module) -> None:
        if module not in self._roots:
            try:
                self._adopt(module)
            except Exception as error:  # an unusual model must run all the same
                logger.warning(
                    "the module %s is not traced: %s: %s", type(module).__name__, type(error).__name__, error
                )
        if self.checksums is not None and module.training and torch.is_grad_enabled():
            self.checksums.called(module)
        if module in self._models:  # a loss module, for example, is a root too, but no forward
            if module.training and torch.is_grad_enabled():
                if self._forward != "done" or module in self._first:  # else the next part of a model
                    self.end_step()
                    self.board.add("step")
                    self._first = WeakSet([module])
                self._forward = "running"
            self.board.begin_forward()
            self._nodes.begin()
            self._phase("forward")

    def _failed(self, error: BaseException, name: str) -> None:
        if id(error) != self._failure[0]:
            try:
                text = f"{type(error).__name__}: {error}"[:200]
            except Exception:  # its own message cannot be made
                text = type(error).__name__
            self._failure = (id(error), text, name)

    def _after_root(self, module: nn.Module, output: Any, error: BaseException | None) -> None:
        if module not in self._models:
            return
        self._nodes.end()
        self._phase("body")
        if self._forward == "running":
            self._forward = "done" if error is None else "failed"
            self._gave_numbers = is_finite(output)
            if error is not None:  # at once: a program that swallows the exception may hang in its next call
                _, text, name = self._failure
                self.on_anomaly("forward_failed", self.board.count("step"), error=text, module=name)

    def _adopt(self, root: nn.Module) -> None:
        """Learn the names of a module that is called from outside any other, and hook its gradients."""
        self._roots.add(root)
        modules = list(root.named_modules())
        for place, (name, module) in enumerate(modules):
            known = self._known.get(id(module))
            # A submodule that is called by itself keeps its name in the larger model.
            if known is None or known.module() is not module or known.of <= len(modules):
                self._learn(module, plain_name(name) or type(module).__name__, place, len(modules))
        shared = ddp_models_in(root)
        for model in shared:
            ensure_hook(model)
        self._shared.update(shared)
        # Of these DDP waits for a gradient of every parameter: it does not look for unused parameters.
        strict = [model for model in shared if not (model.find_unused_parameters or model.static_graph)]
        self.on_model(_parallel_kind(root), bool(strict))
        # Lazy parameters have no shape yet, and those of a functional call are not leaves.
        trained = [
            (plain_name(n), p) for n, p in root.named_parameters() if p.requires_grad and p.is_leaf and not is_lazy(p)
        ]
        if not trained or len(trained) < len(self.parameter_names):
            return
        names = [n for n, _ in trained]
        if len(trained) > len(self.parameter_names):
            self._models.clear()
            self._reducing.clear()
            self._remove_hooks()
        self._models.add(root)
        self._reducing.update(shared)
        if any(is_flattened(parameter) for _, parameter in trained):
            trained = []
        self.board.number("gradients_expected", len(trained))
        if names != self.parameter_names:
            self.parameter_names = names
            self.on_names(names, [plain_name(n) for n, _ in modules])
        for index, (name, parameter) in enumerate(trained):
            # A model inside DDP that is called by itself has the same parameters.
            if not _is_hooked(parameter, self._hooks.get(id(parameter))):
                handle = parameter.register_post_accumulate_grad_hook(
                    self.board.arrival(index, self.board.padded(name, "parameter"))
                )
                self._hooks[id(parameter)] = handle

    def _remove_hooks(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def _learn(self, module: nn.Module, name: str, place: int, of: int = 0) -> Known:
        key, found = id(module), self._known

        def forget(gone: weakref.ref[nn.Module]) -> None:
            if key in found and found[key].module is gone:
                del found[key]

        known = Known(
            weakref.ref(module, forget), name, self.board.padded(name), min(place, UNKNOWN), of, _is_leaf(module)
        )
        found[key] = known
        return known
