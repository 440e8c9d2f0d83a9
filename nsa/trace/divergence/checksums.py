"""Checksums of what must be equal on all ranks: gradients after DDP has reduced them, parameters after an optimizer's step.

A record is a line of JSON in ``checksums.jsonl``: kind, step, the ranks that DDP keeps equal, and the L2 norm of each tensor;
a model's first record also has the names. A number that is not finite is a text: 'nan', 'inf' or '-inf'. Recorded are steps with
gradients that DDP reduced, steps of a model that was called past its DDP wrapper, so that DDP did not reduce them, steps with
gradients that the program reduced by hand, and steps with gradients that nothing reduced ("alone", of one rank).
"""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nsa.trace.ddp_buckets import ddp_models_in
from nsa.trace.divergence.models import (
    Numbers,
    Seen,
    averages_in_subgroups,
    compared,
    find_wrapper,
    is_plain,
    keeps_equal,
    may_average,
    norms_at_start,
    norms_of,
    updates,
)
from nsa.trace.divergence.reduced_by_hand import HandReduction
from nsa.trace.divergence.training_state import TrainingState, keep
from nsa.trace.events import ignore_full_disk
from nsa.trace.files import close, open_to_append, write
from nsa.trace.frames import call_site
from nsa.trace.names import plain_name
from nsa.trace.strict_json import to_json

MAX_BYTES = 64 << 20  # then no more is written: models that diverge do so early


class Checksums:
    """Writes the checksums of a rank, on request: it costs three norms per tensor and step (of the gradients, of the values before
    an update, of the parameters) and, on a GPU, as many synchronisations.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._size = open_to_append(folder / "checksums.jsonl"), 0
        self._written: dict[int, dict[str, object]] = {}  # by model, the fields that were last written
        self._numbers = Numbers()
        self._called: WeakKeyDictionary[torch.nn.Module, None] = WeakKeyDictionary()  # since the last backward
        self._trained: WeakKeyDictionary[torch.nn.Module, None] = WeakKeyDictionary()  # in this step
        self._has_updated = False
        self._optimizer: Optimizer | None = None  # of the latest update
        self._by_hand = HandReduction()
        self._reduced_by_hand: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
        # By the model's number, its parameters at the latest update, if nothing was reduced since. They may outlive the model.
        self._unchecked: dict[int, Seen] = {}
        # Models that DDP has reduced, or that the program may have averaged.
        self._met: set[int] = set()
        self._called_at: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()  # past a wrapper
        # The norms of models at their first call, and the line that made them; {} if they had a wrapper.
        self._begun: WeakKeyDictionary[torch.nn.Module, dict[str, object]] = WeakKeyDictionary()
        self._state = TrainingState()
        self._before: dict[int, list[float]] = {}  # by model: the sums of norms before the running update
        keep(self._state)

    def called(self, root: torch.nn.Module) -> None:
        """Note that a module is called from outside any other, in training."""
        if self._has_updated:
            self._trained.clear()
            self._has_updated = False
            self._by_hand.forget()
        self._called[root] = None
        if root not in self._called_at and find_wrapper(root) is not None:
            self._called_at[root] = call_site()
        if root not in self._begun:
            # DDP makes replicas equal, but not those of one rank.
            is_wrapped = find_wrapper(root) is not None or any(
                ddp.process_group.size() > 1 for ddp in ddp_models_in(root)
            )
            self._begun[root] = {} if is_wrapped else {"norms": norms_at_start(root), "site": self._state.made_at(root)}

    def reduced(self, group: Any, tensors: Any) -> None:
        """Check an all-reduce before it starts: it may reduce gradients without DDP."""
        self._met.update(n for n, seen in self._unchecked.items() if may_average(tensors, seen.tensors))
        called = [*self._trained, *self._called]
        roots = [root for root in called if not ddp_models_in(root) and find_wrapper(root) is None]
        if roots and isinstance(tensors, list | tuple):
            self._by_hand.reduced(group, tensors, roots)
            for root in roots:
                if self._by_hand.may_be_whole(root, tensors) and (of := self._by_hand.group_of(root)) is not None:
                    self._reduced_by_hand[root] = of

    def after_backward(self, step: int) -> None:
        """Record the gradients of the models called since the last backward, if DDP has just reduced them."""
        for root in list(self._called):
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
        self._trained.update(self._called)
        self._called.clear()

    def before_update(self) -> None:
        """Keep the sums of the norms of parameters and gradients before an update, to detect changes made outside of it."""
        for root in list(self._trained):
            inside = [(ddp, ddp.module, ddp.parameters_to_ignore) for ddp in ddp_models_in(root)]
            is_ddp_s = bool(inside) or find_wrapper(root) is not None
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
        for root in list(self._trained):
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
            wrapper = None if inside else find_wrapper(root)
            if wrapper is not None and keeps_equal(wrapper) and wrapper not in self._trained:
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
        if self._size <= MAX_BYTES:
            seen = self._look(kind, step, root, module, ignored, group)
            facts: dict[str, object] = self._state.of(root, self._optimizer)
            facts |= {"begun": self._begun.get(root), "added": self._added_since_wrapped(root)}
            before = self._before.get(seen.model)
            self._append(kind, seen, {} if before is None else {"before": before}, facts)

    def _append(self, kind: str, seen: Seen, more: dict[str, object], facts: dict[str, object]) -> None:
        """Write the norms of the tensors in ``seen``. Of a model's ``facts`` only those are written that have changed since.

        Reads the numbers, on a GPU with a synchronisation.
        """
        found = iter(norms_of([t for t in seen.tensors if t is not None and not t.is_sparse]))
        values = [next(found) if t is not None and not t.is_sparse else None for t in seen.tensors]
        written = self._written.setdefault(seen.model, {})
        facts["names"] = seen.names
        news = {name: v for name, v in facts.items() if (v or name in written) and written.get(name) != v}
        written |= news
        record: dict[str, object] = {
            "kind": kind, "step": seen.step, "model": seen.model, "ranks": seen.ranks, "norms": values, "site": seen.site,
            **({"joins": self._numbers.joins} if self._numbers.joins else {}), **news, **more,
        }  # fmt: skip
        with ignore_full_disk():
            self._size += write(self._file, to_json(record, as_text=True).encode() + b"\n")

    def _added_since_wrapped(self, root: torch.nn.Module) -> list[list[str]]:
        """Return the parameters that were added to a model after DDP wrapped it, and the lines that made them."""
        found: list[list[str]] = []
        for ddp in ddp_models_in(root):
            known = {id(p) for p in ddp._module_parameters}
            for prefix, module in ddp.module.named_modules():
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
            if seen.model not in self._met and self._size <= MAX_BYTES:
                self._append("unreduced", seen, {}, {})
        keep(None)
        close(self._file)
