"""Ports for tests that start ranks as an outer launcher does."""

import atexit
import socket
from collections import deque

from pytest_nsa.system.sockets import hold_ports

MOST = 64
_held: deque[socket.socket] = deque()


def free_port() -> int:
    """Return a TCP port of the loopback interface that no process listens on now.

    The kernel gives it to no process that asks for any port: a store of torch's listens on it seconds later, beside other tests.
    """
    (holder,) = hold_ports(1)
    _held.append(holder)
    if len(_held) > MOST:
        _held.popleft().close()
    port: int = holder.getsockname()[1]
    return port


@atexit.register
def _let_go() -> None:
    for holder in _held:
        holder.close()
