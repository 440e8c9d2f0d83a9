"""A plugin for torchsnapshot's own tests (``-p torchsnapshot_on_ranks``): what its decorators start processes for runs on ranks.

Nothing of torchsnapshot changes. The same replacement fits each suite that starts processes with torch.distributed.launcher.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torchsnapshot.test_utils

from pytest_nsa import world_size


def run_on_ranks(nproc: int) -> pytest.MarkDecorator:
    return world_size(nproc, group=None)


def run_on_ranks_async(nproc: int) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    def decorate(coroutine: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(coroutine)
        def body(*args: Any, **kwargs: Any) -> None:
            asyncio.run(coroutine(*args, **kwargs))  # type: ignore[arg-type]

        return world_size(nproc, group=None)(body)

    return decorate


torchsnapshot.test_utils.run_with_pet = run_on_ranks
torchsnapshot.test_utils.run_with_pet_async = run_on_ranks_async
