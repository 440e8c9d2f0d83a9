"""What a forward returned, to look at should no backward follow, for as long as the program keeps it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

MAX_LOOK = 1 << 22  # numbers


class Output:
    """A model's output: its numbers, until the program drops it; from then on whether they were finite."""

    __slots__ = ("__weakref__", "_is_finite", "_reference", "_values")

    def __init__(self, output: torch.Tensor) -> None:
        self._values: torch.Tensor | None = output.detach()
        self._is_finite = True
        this = weakref.ref(self)

        def settle(_: object) -> None:
            if (kept := this()) is not None:
                kept._settle()

        self._reference = weakref.ref(output, settle)

    @classmethod
    def of(cls, output: Any) -> Output | None:
        """Return it; None for what is on a GPU or large: looking would cost."""
        if not isinstance(output, torch.Tensor) or output.device.type != "cpu" or output.numel() > MAX_LOOK:
            return None
        # torch.jit.trace would record the look.
        if torch._C._get_tracing_state() is not None or not output.is_floating_point():
            return None
        try:
            return cls(output)
        except Exception:  # a tensor without numbers: under vmap, or fake
            return None

    def is_finite(self) -> bool:
        """Return whether all its numbers are finite; True where they cannot be read."""
        self._settle()
        return self._is_finite

    def _settle(self) -> None:
        values, self._values = self._values, None
        if values is None:
            return
        try:
            self._is_finite = bool(values.isfinite().all())
        except Exception:  # as in `of`
            self._is_finite = True
