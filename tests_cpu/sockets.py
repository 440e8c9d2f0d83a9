"""Ports for tests that start ranks as an outer launcher does."""

from __future__ import annotations

import socket
from collections import deque

from pytest_nsa.system.tcp import hold_ports

_held: deque[socket.socket] = deque(maxlen=64)


def free_port() -> int:
    """Return a TCP port of the loopback interface that no process listens on now.

    The kernel gives it to no process that asks for any port: a store of torch's listens on it seconds later, beside other tests.
    """
    (holder,) = hold_ports(1)
    _held.append(holder)
    port: int = holder.getsockname()[1]
    return port
