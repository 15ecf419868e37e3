"""The control channel beyond loopback: who is in between reads nothing, and can only break it."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.exceptions import FleetConfigError, ProtocolError
from optuna_fleet.executor.fleet import addresses
from optuna_fleet.executor.fleet.connections import Connections
from optuna_fleet.wire import channel as channels
from optuna_fleet.wire import tls
from optuna_fleet.wire.channel import HELLO, TLS_ONLY, Channel, connect
from optuna_fleet.wire.invitation import Invitation
from optuna_fleet.wire.tls import TlsSocket, make_certificate
from tests.test_channel import PATIENCE_S, Welcomed, stranger

CERTIFICATE = make_certificate()
MARK = b"the objective, in the clear"
TO_SERVER, TO_CLIENT = 0, 1
Change = Callable[[int, int, bytes], tuple[bytes, bool]]


class Relay:
    """Stands between clients and a listener; hears all, and may change it.

    `change` gets the direction, the number of bytes that came from there before, and the bytes; it
    returns what goes on, and whether anything comes after it.
    """

    def __init__(self, address: tuple[str, int], change: Change | None = None) -> None:
        self.heard = (bytearray(), bytearray())
        self._address = address
        self._change = change or (lambda direction, before, data: (data, True))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(self._address)
                self._open += [client, server]
                for direction, ends in enumerate([(client, server), (server, client)]):
                    thread = threading.Thread(target=self._pump, args=(direction, *ends))
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, direction: int, come: socket.socket, go: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := come.recv(1 << 16):
                changed, goes_on = self._change(direction, len(self.heard[direction]), data)
                self.heard[direction].extend(data)
                go.sendall(changed)
                if not goes_on:
                    break
        for sock in (come, go):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        for sock in (self._server, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._server, *self._open):
            sock.close()


@pytest.fixture(scope="module")
def secured() -> Iterator[Welcomed]:
    made = Welcomed(make_certificate())
    yield made
    made.close()


def test_short_messages_of_the_handshake_do_not_wait(
    secured: Welcomed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one would wait for 40 ms until the first is acknowledged."""
    seen, init = [], TlsSocket.__init__

    def noting(self: TlsSocket, sock: socket.socket, context: ssl.SSLContext) -> None:
        seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        init(self, sock, context)

    monkeypatch.setattr(TlsSocket, "__init__", noting)
    for channel in secured.pair():
        channel.close()
    assert seen == [1, 1]


def through(relay: Relay, welcomed: Welcomed) -> Invitation:
    return replace(welcomed.invitation, addresses=(relay.address,))


def said(welcomed: Welcomed, *messages: Any) -> bytes:
    """All that passes the network when these are sent, one way and back."""
    with contextlib.closing(Relay(welcomed.address)) as relay:
        mine = connect(through(relay, welcomed))
        theirs = welcomed.channels.get(timeout=PATIENCE_S)
        with contextlib.closing(mine), contextlib.closing(theirs):
            for message in messages:
                mine.send(message)
                assert theirs.receive() == message
                theirs.send(message)
                assert mine.receive() == message
        return bytes(relay.heard[TO_SERVER] + relay.heard[TO_CLIENT])


def test_a_capture_holds_no_message(secured: Welcomed) -> None:
    messages = (MARK, {"value": MARK * 5000}, [MARK])
    capture = said(secured, *messages)
    assert len(capture) > 2 * 5000 * len(MARK)
    assert MARK not in capture
    for secret in (b"s" * 32, secured.invitation.fingerprint, b"optuna-fleet 2"):
        assert secret not in capture
    plain = Welcomed()
    assert MARK in said(plain, *messages)  # it would have been seen
    plain.close()


def test_a_driver_with_another_certificate_is_refused(secured: Welcomed) -> None:
    """Who is in between has one of its own; it gets no proof that it could pass on."""
    other = make_certificate().fingerprint
    with pytest.raises(ProtocolError, match="somebody is in between"):
        connect(replace(secured.invitation, fingerprint=other))
    assert "A stranger was refused" in secured.lines.get(timeout=PATIENCE_S)
    assert secured.works()


def test_a_client_without_tls_is_told_so(secured: Welcomed) -> None:
    with pytest.raises(ProtocolError, match="wants TLS"):
        connect(replace(secured.invitation, fingerprint=None))
    assert secured.works()


def test_a_listener_without_tls_is_refused() -> None:
    welcomed = Welcomed()
    with pytest.raises(ProtocolError, match=r"does not speak TLS 1\.3"):
        connect(replace(welcomed.invitation, fingerprint=bytes(32)))
    assert welcomed.works()
    welcomed.close()


def test_an_older_tls_is_refused(secured: Welcomed) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with stranger(secured.address) as sock, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(sock)
    assert secured.works()


def test_a_handshake_may_come_in_pieces(secured: Welcomed) -> None:
    with TlsSocket(stranger(secured.address), tls._client_context()) as mine:
        with pytest.raises(ssl.SSLWantReadError):
            mine._tls.do_handshake()
        hello = mine._to_send.read()
        for piece in (hello[:3], hello[3:10], hello[10:]):
            assert secured.works()  # the listener has had the time to read what came before
            socket.socket.sendall(mine, piece)
        while not mine.has_shaken_hands:
            mine.shake_hands()
        assert mine.recv(len(HELLO)) == HELLO


def test_a_handshake_without_end_is_refused_before_it_takes_memory() -> None:
    """The beginning of a ClientHello that is as long as OpenSSL takes one."""
    secured = Welcomed(CERTIFICATE)
    fragment = struct.pack("!BHH", 22, 0x0301, 1 << 14)
    with stranger(secured.address) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(fragment + struct.pack("!BxH", 1, 65_000) + bytes((1 << 14) - 4))
        sock.sendall(fragment + bytes(1 << 14))
        assert sock.recv(1 << 10) == TLS_ONLY
    assert "does not speak TLS" in secured.lines.get(timeout=PATIENCE_S)
    assert secured.works()
    secured.close()


def cut_at(direction: int, place: int) -> Change:
    """Hang up before the byte at this place."""

    def change(way: int, before: int, data: bytes) -> tuple[bytes, bool]:
        is_last = way == direction and before + len(data) > place
        return (data[: place - before] if is_last else data), not is_last

    return change


def flip_at(direction: int, place: int, bits: int) -> Change:
    """Alter the byte at this place; and hang up, for who waits for more would wait on."""

    def change(way: int, before: int, data: bytes) -> tuple[bytes, bool]:
        is_last = way == direction and before <= place < before + len(data)
        if is_last:
            at = place - before
            data = data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]
        return data, not is_last

    return change


@settings(max_examples=25)
@given(data=st.data())
def test_a_handshake_that_is_cut_off_ends_on_both_sides(data: st.DataObject) -> None:
    direction = data.draw(st.sampled_from([TO_SERVER, TO_CLIENT]))
    place = data.draw(st.integers(0, 300))
    welcomed = Welcomed(CERTIFICATE)
    relay = Relay(welcomed.address, cut_at(direction, place))
    with contextlib.closing(relay), pytest.raises((OSError, ProtocolError)):
        channels._enter(*relay.address, through(relay, welcomed))
    assert welcomed.works()
    welcomed.close()


def heard_through(welcomed: Welcomed, change: Change) -> list[Any]:
    """What the listener's end hears of three messages that went through a relay."""
    heard: list[Any] = []
    relay = Relay(welcomed.address, change)
    with contextlib.closing(relay), contextlib.suppress(OSError, EOFError, ProtocolError):
        with contextlib.closing(channels._enter(*relay.address, through(relay, welcomed))) as mine:
            for number in range(3):
                mine.send(number)
        with contextlib.closing(welcomed.channels.get(timeout=PATIENCE_S)) as theirs:
            while True:
                heard.append(theirs.receive())
    return heard


@settings(max_examples=50)
@given(place=st.integers(0, 1000), bits=st.integers(1, 255))
def test_what_is_altered_is_never_heard(place: int, bits: int) -> None:
    """Neither in the handshake nor after it; what came before it is."""
    welcomed = Welcomed(CERTIFICATE)
    heard = heard_through(welcomed, flip_at(TO_SERVER, place, bits))
    assert heard == list(range(len(heard)))
    welcomed.close()


@pytest.mark.parametrize("back", range(1, 150, 7))
def test_a_record_that_was_altered_cuts_the_connection(back: int) -> None:
    """Counted from the last byte of the second message."""
    welcomed = Welcomed(CERTIFICATE)
    with contextlib.closing(Relay(welcomed.address)) as relay:
        mine = connect(through(relay, welcomed))
        theirs = welcomed.channels.get(timeout=PATIENCE_S)
        with contextlib.closing(mine), contextlib.closing(theirs):
            mine.send("first")
            assert theirs.receive() == "first"
            record = sealed(mine, "x" * 150)
            raw = socket.socket(fileno=os.dup(mine.fileno()))
            with raw:
                raw.sendall(
                    record[:-back] + bytes([record[-back] ^ 1]) + record[len(record) - back + 1 :]
                )
            with pytest.raises(ConnectionAbortedError, match="tampered"):
                theirs.receive()
    welcomed.close()


def sealed(channel: Channel, message: Any) -> bytes:
    """The records of a message, which is not sent."""
    frame = b"".join(channel._frame(pickle.dumps(message)))
    channel._sock._tls.write(frame)  # type: ignore[attr-defined]
    return channel._sock._to_send.read()  # type: ignore[attr-defined, no-any-return]


# -- who waits for readability --------------------------------------------------------------------


def test_no_message_is_left_in_memory(secured: Welcomed) -> None:
    """However many arrive at once: as long as one is there, `select` says so."""
    mine, theirs = secured.pair()
    with contextlib.closing(mine), contextlib.closing(theirs):
        messages = [0, b"x" * 40_000, *range(50), b"y" * (1 << 14), None]
        with socket.socket(fileno=os.dup(mine.fileno())) as raw:
            raw.sendall(b"".join(sealed(mine, message) for message in messages))
        for message in messages:
            assert select.select([theirs], [], [], PATIENCE_S)[0]
            assert theirs.has_message()
            assert theirs.receive() == message
        assert not theirs.has_message()


def test_half_a_record_does_not_hold_up_the_connections() -> None:
    connections = Connections(host=None)
    assert connections.invitation.fingerprint
    one, other = (connect(connections.invitation) for _ in range(2))
    record = sealed(one, "of one")
    with socket.socket(fileno=os.dup(one.fileno())) as raw:
        for part in (record[:3], record[3:20]):
            raw.sendall(part)
            other.send("of the other")
            got: list[Any] = []
            while not got:
                got = list(connections.messages(PATIENCE_S))
            assert got == ["of the other"]
        raw.sendall(record[20:])
        while not (got := list(connections.messages(PATIENCE_S))):
            pass
        assert got == ["of one"]
    for end in (one, other, connections):
        end.close()


# -- several threads ------------------------------------------------------------------------------


@pytest.fixture(params=["plain", "TLS"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    welcomed = Welcomed(CERTIFICATE if request.param == "TLS" else None)
    mine, theirs = welcomed.pair()
    yield mine, theirs
    mine.close()
    theirs.close()
    welcomed.close()


def test_threads_that_send_at_once_do_not_mix(pair: tuple[Channel, Channel]) -> None:
    """Each message is whole, and each thread's are in its order."""
    mine, theirs = pair
    size, number = 3000, 300

    def sender(name: int) -> None:
        for n in range(number):
            (mine.send, mine.post)[(n + name) % 2]((name, n, b"x" * size))
        mine.send((name, number, b""))

    threads = [threading.Thread(target=sender, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    heard: dict[int, int] = dict.fromkeys(range(4), -1)
    while any(n < number for n in heard.values()):
        name, n, _ = theirs.receive()
        assert n == heard[name] + 1
        heard[name] = n
    for thread in threads:
        thread.join()
    assert not mine.has_unsent


def test_a_thread_that_waits_for_the_peer_holds_up_no_other(pair: tuple[Channel, Channel]) -> None:
    mine, theirs = pair
    large = os.urandom(30 << 20)
    thread = threading.Thread(target=mine.send, args=(large,))
    thread.start()
    while not mine.has_unsent:
        pass
    mine.post("a sign of life")  # the peer reads nothing yet
    mine.flush()
    theirs.post("back")
    assert mine.receive() == "back"
    assert theirs.receive() == large
    assert theirs.receive() == "a sign of life"
    thread.join()


# -- addresses ------------------------------------------------------------------------------------


def test_addresses_are_tried_in_their_order(secured: Welcomed) -> None:
    other = Welcomed()
    with closed_port() as refusing:
        tried = (refusing, other.address, secured.address)
        mine = connect(replace(secured.invitation, addresses=tried))
    secured.channels.get(timeout=PATIENCE_S).close()
    mine.close()
    other.close()


def test_the_error_names_every_address_and_what_it_said() -> None:
    welcomed = Welcomed()
    with closed_port() as refusing:
        invitation = replace(
            welcomed.invitation, addresses=(refusing, welcomed.address), secret=b"x" * 32
        )
        with pytest.raises(ProtocolError) as raised:
            connect(invitation)
        text = str(raised.value)
        assert f"127.0.0.1:{refusing[1]}: Connection refused" in text
        assert f"127.0.0.1:{welcomed.address[1]}: it does not know the same secret" in text
        with pytest.raises(ConnectionRefusedError, match="Does it run"):
            connect(replace(invitation, addresses=(refusing,)))
    welcomed.close()


@contextlib.contextmanager
def closed_port() -> Iterator[tuple[str, int]]:
    """An address where nobody listens, nor can meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()


def test_who_listens_on_all_is_reached_at_each_address() -> None:
    connections = Connections(host=None)
    port = connections.port
    assert {chosen for _, chosen in connections.invitation.addresses} == {port}
    for address in (*connections.invitation.addresses, ("127.0.0.1", port)):
        connect(replace(connections.invitation, addresses=(address,))).close()
    connections.close()


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), (None, False)],
)
def test_beyond_loopback_there_is_tls(host: str | None, is_local: bool) -> None:
    try:
        connections = Connections(host)
    except FleetConfigError:
        pytest.skip("no IPv6 here")
    assert (connections.invitation.fingerprint is None) == is_local
    if host is not None and is_local:
        assert connections.invitation.addresses == ((host, connections.port),)
    connect(connections.invitation).close()
    connections.close()


def test_own_addresses_are_of_this_machine_and_of_no_loopback() -> None:
    found = addresses.own_addresses()
    assert found
    assert found == ("127.0.0.1",) or not any(map(addresses.is_loopback, found))
    for address in found:
        socket.create_server((address, 0), family=socket.getaddrinfo(address, 0)[0][0]).close()


def test_a_port_that_is_taken_is_an_error_that_says_so() -> None:
    files = set(os.listdir("/proc/self/fd"))
    with contextlib.closing(Connections()) as first, pytest.raises(FleetConfigError) as raised:
        Connections(port=first.port)
    assert f"can't listen on 127.0.0.1:{first.port}" in str(raised.value)
    with pytest.raises(FleetConfigError, match=r"can't listen on no\.such\.host\.invalid"):
        Connections("no.such.host.invalid")
    assert set(os.listdir("/proc/self/fd")) <= files


def test_the_key_is_in_no_file_and_no_repr() -> None:
    files = set(os.listdir("/proc/self/fd"))
    certificate = make_certificate()
    assert set(os.listdir("/proc/self/fd")) <= files
    assert "context" not in repr(certificate)
    assert certificate.fingerprint != make_certificate().fingerprint


def test_an_address_of_this_machine_has_its_interface() -> None:
    assert addresses.interface_of("127.0.0.1") == "lo"
    assert addresses.interface_of("203.0.113.7") == ""
    names = {name for _, name in socket.if_nameindex()}
    assert {addresses.interface_of(address) for address in addresses.own_addresses()} <= names
