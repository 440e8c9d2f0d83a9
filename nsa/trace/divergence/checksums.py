"""Checksums of what must be equal on all ranks: gradients after DDP has reduced them, parameters after an optimizer's step.

A record is a line of JSON in ``checksums.jsonl``: kind, step, the ranks that DDP keeps equal, and the L2 norm of each tensor;
the first one of a model has the names too. A number that is not finite is a text: 'nan', 'inf' or '-inf'. Compared is what DDP
answers for: steps whose gradients it reduced, and those of a model that is called past its wrapper, so that DDP did not reduce
them; and steps whose gradients the program has reduced by hand.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nsa.trace.ddp_buckets import ddp_models_in
from nsa.trace.divergence.assignments import line_that_names
from nsa.trace.divergence.changes import changes_around
from nsa.trace.divergence.reduced_by_hand import HandReduction
from nsa.trace.divergence.training_state import TrainingState, keep, made_equal
from nsa.trace.events import where_there_is_room
from nsa.trace.files import open_to_append
from nsa.trace.frames import call_site
from nsa.trace.names import plain_name
from nsa.trace.strict_json import to_json

MAX_BYTES = 64 << 20  # then no more is written: what diverges does so early


@dataclass(frozen=True, slots=True)
class Seen:
    """What of a model is to be compared: in which step, at which line of the user's code, among which ranks."""

    step: int
    site: str
    model: int
    names: list[str]
    tensors: list[torch.Tensor | None]
    ranks: list[int]


class Checksums:
    """Writes the checksums of a rank. Costs three norms per tensor and step (of gradients, of what an update begins with, of
    parameters) and, on a GPU, as many synchronisations: only on request.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open_to_append(folder / "checksums.jsonl")
        self._size = 0
        self._count = 0  # of the models so far: of those that have gone, too
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._joins, self._joins_before = 0, _joins_made
        self._called: list[weakref.ref[torch.nn.Module]] = []  # since the last backward, each once
        self._trained: list[weakref.ref[torch.nn.Module]] = []  # in this step, each once
        self._has_updated = False
        self._optimizer: Optimizer | None = None  # of the latest update
        self._by_hand = HandReduction()
        self._reduced_by_hand: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
        self._named: set[int] = set()  # of the models, those whose names are written
        # By the model's number, its parameters at the latest update, where nothing was reduced since. They outlive the model.
        self._unchecked: dict[int, Seen] = {}
        # Models that DDP has reduced, or whose parameters may have been averaged by the program.
        self._met: set[int] = set()
        self._called_at: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()  # past a wrapper
        # What models were when they were first called, and the line that made them; {} where they had a wrapper.
        self._begun: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, object]] = weakref.WeakKeyDictionary()
        self._state = TrainingState()
        self._told: dict[int, dict[str, object]] = {}  # by model, what was last written of it
        self._before: dict[int, list[float]] = {}  # by model, of the update that runs
        keep(self._state)

    def called(self, root: torch.nn.Module) -> None:
        """A module is called, from outside any other, to be trained."""
        if self._has_updated:
            self._trained, self._has_updated = [], False
            self._by_hand.forget()
        _add(self._called, weakref.ref(root))
        if root not in self._called_at and _wrapper_of(root) is not None:
            self._called_at[root] = line_that_names(".module") or call_site()
        if root not in self._begun:
            is_wrapped = _wrapper_of(root) is not None or ddp_models_in(root)
            self._begun[root] = (
                {} if is_wrapped else {"norms": _norms_at_start(root), "site": self._state.made_at(root)}
            )

    def reduced(self, group: Any, tensors: Any) -> None:
        """Check an all-reduce before it starts: it may reduce gradients without DDP."""
        self._met.update(n for n, seen in self._unchecked.items() if _may_average(tensors, seen.tensors))
        roots = [r for r in _alive([*self._trained, *self._called]) if not ddp_models_in(r) and _wrapper_of(r) is None]
        if roots and isinstance(tensors, list | tuple):
            self._by_hand.reduced(group, tensors, roots)
            for root in roots:
                if self._by_hand.may_be_whole(root, tensors) and (of := self._by_hand.group_of(root)) is not None:
                    self._reduced_by_hand[root] = of

    def after_backward(self, step: int) -> None:
        """The gradients in what has been called since the last backward, where DDP has just reduced them."""
        for root in _alive(self._called):
            for ddp in ddp_models_in(root):
                if _keeps_equal(ddp):
                    self._met.add(self._number_of(ddp))
                    # What is reduced now was computed with the parameters that local steps left.
                    if self._unchecked.pop(self._number_of(ddp), None) is not None:
                        self._write("parameter", step, ddp, ddp)
                    self._write("gradient", step, ddp, ddp)
            if (group := self._reduced_by_hand.pop(root, None)) is not None:
                # Updated without an optimizer, if at all. What the forward itself gathers is there after it.
                self._write_of("by_hand", step, root, root, (), group)
        for reference in self._called:
            _add(self._trained, reference)
        self._called = []

    def before_update(self) -> None:
        """What an update begins with: the sums of the norms of parameters and of gradients, to find what changed them before."""
        for root in _alive(self._trained):
            inside = [(ddp, ddp.module, ddp.parameters_to_ignore) for ddp in ddp_models_in(root)]
            is_ddp_s = bool(inside) or _wrapper_of(root) is not None
            is_reduced = is_ddp_s or self._by_hand.group_of(root) is not None
            for model, module, ignored in inside or ([(root, root, ())] if is_reduced else []):
                kept = [p for _, p in _compared(module, ignored, with_frozen=is_ddp_s)]
                parameters = [p.detach() for p in kept if not p.is_sparse]
                gradients = [p.grad for p in kept if p.grad is not None and not p.grad.is_sparse]
                norms = _norms_of([*parameters, *gradients])
                sums = [math.fsum(norms[: len(parameters)]), math.fsum(norms[len(parameters) :])]
                self._before[self._number_of(model)] = sums

    def after_update(self, step: int, optimizer: Optimizer | None = None) -> None:
        """The parameters in what was trained, where DDP keeps them equal; after local steps it does not."""
        self._has_updated, self._optimizer = True, optimizer
        for root in _alive(self._trained):
            self._reduced_by_hand.pop(root, None)
            inside = ddp_models_in(root)
            for ddp in inside:
                if _keeps_equal(ddp):
                    self._write("parameter", step, ddp, ddp)
                else:
                    seen = self._look("unreduced", step, ddp, ddp.module, ddp.parameters_to_ignore, ddp.process_group)
                    self._unchecked[seen.model] = seen
                    if _averages_in_subgroups(ddp):
                        self._met.add(seen.model)
            wrapper = None if inside else _wrapper_of(root)
            if wrapper is not None and _keeps_equal(wrapper) and weakref.ref(wrapper) not in self._trained:
                self._write("unwrapped", step, root, wrapper)
            if wrapper is None and not inside and (group := self._by_hand.group_of(root)) is not None:
                self._write_of("by_hand", step, root, root, (), group)
        self._before.clear()

    def _write(self, kind: str, step: int, root: torch.nn.Module, ddp: DistributedDataParallel) -> None:
        # The names to ignore are those in the module that it wraps.
        self._write_of(kind, step, root, ddp.module, ddp.parameters_to_ignore, ddp.process_group)

    def _write_of(
        self, kind: str, step: int, root: torch.nn.Module, module: torch.nn.Module, ignored: Collection[str], group: Any
    ) -> None:
        if self._size <= MAX_BYTES:
            self._append(kind, self._look(kind, step, root, module, ignored, group), self._news_of(root))

    def _news_of(self, root: torch.nn.Module) -> dict[str, object]:
        """Return what a model's update is made from, except for gradients, as far as it is not what was last written."""
        number, now = self._number_of(root), self._state.of(root, self._optimizer)
        now |= {"begun": begun} if (begun := self._begun.get(root)) else {}
        now |= {"added": added} if (added := self._added_since_wrapped(root)) else {}
        now |= (
            {"changes": changes} if number in self._before and (changes := changes_around(_attributes_of(root))) else {}
        )
        news = {name: value for name, value in now.items() if self._told.get(number, {}).get(name) != value}
        self._told.setdefault(number, {}).update(news)
        return news | ({"before": self._before[number]} if number in self._before else {})

    def _added_since_wrapped(self, root: torch.nn.Module) -> list[list[str]]:
        """Return the parameters that DDP does not know, as a model got them after it was wrapped, and the lines that made them."""
        found: list[list[str]] = []
        for ddp in ddp_models_in(root):
            known = {id(p) for p in getattr(ddp, "_module_parameters", ())}
            for prefix, module in ddp.module.named_modules() if known else ():
                new = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad and id(p) not in known]
                site = self._state.made_at(module) if new else ""
                found += [[plain_name(f"{prefix}.{name}" if prefix else name), site] for name in new]
        return found

    def _look(
        self, kind: str, step: int, root: torch.nn.Module, module: torch.nn.Module, ignored: Collection[str], group: Any
    ) -> Seen:
        """Return what is compared of a model, its gradients or its parameters; no number is read yet."""
        kept = _compared(module, ignored, with_frozen=kind != "by_hand")
        of_gradients = [p.grad for _, p in kept if p.requires_grad]
        tensors = of_gradients if kind == "gradient" else [p.detach() for _, p in kept]
        names, ranks = [name for name, _ in kept], dist.get_process_group_ranks(group)
        site = self._called_at.get(root, "") if kind == "unwrapped" else ""
        return Seen(step, site or call_site(), self._number_of(root), names, tensors, ranks)

    def _number_of(self, root: torch.nn.Module) -> int:
        """Return the number of a model: one that is called past its wrapper is the same, and after a `Join` it is another one, as
        ranks have made as many steps in it as each had data.
        """
        if self._joins != _joins_made - self._joins_before:
            self._joins = _joins_made - self._joins_before
            self._models.clear()
            self._unchecked.clear()
        root = _wrapper_of(root) or root
        if root not in self._models:
            self._count += 1
            self._models[root] = self._count
        return self._models[root]

    def _append(self, kind: str, seen: Seen, news: Mapping[str, object] = MappingProxyType({})) -> None:
        found = iter(_norms_of([t for t in seen.tensors if t is not None and not t.is_sparse]))
        values = [next(found) if t is not None and not t.is_sparse else None for t in seen.tensors]
        record: dict[str, object] = {
            "kind": kind, "step": seen.step, "model": seen.model, "ranks": seen.ranks, "norms": values, "site": seen.site,
            **({"joins": self._joins} if self._joins else {}), **news,
        }  # fmt: skip
        if seen.model not in self._named:
            self._named.add(seen.model)
            record["names"] = seen.names
        with where_there_is_room():
            self._size += os.write(self._file, to_json(record, as_text=True).encode() + b"\n")

    def close(self) -> None:
        """No more is written, except for the parameters of models that DDP has never reduced, nor the program averaged.

        Local SGD leaves them unlike each other between two averages, and rightly so.
        """
        for seen in self._unchecked.values():
            if seen.model not in self._met and self._size <= MAX_BYTES:
                self._append("unreduced", seen)
        keep(None)
        os.close(self._file)


def _norms_of(tensors: list[torch.Tensor]) -> list[float]:
    """Return the L2 norms of tensors."""
    return torch.stack([n.float() for n in torch._foreach_norm(tensors)]).cpu().tolist() if tensors else []


def _norms_at_start(model: torch.nn.Module) -> list[float]:
    """Return the norms of a model's parameters. Detached: the forward that has begun must save nothing more than it would."""
    plain = (p for p in model.parameters() if type(p) is torch.nn.Parameter and not p.is_meta and not p.is_sparse)
    return _norms_of([p.detach() for p in plain])


def _add(references: list[weakref.ref[torch.nn.Module]], reference: weakref.ref[torch.nn.Module]) -> None:
    if reference not in references:
        references.append(reference)


def _alive(references: list[weakref.ref[torch.nn.Module]]) -> list[torch.nn.Module]:
    return [module for reference in references if (module := reference()) is not None]


def _compared(
    module: torch.nn.Module, ignored: Collection[str], *, with_frozen: bool
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of a model that ranks are compared by, and their names: those that are trained, then, as a name has one
    place among gradients and among parameters, those that are not. Of these no whole numbers, which have no norm.
    """
    named = [(plain_name(n), p) for n, p in module.named_parameters() if n not in ignored]
    frozen = [(n, p) for n, p in named if with_frozen and not p.requires_grad and p.is_floating_point()]
    return [(n, p) for n, p in named if p.requires_grad] + frozen


def _attributes_of(root: torch.nn.Module) -> frozenset[str]:
    """Return the names under which modules have a model's parameters."""
    return frozenset(name.rpartition(".")[2] for name, _ in root.named_parameters())


def _keeps_equal(ddp: DistributedDataParallel) -> bool:
    """Not under no_sync, nor under torch's hook for local SGD, which reduces in subgroups."""
    reduces = getattr(ddp, "require_forward_param_sync", ddp.require_backward_grad_sync)  # as its last forward found it
    return reduces and not _averages_in_subgroups(ddp)


def _averages_in_subgroups(ddp: DistributedDataParallel) -> bool:
    hook = getattr(getattr(ddp, "_nsa_bucket_hook", None), "user_hook", None)
    return getattr(hook, "__name__", "") == "post_localSGD_hook"


def _may_average(tensors: Any, parameters: list[torch.Tensor | None]) -> bool:
    """Return whether an all-reduce has a tensor as large as the largest parameter: one of them, or many in one."""
    largest = max((p.numel() for p in parameters if p is not None), default=0)
    reduced = tensors if isinstance(tensors, list | tuple) else [tensors]
    return any(isinstance(t, torch.Tensor) and t.numel() >= largest for t in reduced)


_wrappers: weakref.WeakKeyDictionary[torch.nn.Module, Callable[[], Any]] = weakref.WeakKeyDictionary()


_joins_made = 0  # in this process


def remember_wrappers() -> None:
    """From now on it is known which modules DDP wraps, also of those that are never called through it, and which joins are over."""
    init = DistributedDataParallel.__init__

    @functools.wraps(init)
    def remembering(ddp: DistributedDataParallel, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        init(ddp, module, *args, **kwargs)
        _wrappers[module] = weakref.ref(ddp)
        made_equal(module)

    DistributedDataParallel.__init__ = remembering
    leave = Join.__exit__

    @functools.wraps(leave)
    def leaving(join: Join, *error: Any) -> None:
        global _joins_made
        leave(join, *error)
        _joins_made += 1

    Join.__exit__ = leaving


def _wrapper_of(module: torch.nn.Module) -> DistributedDataParallel | None:
    found = _wrappers.get(module)
    return found() if found is not None else None
