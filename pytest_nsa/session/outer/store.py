"""The store of an outer launcher, through which the pytest processes of a run exchange JSON.

The one place where a pytest process imports torch: torchrun's store is torch's TCPStore, and its protocol is torch's own. Under an
outer launcher ranks are forked from this process, which has to import torch anyway.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from datetime import timedelta
from typing import Any

from pytest_nsa.settings import OuterLauncher
from pytest_nsa.system.clock import monotonic

NOTICE_S = 5.0
MEET_S = 600.0  # for all processes to collect their tests


class OuterStore:
    """Named values that the processes of a run exchange."""

    def __init__(self, outer: OuterLauncher) -> None:
        import torch.distributed as dist

        store = dist.TCPStore(
            outer.address,
            outer.port,
            is_master=outer.rank == 0 and not outer.serves_store,
            wait_for_workers=False,
            multi_tenant=True,  # a test that forms a group by env:// serves the same port of this process
            timeout=timedelta(seconds=MEET_S),
        )
        self._store = dist.PrefixStore("pytest-nsa", store)

    def put(self, key: str, value: Any) -> None:
        """Publish a value: anything that JSON can hold."""
        self._store.set(key, zlib.compress(json.dumps(value).encode()))

    def look(self, key: str) -> Any:
        """Return the value of a key; None until it is set."""
        return json.loads(zlib.decompress(self._store.get(key))) if self._store.check([key]) else None

    def wait(self, key: str, seconds: float, *, or_key: str = "", awaited: str = "") -> Any:
        """Wait for the value of ``key``, or of ``or_key`` if that comes first. Raises TimeoutError.

        After `NOTICE_S` a line on standard error has what is ``awaited``, if that is given.
        """
        began = monotonic()
        deadline = began + seconds
        while True:
            for name in (key, or_key):
                value = self.look(name) if name else None
                if value is not None:
                    return value
            if awaited and monotonic() - began >= NOTICE_S:
                print(f"nsa: waits for {awaited} (up to {seconds:.0f} s)", file=sys.__stderr__, flush=True)
                awaited = ""
            if monotonic() >= deadline:
                raise TimeoutError(f"nothing was received for {key!r} for {seconds:.0f} s")
            time.sleep(0.01)
