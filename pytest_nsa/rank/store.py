"""The store through which the ranks of a worker group meet: the zygote keeps it, each rank reaches it by a socket pair.

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
    """The rank's side of the store, as torch's C++ calls it. It sends one request at a time, which suits gloo: only its main thread
    sends requests.

    Raises DistStoreError if a key is not set in time or the zygote has ended.
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
                    if reply.get("id") == self._count:  # an older reply belongs to a request that timed out
                        return reply["value"]
                if not replies and not self._control.closed:
                    raise dist.DistStoreError(f"store {call}: timed out waiting for {arguments}")
        raise dist.DistStoreError(f"store {call}: the process that started this rank has gone")

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._query("set", key=key, value=data.decode("latin-1"))

    def get(self, key: str) -> bytes:
        """Wait for the value and return it."""
        return self._query("get", key=key).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to a counter; return the new value."""
        return self._query("add", key=key, amount=amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store ``desired`` if the value is ``expected``; return the stored value."""
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
        """Remove a key; return whether it existed."""
        return self._query("delete", key=key)

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return self._query("count")

    deleteKey, getNumKeys = delete_key, num_keys  # what C++ calls them

    def clone(self) -> ChannelStore:
        """Return this store: a second connection would use the same socket."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get`, and `wait` without its own time, wait."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long `get` waits."""
        return self._timeout
