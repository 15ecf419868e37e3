"""Ports for servers that have to be told theirs, and that may start again on it."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(number: int) -> list[int]:
    """Unlike ports below those that the kernel gives to any connection, at any moment."""
    end = int(_RANGE.read_text().split()[0])
    found: set[int] = set()
    while len(found) < number:
        port = _FIRST + secrets.randbelow(end - _FIRST)
        with socket.socket() as sock, contextlib.suppress(OSError):  # it is taken
            sock.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)
