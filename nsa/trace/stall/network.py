"""Find, by the exception of a group that does not form, an interface, an address or a port that cannot be used here."""

import os
import re
import socket

_INTERFACE = re.compile(r"unable to find (?:interface|address) for:? \[?(?P<name>[^\]\s]+)", re.IGNORECASE)
_PORT = re.compile(
    r"failed to (?:listen|bind).*?\bport: (?P<port>\d+).*?(?:EADDRINUSE|address already in use)",
    re.IGNORECASE | re.DOTALL,
)
_CONNECTS = re.compile(r"connect(?:ing)? to \((?P<host>[^,\s]+), (?P<port>\d+)\)")
_LOOPBACK = ("127.", "::1", "localhost")


def unusable_network(message: str) -> str:
    """Return which part of the network cannot be used, and what to do, by torch's or gloo's message; '' for another message.

    Queries the system whether a host's name resolves, and which interfaces exist.
    """
    found = _INTERFACE.search(message)
    if found is not None:
        return _interface(found["name"])
    found = _PORT.search(message)
    if found is not None:
        return f"port {found['port']} is in use by another process; take another one (MASTER_PORT), or 0 for any that is free"
    found = _CONNECTS.search(message)
    return unresolved(found["host"]) if found is not None else ""


def _interface(name: str) -> str:
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if name in wanted.split(","):
        there = ", ".join(name for _, name in socket.if_nameindex())
        return f"GLOO_SOCKET_IFNAME={wanted} names no interface with an address on this machine, which has {there}"
    if name.startswith(_LOOPBACK):
        return f"no network interface has the address {name}: the loopback interface is down (ip link set lo up)"
    return f"no network interface has the address {name}: set GLOO_SOCKET_IFNAME to the name of one that is up"


def unresolved(name: str) -> str:
    """Return an error message if a host's name resolves to no address; '' if it does."""
    try:
        socket.getaddrinfo(name, None)
    except socket.gaierror as error:
        return f"the host name {name} resolves to no address here ({error.strerror}); correct MASTER_ADDR, or give an address"
    except OSError:
        return ""
    return ""
