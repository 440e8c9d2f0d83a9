"""Which parameters' gradients arrived in a backward, and which did not."""

import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from nsa.trace import logger
from nsa.trace.files import open_to_append
from nsa.trace.names import plain_name

Listener = Callable[[int, list[str], int], None]


_listener: Listener = lambda *_: None  # noqa: E731


def report_gradients(listener: Listener) -> None:
    """Call ``listener(step, missing, order)``, instead of an earlier listener, after each backward with a `GradientTrace`.

    ``order`` is a checksum of the parameters' names in the order in which their gradients became ready.
    """
    global _listener
    _listener = listener


def report_missing(
    moment: str, step: int, arrived: int, missing: list[str], missing_file: Path | None, rank: int
) -> list[str]:
    """Log how many gradients arrived, and which did not; ``missing_file`` gets a line of each. Return the lines of the log."""
    lines = [f"[GRAD-TRACE] {moment}_step{step} arrived={arrived} missing={len(missing)}"]
    lines += [f"  - MISSING: {name}" for name in missing]
    for line in lines:
        logger.log(logging.WARNING if missing else logging.INFO, "%s", line)
    if missing_file is not None and missing:
        with open(open_to_append(missing_file), "a", encoding="utf-8") as file:
            file.writelines(f"step{step} {name} rank={rank}\n" for name in missing)
    return lines


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return whether FSDP1 gathers a parameter's gradient in a flat one, so that no hook on the parameter is called."""
    return getattr(parameter, "_fsdp_flattened", False) and not getattr(parameter, "_is_flat_param", False)


class GradientTrace:
    """Post-accumulate hooks on every trained parameter of a module. Usable with ``with``.

    ``is_counted`` is False where FSDP1 keeps parameters by their names (``use_orig_params``): then nothing is reported.
    """

    def __init__(self, model: nn.Module) -> None:
        self.is_counted = not any(map(is_flattened, model.parameters()))
        self.arrived: dict[str, None] = {}  # in the order of their arrival
        trained = [(plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
        self.expected = [name for name, _ in trained]
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(lambda _, name=name: self.arrived.setdefault(name)) for name, p in trained
        ]  # fmt: skip

    def missing(self) -> list[str]:
        """Return names, in the model's order, of parameters whose gradient has not arrived since the last `reset`.

        Raises RuntimeError where gradients are not counted.
        """
        if not self.is_counted:
            raise RuntimeError(
                "gradients are not counted under FSDP1 with use_orig_params; use FSDP2 (fully_shard) or DDP"
            )
        return [name for name in self.expected if name not in self.arrived]

    def report(
        self, step: int, missing_file: Path | None = None, rank: int = 0, *, has_failed: bool = False
    ) -> list[str]:
        """Log how many gradients arrived in the backward of ``step``, as a warning if some are missing; return the missing names.

        ``missing_file``, one for all ranks, gets a line 'step1 blocks.4.attn.out.weight rank=0' for each. ``has_failed``: an
        exception ended the backward, so that missing gradients are its consequence, and the listener is not called.
        """
        if not self.is_counted:
            logger.info("[GRAD-TRACE] not counted under FSDP1")
            return []
        missing = self.missing()
        if not has_failed:  # evidence first: the file below may meet a full disk
            _listener(step, missing, zlib.crc32("\n".join(self.arrived).encode()))
        report_missing("after_backward", step, len(self.arrived), missing, missing_file, rank)
        return missing

    def reset(self) -> None:
        """Clear the arrived gradients: to be called before each backward."""
        self.arrived.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
