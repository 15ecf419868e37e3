"""The network addresses of this machine: where a driver can be reached, and by what interface."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def own_addresses() -> tuple[str, ...]:
    """IPv4 and IPv6 addresses of this machine, the likeliest first; loopback if there is no other.

    Of an interface, the first IPv4 address; none that hold on one link only.
    """
    here = (address for address, _ in _addresses())
    found = [str(one) for one in here if not (one.is_loopback or one.is_link_local)]
    default = _towards_others()
    return tuple(sorted(found or ["127.0.0.1"], key=lambda address: address != default))


def interface_of(host: str) -> str:
    """Name of the network interface that has this address, or ""."""
    wanted = ipaddress.ip_address(host)
    found = (name for address, name in _addresses() if address == wanted)
    return "lo" if wanted.is_loopback else next(found, "")


def _addresses() -> list[tuple[_Address, str]]:
    """Addresses of this machine, each with its interface."""
    found: list[tuple[_Address, str]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                asked = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, asked)
                found.append((ipaddress.IPv4Address(answer[20:24]), name))
    with contextlib.suppress(OSError):  # no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            fields = line.split()
            found.append((ipaddress.IPv6Address(bytes.fromhex(fields[0])), fields[5]))
    return found


def _towards_others() -> str:
    """The address that packets to the world would have; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with contextlib.suppress(OSError):
            sock.connect(("192.0.2.1", 9))
        return str(sock.getsockname()[0])
