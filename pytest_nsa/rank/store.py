"""The store in which a worker group's ranks find each other: kept by the zygote, reached through each rank's own socket pair.

torch's FileStore polls a file every 10 ms, which is half of what it costs to form a group of two; its TCPStore listens on a
port that any user of the machine can reach. No other process holds a socket pair.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pytest_nsa.wire.messages import Channel

_FOREVER = timedelta(days=1)


class ChannelStore(dist.Store):
    """The rank's side, as torch's C++ calls it. One request at a time: right for gloo: its main thread alone sends requests.

    Raises DistStoreError when a key does not come in time or the zygote has gone.
    """

    def __init__(self, control: Channel) -> None:
        super().__init__()
        self._control = control
        self._lock = threading.Lock()
        self._count = 0
        self._timeout = _FOREVER

    def _query(self, call: str, timeout: timedelta | None = None, **arguments: Any) -> Any:
        with self._lock:
            self._count += 1
            self._control.send(op="store", id=self._count, call=call, **arguments)
            while not self._control.closed:
                replies = self._control.receive((timeout or self._timeout).total_seconds())
                for reply in replies:
                    if reply.get("id") == self._count:  # an older one is of a request that was given up
                        return reply["value"]
                if not replies and not self._control.closed:
                    raise dist.DistStoreError(f"store {call}: timed out waiting for {arguments}")
        raise dist.DistStoreError(f"store {call}: the process that started this rank has gone")

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._query("set", key=key, value=data.decode("latin-1"))

    def get(self, key: str) -> bytes:
        """Return the value, once there is one."""
        return self._query("get", key=key).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        """Count up; returns the new value."""
        return self._query("add", key=key, amount=amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store ``desired`` where the value is ``expected``; returns the value that is stored now."""
        old, new = (v.encode() if isinstance(v, str) else bytes(v) for v in (expected, desired))
        return self._query(
            "compare_set", key=key, expected=old.decode("latin-1"), desired=new.decode("latin-1")
        ).encode("latin-1")

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return self._query("check", keys=list(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        self._query("wait", timeout=timeout, keys=list(keys))

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._query("delete", key=key)

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return self._query("count")

    deleteKey, getNumKeys = delete_key, num_keys  # what C++ calls them

    def clone(self) -> ChannelStore:
        """Itself: a second connection would be to the same socket."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """For `get`, and for `wait` without its own time."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long `get` waits."""
        return self._timeout
