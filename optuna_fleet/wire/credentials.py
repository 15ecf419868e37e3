"""Who belongs to a sweep: whoever has its throw-away certificate and key.

Both ends of every connection show this certificate, and take no other: mutual TLS 1.3.
"""

from __future__ import annotations

import datetime
import os
import ssl
from functools import lru_cache


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
