"""Who belongs to a sweep: whoever has its throw-away certificate and key, by an invitation.

Both ends of every connection show this certificate, and take no other: mutual TLS 1.3. Also the
network addresses of this machine, where its driver can be reached.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import fcntl
import ipaddress
import os
import socket
import ssl
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.files import replacing

_JOIN = "OPTUNA_FLEET_JOIN"
_TOKEN = "OPTUNA_FLEET_TOKEN"
_SIOCGIFADDR = 0x8915
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Where a driver listens, and what opens it.

    Attributes:
        addresses: Host and port, in the order in which they are to be tried.
        credentials: What both ends of a connection show: a certificate and its key, as PEM.
    """

    addresses: tuple[tuple[str, int], ...]
    credentials: bytes = field(repr=False)

    @property
    def token(self) -> str:
        """The credentials as one word: never for a command line."""
        return base64.urlsafe_b64encode(self.credentials).decode()

    def environment(self) -> dict[str, str]:
        """The variables with which ``optuna-fleet agent`` joins this driver."""
        addresses = ",".join(join_address(*address) for address in self.addresses)
        return {_JOIN: addresses, _TOKEN: self.token}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], join: str = "") -> Invitation:
        """The invitation that `environment` made, with the addresses of `join` if it has any.

        Raises:
            FleetConfigError: A variable is missing or damaged.
        """
        addresses = join or environment.get(_JOIN, "")
        if not addresses:
            raise FleetConfigError(
                f"Which driver to join? Give `--join HOST:PORT`, or set {_JOIN} to it."
            )
        return cls.of(addresses, environment.get(_TOKEN, ""))

    def write(self, file: Path) -> None:
        """Write it to a file that only its owner may read."""
        addresses = ",".join(join_address(*address) for address in self.addresses)
        try:
            with replacing(file) as written:
                written.write(f"{addresses}\n{self.token}\n".encode())
        except OSError as error:
            raise FleetConfigError(
                f"The invitation can't be written to {file}: {error.strerror}."
            ) from error

    @classmethod
    def read(cls, file: Path) -> Invitation:
        """The invitation that `write` has written.

        Raises:
            FleetConfigError: There is none in this file.
        """
        try:
            addresses, token = file.read_text(encoding="ascii").split()
        except (OSError, ValueError) as error:
            raise FleetConfigError(f"{file} is no invitation of a driver: {error}.") from error
        return cls.of(addresses, token)

    @classmethod
    def of(cls, addresses: str, token: str) -> Invitation:
        """The invitation of these addresses ("host:port,host:port") and this token."""
        try:
            credentials = base64.urlsafe_b64decode(token.strip())
            tls_context(credentials, is_server=False)
        except (ValueError, ssl.SSLError):
            raise FleetConfigError(
                f"The token of the driver is {'missing' if not token else 'damaged'}: set "
                f"{_TOKEN} to the one that the driver has shown or written to its file."
            ) from None
        return cls(
            addresses=tuple(split_address(address) for address in addresses.split(",")),
            credentials=credentials,
        )


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[IPv6]:port``.

    Raises:
        FleetConfigError: It is none.
    """
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not _is_name(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise FleetConfigError(
            f"{text.strip()!r} is no address of a driver: give HOST:PORT, as in 10.0.0.5:7077."
        )
    return host, int(port)


def _is_name(host: str) -> bool:
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


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


def make_credentials() -> bytes:
    """Make a certificate, which nobody signed but itself, and its key, as PEM."""
    from cryptography import x509  # takes a while, and only the driver needs it
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "optuna-fleet")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))  # the clocks of nodes may be wrong
        .not_valid_after(datetime.datetime(9999, 1, 1))
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


@lru_cache(maxsize=8)
def tls_context(credentials: bytes, *, is_server: bool) -> ssl.SSLContext:
    """With which one end of a connection shows the credentials, and checks the other's.

    Raises:
        ssl.SSLError: They are damaged.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate says whose it is
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        context.num_tickets = 0  # nobody comes back with one
    context.load_verify_locations(cadata=credentials.decode("ascii"))
    with os.fdopen(os.memfd_create("credentials"), "wb") as file:  # `ssl` wants a file
        file.write(credentials)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
