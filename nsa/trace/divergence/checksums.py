"""Checksums of what must be equal on all ranks: gradients after DDP has reduced them, parameters after an optimizer's step.

A record is a line of JSON in ``checksums.jsonl``: kind, step, the ranks that DDP keeps equal, and the L2 norm of each tensor;
a model's first record also has the names. A number that is not finite is a text: 'nan', 'inf' or '-inf'. Recorded are steps with
gradients that DDP reduced, steps of a model that was called past its DDP wrapper, so that DDP did not reduce them, steps with
gradients that the program reduced by hand, and steps with gradients that nothing reduced ("alone", of one rank).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nsa.trace.ddp_buckets import ddp_models_in
from nsa.trace.divergence.assignments import line_that_names
from nsa.trace.divergence.changes import changes_around
from nsa.trace.divergence.reduced_by_hand import HandReduction
from nsa.trace.divergence.report import Report
from nsa.trace.divergence.sampling import (
    Numbers,
    Seen,
    add,
    alive,
    attributes_of,
    averages_in_subgroups,
    compared,
    is_plain,
    keeps_equal,
    may_average,
    norms_at_start,
    norms_of,
    updates,
    wrapper_of,
)
from nsa.trace.divergence.training_state import TrainingState, keep
from nsa.trace.frames import call_site
from nsa.trace.names import plain_name


class Checksums:
    """Writes the checksums of a rank, on request: it costs three norms per tensor and step (of the gradients, of the values before
    an update, of the parameters) and, on a GPU, as many synchronisations.
    """

    def __init__(self, folder: Path) -> None:
        self._report = Report(folder)
        self._numbers = Numbers()
        self._called: list[weakref.ref[torch.nn.Module]] = []  # since the last backward, each once
        self._trained: list[weakref.ref[torch.nn.Module]] = []  # in this step, each once
        self._has_updated = False
        self._optimizer: Optimizer | None = None  # of the latest update
        self._by_hand = HandReduction()
        self._reduced_by_hand: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
        # By the model's number, its parameters at the latest update, if nothing was reduced since. They may outlive the model.
        self._unchecked: dict[int, Seen] = {}
        # Models that DDP has reduced, or that the program may have averaged.
        self._met: set[int] = set()
        self._called_at: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()  # past a wrapper
        # The norms of models at their first call, and the line that made them; {} if they had a wrapper.
        self._begun: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, object]] = weakref.WeakKeyDictionary()
        self._state = TrainingState()
        self._before: dict[int, list[float]] = {}  # by model: the sums of norms before the running update
        keep(self._state)

    def called(self, root: torch.nn.Module) -> None:
        """Note that a module is called from outside any other, in training."""
        if self._has_updated:
            self._trained, self._has_updated = [], False
            self._by_hand.forget()
        add(self._called, weakref.ref(root))
        if root not in self._called_at and wrapper_of(root) is not None:
            self._called_at[root] = line_that_names(".module") or call_site()
        if root not in self._begun:
            # DDP makes replicas equal, but not those of one rank.
            is_wrapped = wrapper_of(root) is not None or any(
                ddp.process_group.size() > 1 for ddp in ddp_models_in(root)
            )
            self._begun[root] = {} if is_wrapped else {"norms": norms_at_start(root), "site": self._state.made_at(root)}

    def reduced(self, group: Any, tensors: Any) -> None:
        """Check an all-reduce before it starts: it may reduce gradients without DDP."""
        self._met.update(n for n, seen in self._unchecked.items() if may_average(tensors, seen.tensors))
        roots = [r for r in alive([*self._trained, *self._called]) if not ddp_models_in(r) and wrapper_of(r) is None]
        if roots and isinstance(tensors, list | tuple):
            self._by_hand.reduced(group, tensors, roots)
            for root in roots:
                if self._by_hand.may_be_whole(root, tensors) and (of := self._by_hand.group_of(root)) is not None:
                    self._reduced_by_hand[root] = of

    def after_backward(self, step: int) -> None:
        """Record the gradients of the models called since the last backward, if DDP has just reduced them."""
        for root in alive(self._called):
            for ddp in ddp_models_in(root):
                if keeps_equal(ddp):
                    self._met.add(self._number_of(ddp))
                    # These gradients were computed with the parameters that local steps left, so record those first.
                    if self._unchecked.pop(self._number_of(ddp), None) is not None:
                        self._write("parameter", step, ddp, ddp)
                    self._write("gradient", step, ddp, ddp)
            if (group := self._reduced_by_hand.pop(root, None)) is not None:
                # No optimizer's step followed the reduction by hand: record the parameters now.
                self._write_of("by_hand", step, root, root, (), group)
        for reference in self._called:
            add(self._trained, reference)
        self._called = []

    def before_update(self) -> None:
        """Keep the sums of the norms of parameters and gradients before an update, to detect changes made outside of it."""
        for root in alive(self._trained):
            inside = [(ddp, ddp.module, ddp.parameters_to_ignore) for ddp in ddp_models_in(root)]
            is_ddp_s = bool(inside) or wrapper_of(root) is not None
            is_reduced = is_ddp_s or self._by_hand.group_of(root) is not None
            for model, module, ignored in inside or ([(root, root, ())] if is_reduced else []):
                kept = [p for _, p in compared(module, ignored, with_frozen=is_ddp_s)]
                parameters = [p.detach() for p in kept if not p.is_sparse]
                gradients = [p.grad for p in kept if p.grad is not None and not p.grad.is_sparse]
                norms = norms_of([*parameters, *gradients])
                sums = [math.fsum(norms[: len(parameters)]), math.fsum(norms[len(parameters) :])]
                self._before[self._number_of(model)] = sums

    def after_update(self, step: int, optimizer: Optimizer) -> None:
        """Record the parameters of the trained models, if DDP keeps them equal; after local steps it does not."""
        self._has_updated, self._optimizer = True, optimizer
        for root in alive(self._trained):
            self._reduced_by_hand.pop(root, None)
            inside = ddp_models_in(root)
            for ddp in inside:
                if keeps_equal(ddp):
                    self._write("parameter", step, ddp, ddp)
                else:
                    seen = self._look("unreduced", step, ddp, ddp.module, ddp.parameters_to_ignore, ddp.process_group)
                    self._unchecked[seen.model] = seen
                    if averages_in_subgroups(ddp):
                        self._met.add(seen.model)
            wrapper = None if inside else wrapper_of(root)
            if wrapper is not None and keeps_equal(wrapper) and weakref.ref(wrapper) not in self._trained:
                self._write("unwrapped", step, root, wrapper)
            if wrapper is None and not inside:
                if (group := self._by_hand.group_of(root)) is not None:
                    self._write_of("by_hand", step, root, root, (), group)
                elif is_plain(root) and updates(optimizer, root):
                    self._write_of("alone", step, root, root, (), None)
        self._before.clear()

    def _write(self, kind: str, step: int, root: torch.nn.Module, ddp: DistributedDataParallel) -> None:
        # DDP's names to ignore are names in the wrapped module.
        self._write_of(kind, step, root, ddp.module, ddp.parameters_to_ignore, ddp.process_group)

    def _write_of(
        self, kind: str, step: int, root: torch.nn.Module, module: torch.nn.Module, ignored: Collection[str], group: Any
    ) -> None:
        if not self._report.is_full:
            seen = self._look(kind, step, root, module, ignored, group)
            self._report.append(kind, seen, self._numbers.joins, self._changes_of(root))

    def _changes_of(self, root: torch.nn.Module) -> dict[str, object]:
        """Return what a model's update depends on, except gradients, as far as it has changed since the last record."""
        number = self._number_of(root)
        before = self._before.get(number)
        more = {"begun": self._begun.get(root), "added": self._added_since_wrapped(root)}
        if before is not None:
            more["changes"] = changes_around(attributes_of(root))
        now = self._state.of(root, self._optimizer) | {name: value for name, value in more.items() if value}
        return self._report.changes(number, now) | ({} if before is None else {"before": before})

    def _added_since_wrapped(self, root: torch.nn.Module) -> list[list[str]]:
        """Return the parameters that were added to a model after DDP wrapped it, and the lines that made them."""
        found: list[list[str]] = []
        for ddp in ddp_models_in(root):
            known = {id(p) for p in getattr(ddp, "_module_parameters", ())}
            for prefix, module in ddp.module.named_modules() if known else ():
                of_module = module.named_parameters(prefix, recurse=False)
                untracked = [name for name, p in of_module if p.requires_grad and id(p) not in known]
                new = [name for name in untracked if name not in ddp.parameters_to_ignore]
                site = self._state.made_at(module) if new else ""
                found += [[plain_name(name), site] for name in new]
        return found

    def _look(
        self, kind: str, step: int, root: torch.nn.Module, module: torch.nn.Module, ignored: Collection[str], group: Any
    ) -> Seen:
        """Return the gradients or parameters of a model that are compared; their numbers are not read yet."""
        kept = compared(module, ignored, with_frozen=kind != "by_hand")
        of_gradients = [p.grad for _, p in kept if p.requires_grad]
        tensors = of_gradients if kind == "gradient" else [p.detach() for _, p in kept]
        names = [name for name, _ in kept]
        ranks = [dist.get_rank()] if kind == "alone" else dist.get_process_group_ranks(group)
        site = self._called_at.get(root, "") if kind == "unwrapped" else ""
        return Seen(step, site or call_site(), self._number_of(root), names, tensors, ranks)

    def _number_of(self, root: torch.nn.Module) -> int:
        if self._numbers.has_joined():
            self._unchecked.clear()
        return self._numbers.of(root)

    def close(self) -> None:
        """Write the parameters of models that neither DDP has reduced nor the program averaged, and close the file.

        Other models may be in the middle of local steps (local SGD), where different parameters are correct.
        """
        for seen in self._unchecked.values():
            if seen.model not in self._met and not self._report.is_full:
                self._report.append("unreduced", seen, self._numbers.joins)
        keep(None)
        self._report.close()
