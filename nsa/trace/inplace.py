"""Find writes, inside a region that is recomputed in backward, into tensors that existed before it.

Checkpointing runs a region twice. An operation that changes its input, a parameter or a buffer in place makes the second run
start from other values than the first: gradients are then wrong, or autograd raises. Autograd's version counters detect only some
of these writes: not those under ``no_grad`` or through ``.data``, and none into a tensor that it has not saved.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa.trace.frames import call_site


@dataclass(frozen=True, slots=True)
class Write:
    """A write: ``operation`` is its ATen name (``add_``), ``tensor`` in words (``input 0 of blocks.3``), ``where`` file:line."""

    operation: str
    tensor: str
    where: str

    def __str__(self) -> str:
        return f"{self.operation} writes into {self.tensor} at {self.where}"


class _Watch(TorchDispatchMode):
    """Every operation that writes into one of ``known`` (by storage) is added to ``found``."""

    def __init__(self, known: dict[int | None, str], found: list[Write]) -> None:
        super().__init__()
        self.known, self.found = known, found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _written(func, args, kwargs or {}):
            place = _storage(tensor)
            name = self.known.get(place)
            if place is not None and name is not None:
                self.found.append(Write(func._schema.name.rpartition("::")[2], name, call_site()))
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes into, by its schema."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a sparse tensor has none
        return None


@contextlib.contextmanager
def watched(root: nn.Module, regions: Sequence[nn.Module]) -> Iterator[list[Write]]:
    """Collect the writes that each call of ``regions``, modules of ``root``, makes into tensors that existed before it.

    These tensors are its inputs, and the parameters and buffers of ``root``. Calls must not be compiled.
    """
    names = {id(module): name for name, module in root.named_modules()}
    regions = list(dict.fromkeys(regions))  # a block may be in several places
    lasting = {_storage(t): name for name, t in itertools.chain(root.named_parameters(), root.named_buffers())}
    found: list[Write] = []
    own = {region: vars(region)["forward"] for region in regions if "forward" in vars(region)}
    for region in regions:
        region.forward = _watching(region.forward, names.get(id(region), "the region"), lasting, found)
    try:
        yield found
    finally:
        for region in regions:
            del region.forward
            if region in own:
                region.forward = own[region]


def _watching(
    forward: Callable[..., Any], name: str, lasting: dict[int | None, str], found: list[Write]
) -> Callable[..., Any]:
    def watching(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        inputs = {_storage(tensor): f"input {index} of {name}" for index, tensor in enumerate(given)}
        with _Watch({**inputs, **lasting}, found):
            return forward(*args, **kwargs)

    return watching
