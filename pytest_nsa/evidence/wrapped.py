"""Models that DDP wraps, as ranks recorded them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a model that DDP wraps: its name, 'float32[8,4]' as its ``kind``, and whether it is trained."""

    name: str
    kind: str
    is_trained: bool

    @classmethod
    def of(cls, text: str) -> Parameter:
        """Read 'layer.weight float32[8,4] frozen' as a rank writes it."""
        name, _, rest = text.partition(" ")
        kind, _, frozen = rest.partition(" ")
        return cls(name, kind, not frozen)

    @property
    def text(self) -> str:
        """'layer.weight float32[8,4]'."""
        return f"{self.name} {self.kind}"


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A model that a rank gives DDP: the user's line, the ranks of the group, and the parameters in their order."""

    where: str
    ranks: tuple[int, ...]
    parameters: tuple[Parameter, ...]

    @classmethod
    def of(cls, event: Mapping[str, Any], ranks: tuple[int, ...]) -> Wrapped:
        """Read a rank's event."""
        return cls(event["where"], ranks, tuple(map(Parameter.of, event["parameters"])))

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """The parameters that DDP reduces, in the order in which it pairs them with those of other ranks."""
        return tuple(p for p in self.parameters if p.is_trained)
