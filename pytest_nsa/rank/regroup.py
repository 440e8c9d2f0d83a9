"""Groups after a rank's first: those that a test makes itself, by env://, and a new one per test on reused ranks."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nsa.trace.autostart import mark_as_traced

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"


def set_first(ports: Sequence[int]) -> None:
    """Name the first port in the environment, before a test reads it."""
    if ports:
        os.environ.update({ADDRESS: "127.0.0.1", PORT: str(ports[0])})


def change_after_each(ports: Sequence[int]) -> None:
    """Let MASTER_PORT name the next of ``ports`` for each group after the first that all ranks have formed.

    A group that is destroyed and made again on one port is a race: a rank that is ahead connects to the old group's store, which
    rank 0 is about to close. A port that the test itself has set is not changed.
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of this name
    handlers: dict[str, Any] = getattr(rendezvous, "_rendezvous_handlers", {})
    meet = handlers.get("env")
    if not ports or meet is None:
        return
    met = 0

    def meet_on_another(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        nonlocal met
        ours = str(ports[(met - 1) % len(ports)])
        if met and os.environ.get(PORT) == ours:
            os.environ[PORT] = str(ports[met % len(ports)])
            mark_as_traced()
        for found in meet(url, *args, **kwargs):
            met += 1  # the store has waited for all ranks, so this number is equal on all
            yield found

    handlers["env"] = meet_on_another


def meeting_store(rank: int, ports: Sequence[int]) -> dist.Store | None:
    """Return a store that rank 0 serves on the last of ``ports``, ten times as fast as the zygote's; None without ports."""
    if not ports:
        return None
    limit = timedelta(seconds=60)
    return dist.TCPStore("127.0.0.1", ports[-1], is_master=rank == 0, wait_for_workers=False, timeout=limit)


_left: list[object] = []


def leave_group() -> None:
    """Forget the default group, if there is one. Its connections stay open until this process ends: gloo takes 20 ms to close them,
    and holds the GIL in that time. The host bounds their number (`pytest_nsa.session.runner`).
    """
    if not dist.is_initialized():
        return
    group = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda" if "cuda" in str(group._device_types) else "cpu")
    _left.extend((group, group._get_backend(device)))
    dist.destroy_process_group()
