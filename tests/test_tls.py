"""The control channel: who is in between reads nothing, and can only break it; addresses."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.exceptions import FleetConfigError, ProtocolError
from optuna_fleet.executor.fleet.connections import Connections
from optuna_fleet.wire import addresses
from optuna_fleet.wire import channel as channels
from optuna_fleet.wire.channel import connect
from optuna_fleet.wire.invitation import Invitation, make_credentials
from tests.test_channel import OTHERS, PATIENCE_S, Welcomed

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
        self.change = change or (lambda direction, before, data: (data, True))
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
                changed, goes_on = self.change(direction, len(self.heard[direction]), data)
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


@pytest.fixture
def welcomed() -> Iterator[Welcomed]:
    made = Welcomed()
    yield made
    made.close()


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


def test_a_capture_holds_no_message(welcomed: Welcomed) -> None:
    messages = (MARK, {"value": MARK * 5000}, [MARK])
    capture = said(welcomed, *messages)
    assert len(capture) > 2 * 5000 * len(MARK)
    assert MARK not in capture


def flip_at(direction: int, place: int, bits: int) -> Change:
    """Alter the byte at this place; and hang up, for who waits for more would wait on."""

    def change(way: int, before: int, data: bytes) -> tuple[bytes, bool]:
        is_last = way == direction and before <= place < before + len(data)
        if is_last:
            at = place - before
            data = data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]
        return data, not is_last

    return change


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


@settings(max_examples=30)
@given(place=st.integers(0, 1000), bits=st.integers(1, 255))
def test_what_is_altered_is_never_heard(place: int, bits: int) -> None:
    """Neither in the handshake nor after it; what came before it is."""
    welcomed = Welcomed()
    heard = heard_through(welcomed, flip_at(TO_SERVER, place, bits))
    assert heard == list(range(len(heard)))
    welcomed.close()


@pytest.mark.parametrize("place", [5, 40, 145])
def test_a_record_that_was_altered_cuts_the_connection(place: int) -> None:
    """Counted from the first byte of the second message."""
    welcomed = Welcomed()
    with contextlib.closing(Relay(welcomed.address)) as relay:
        mine = connect(through(relay, welcomed))
        theirs = welcomed.channels.get(timeout=PATIENCE_S)
        with contextlib.closing(mine), contextlib.closing(theirs):
            mine.send("first")
            assert theirs.receive() == "first"
            relay.change = flip_at(TO_SERVER, len(relay.heard[TO_SERVER]) + place, 1)
            mine.send("x" * 150)
            with pytest.raises(ConnectionAbortedError, match="tampered"):
                theirs.receive()
    welcomed.close()


# -- addresses ------------------------------------------------------------------------------------


def test_addresses_are_tried_in_their_order(welcomed: Welcomed) -> None:
    other = Welcomed(OTHERS)
    with closed_port() as refusing:
        tried = (refusing, other.address, welcomed.address)
        mine = connect(replace(welcomed.invitation, addresses=tried))
    welcomed.channels.get(timeout=PATIENCE_S).close()
    mine.close()
    other.close()


def test_the_error_names_every_address_and_what_it_said() -> None:
    welcomed = Welcomed()
    with closed_port() as refusing:
        addresses = (refusing, welcomed.address)
        invitation = Invitation(addresses=addresses, credentials=OTHERS)
        with pytest.raises(ProtocolError) as raised:
            connect(invitation)
        text = str(raised.value)
        assert f"127.0.0.1:{refusing[1]}: Connection refused" in text
        assert f"127.0.0.1:{welcomed.address[1]}: its certificate is not the one" in text
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


def test_own_addresses_are_of_this_machine_and_of_no_loopback() -> None:
    found = addresses.own_addresses()
    assert found
    assert found == ("127.0.0.1",) or not any(
        ipaddress.ip_address(one).is_loopback for one in found
    )
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


def test_an_address_of_this_machine_has_its_interface() -> None:
    assert addresses.interface_of("127.0.0.1") == "lo"
    assert addresses.interface_of("203.0.113.7") == ""
    names = {name for _, name in socket.if_nameindex()}
    assert {addresses.interface_of(address) for address in addresses.own_addresses()} <= names


def test_the_key_is_in_no_file_and_no_repr() -> None:
    files = set(os.listdir("/proc/self/fd"))
    invitation = Invitation(addresses=(), credentials=make_credentials())
    assert set(os.listdir("/proc/self/fd")) <= files
    assert "PRIVATE" not in repr(invitation)
    assert invitation.credentials != make_credentials()
