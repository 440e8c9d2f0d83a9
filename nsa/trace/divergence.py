"""Checksums of what must be equal on all ranks: gradients after DDP has reduced them, parameters after an optimizer's step.

A record is a line of JSON in ``checksums.jsonl``: kind, step, and the L2 norm of each tensor; the first one has the names too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from nsa.trace.names import plain_name

MAX_BYTES = 64 << 20  # then no more is written: what diverges does so early


class Checksums:
    """Writes the checksums of a rank. Costs a norm a tensor and, on a GPU, a synchronisation: only where it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "checksums.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = 0

    def after_backward(self, root: torch.nn.Module, step: int) -> None:
        """``root``'s gradients, where DDP has just reduced them."""
        if isinstance(root, DistributedDataParallel) and root.require_backward_grad_sync:
            self._write("gradient", step, root, [p.grad for p in root.parameters() if p.requires_grad])

    def after_step(self, root: torch.nn.Module, step: int) -> None:
        """``root``'s parameters, where DDP keeps them equal."""
        if isinstance(root, DistributedDataParallel):
            self._write("parameter", step, root, [p.detach() for p in root.parameters() if p.requires_grad])

    def _write(self, kind: str, step: int, root: torch.nn.Module, tensors: Sequence[torch.Tensor | None]) -> None:
        if self._size > MAX_BYTES:
            return
        there = [t for t in tensors if t is not None and not t.is_sparse]
        norms = torch.stack([n.float() for n in torch._foreach_norm(there)]).cpu() if there else torch.zeros(0)
        found = iter(norms.tolist())
        values = [next(found) if t is not None and not t.is_sparse else None for t in tensors]
        record: dict[str, object] = {"kind": kind, "step": step, "norms": values}
        if not self._size:
            record["names"] = [plain_name(n) for n, p in root.named_parameters() if p.requires_grad]
        self._size += os.write(self._file, json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        """No more is written."""
        os.close(self._file)
