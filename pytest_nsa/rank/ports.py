"""Where groups meet that a test makes itself by env://: on another port each time.

A group that is destroyed and made again on one port races with itself: a rank that is ahead connects to the old group's store,
which rank 0 is about to close.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"


def set_first(ports: Sequence[int]) -> None:
    """Name the first port in the environment, before a test reads it."""
    if ports:
        os.environ.update({ADDRESS: "127.0.0.1", PORT: str(ports[0])})


def change_after_each(ports: Sequence[int]) -> None:
    """From now on MASTER_PORT names the next of ``ports`` for each group after the first that all ranks have met for.

    A port that the test has set itself is left alone.
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
        for found in meet(url, *args, **kwargs):
            met += 1  # the store has counted all ranks, so that they count alike
            yield found

    handlers["env"] = meet_on_another
