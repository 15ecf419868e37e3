"""The control channel: strangers, who is in between, and trainers that die at a bad moment."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import pickle
import queue
import resource
import select
import socket
import ssl
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optuna_fleet.exceptions import FleetConfigError, LaunchError, ProtocolError
from optuna_fleet.executor.cluster.config import machine, versions
from optuna_fleet.executor.fleet.connections import AgentUnheard, Connections
from optuna_fleet.resources import Device
from optuna_fleet.wire import channel as channels
from optuna_fleet.wire import invitation as invitations
from optuna_fleet.wire import listener as listeners
from optuna_fleet.wire.channel import HELLO, Channel, connect
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation, make_credentials, tls_context
from optuna_fleet.wire.listener import Listener
from optuna_fleet.wire.messages import TrainerReady
from optuna_fleet.wire.node_messages import (
    AgentJoining,
    ProcessId,
    SignOfLife,
    TrainerExited,
    TrainerStarted,
)

CREDENTIALS, OTHERS = make_credentials(), make_credentials()
PATIENCE_S = 240.0

AGENT = "5"


def ready(pid: int) -> TrainerReady:
    return TrainerReady(device=0, process=ProcessId(AGENT, pid))


def exited(pid: int = 7) -> TrainerExited:
    return TrainerExited(device=0, process=ProcessId(AGENT, pid), cause="signal SIGKILL")


def joining() -> AgentJoining:
    return AgentJoining(
        agent=AGENT,
        node="here",
        devices=(Device(index=0, node=0, kind="cpu"),),
        cores=1,
        machine=machine(),
        pid=5,
        versions=versions(),
    )


class Welcomed:
    """A listener, the channels it let in, and what it said about those it did not."""

    def __init__(self, credentials: bytes = CREDENTIALS) -> None:
        self.channels: queue.Queue[Channel] = queue.Queue()
        self.lines: queue.Queue[str] = queue.Queue()
        self._inbox = Inbox()
        self.listener = Listener(
            *(self._inbox, "127.0.0.1", credentials, self.channels.put, self.lines.put)
        )
        self._thread = threading.Thread(target=self._inbox.get)
        self._thread.start()
        self.address = (self.listener.host, self.listener.port)
        self.invitation = Invitation(addresses=(self.address,), credentials=credentials)

    def close(self) -> None:
        self._inbox.put("the end")
        self._thread.join()
        self._inbox.close()
        self.listener.close()
        while not self.channels.empty():  # let in, and gone before it heard of it
            self.channels.get().close()

    def works(self) -> bool:
        """A client that has the certificate gets in, and is the first who did."""
        mine, theirs = self.pair()
        mine.send({"a": 1})
        same = theirs.receive() == {"a": 1}
        mine.close()
        theirs.close()
        return same and self.channels.empty()

    def pair(self) -> tuple[Channel, Channel]:
        mine = connect(self.invitation)
        return mine, self.channels.get(timeout=PATIENCE_S)


@pytest.fixture
def welcomed() -> Iterator[Welcomed]:
    made = Welcomed()
    yield made
    made.close()


def stranger(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=PATIENCE_S)


def hangs_up(sock: socket.socket) -> bool:
    """The other end hangs up without being told to, whatever it says before that."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def tls_pair() -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Two connected sockets of one sweep."""
    mine, theirs = tls_ends(*socket.socketpair())
    shake_hands(mine, theirs)
    return mine, theirs


def tls_ends(*socks: socket.socket) -> list[ssl.SSLSocket]:
    """A client's end of a connection and a server's, of one sweep, before the handshake."""
    for sock in socks:
        sock.setblocking(False)
    return [
        tls_context(CREDENTIALS, is_server=is_server).wrap_socket(
            sock, server_side=is_server, do_handshake_on_connect=False
        )
        for sock, is_server in zip(socks, (False, True), strict=True)
    ]


def shake_hands(*ends: ssl.SSLSocket, between: Callable[[], None] = lambda: None) -> None:
    for end in ends * 2:
        between()
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()


def test_who_waits_for_a_machine_that_has_vanished_is_told_in_five_minutes(
    welcomed: Welcomed,
) -> None:
    ends = welcomed.pair()
    mine, theirs = (socket.socket(fileno=os.dup(end.fileno())) for end in ends)
    with mine, theirs:
        for sock in (mine, theirs):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert mine.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle_s, every_s, number = (mine.getsockopt(socket.IPPROTO_TCP, one) for one in options)
    assert idle_s + number * every_s == 300
    for end in ends:
        end.close()


def trusting(credentials: bytes | None) -> ssl.SSLContext:
    """A client that takes any driver, with a certificate of its own or without one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if credentials is not None:
        context = tls_context.__wrapped__(credentials, is_server=False)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize("credentials", [None, OTHERS], ids=["none", "another"])
def test_a_listener_says_nothing_to_a_client_without_the_certificate(
    welcomed: Welcomed, credentials: bytes | None, tmp_path: Path
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    with trusting(credentials).wrap_socket(stranger(welcomed.address)) as sock:
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            sock.sendall(struct.pack("!Q", len(bomb)) + bomb)
        heard = b""
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            heard = sock.recv(len(HELLO))
        assert not heard
    assert "does not have this sweep's cert" in welcomed.lines.get(timeout=PATIENCE_S)
    assert welcomed.works()
    assert not list(tmp_path.iterdir())


def test_an_older_tls_is_refused(welcomed: Welcomed) -> None:
    context = trusting(None)
    context.load_verify_locations(cadata=CREDENTIALS.decode())
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with stranger(welcomed.address) as sock, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(sock)
    assert welcomed.works()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [(b"", "can't be joined"), (b"220 smtp.example.org\r\n", r"does not speak TLS 1\.3")],
)
def test_a_client_refuses_what_is_no_driver(
    words: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_LIMIT_S", 0.5)

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as sock:
                    sock.sendall(words)
                    assert not words or hangs_up(sock)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises((ProtocolError, ConnectionError), match=complaint):
            connect(Invitation(addresses=(server.getsockname(),), credentials=CREDENTIALS))
        server.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)


GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    HELLO,
    struct.pack("!BHHI", 22, 0x0301, 1 << 14, 0x01FFFFFF) + bytes(1 << 14),  # endless handshake
    struct.pack("!Q", 1 << 62) + bytes(16),
    bytes(1 << 20),
)


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_bytes_get_in(welcomed: Welcomed, data: st.DataObject) -> None:
    """Of any length, in any pieces, as noise or as a proper beginning that was altered."""
    words = data.draw(st.one_of(st.binary(max_size=300), st.sampled_from(GARBAGE)))
    if data.draw(st.booleans()):
        hello = bytearray(client_hello())
        hello[data.draw(st.integers(0, len(hello) - 1))] ^= data.draw(st.integers(1, 255))
        words = bytes(hello) + words
    cuts = sorted(data.draw(st.sets(st.integers(0, len(words)), max_size=5)))
    with stranger(welcomed.address) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            for begin, end in itertools.pairwise([0, *cuts, len(words)]):
                sock.sendall(words[begin:end])
            sock.shutdown(socket.SHUT_WR)
        assert hangs_up(sock)
    assert welcomed.channels.empty()


def client_hello() -> bytes:
    """What a client of this sweep says first."""
    sent = ssl.MemoryBIO()
    tls = tls_context(CREDENTIALS, is_server=False).wrap_bio(ssl.MemoryBIO(), sent)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return sent.read()


def test_strangers_keep_nobody_out_and_take_no_memory_and_no_thread(welcomed: Welcomed) -> None:
    """More than are waited for at a time; and those who wait longest go first."""
    assert welcomed.works()
    threads = threading.active_count()
    tracemalloc.start()
    with contextlib.ExitStack() as open_ones:
        crowd = [open_ones.enter_context(stranger(welcomed.address)) for _ in range(300)]
        for sock, prefix in zip(crowd[-30:], GARBAGE[1:4] * 10, strict=True):
            with contextlib.suppress(OSError):
                sock.sendall(prefix + bytes(1 << 18))
        crowd[-31].sendall(client_hello()[:3])
        assert hangs_up(crowd[0])
        assert welcomed.works()
        assert threading.active_count() <= threads
        assert len(welcomed.listener._applicants) <= 128
        assert len(welcomed._inbox._times) < 100  # none for each stranger
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20


def test_of_a_crowd_that_comes_at_once_none_is_refused(
    welcomed: Welcomed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a large fleet starts: who finds no place waits for one."""
    monkeypatch.setattr(listeners, "HANDSHAKE_LIMIT_S", 1000.0)
    monkeypatch.setattr(listeners, "_TURN_S", 1000.0)
    with contextlib.ExitStack() as open_ones:
        crowd = [open_ones.enter_context(stranger(welcomed.address)) for _ in range(300)]
        for sock in crowd:
            tls = tls_context(CREDENTIALS, is_server=False).wrap_socket(sock)
            with contextlib.closing(Channel(tls)) as channel:
                assert channel.receive_bytes() == HELLO
                welcomed.channels.get(timeout=PATIENCE_S).close()
    assert welcomed.lines.empty()
    assert welcomed.works()


def test_a_stalled_handshake_is_dropped(
    welcomed: Welcomed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then is no excuse."""
    monkeypatch.setattr(listeners, "HANDSHAKE_LIMIT_S", 1.0)
    with stranger(welcomed.address) as silent, stranger(welcomed.address) as slow:
        slow.settimeout(0.1)
        with contextlib.suppress(ConnectionError):
            for byte in client_hello():
                slow.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    if not slow.recv(4096):
                        break
        assert hangs_up(silent)


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.path),)


def test_a_fleet_may_have_as_many_connections_as_its_machine_allows() -> None:
    """Each of its processes has one: the usual limit is 1024 descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1000, most), hard))
    try:
        with contextlib.closing(Connections()):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_out_of_descriptors_is_no_end(welcomed: Welcomed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener goes on as soon as there are some again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with stranger(welcomed.address) as early:
        early.sendall(client_hello())
        assert early.recv(1)
        late = socket.socket()
        resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, hard))
        copies: list[int] = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    copies.append(os.dup(0))
            late.connect(welcomed.address)
            late.settimeout(PATIENCE_S)
            assert hangs_up(early)  # who waits longest makes room
            late.sendall(client_hello())
            assert late.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            late.close()
            for copy in copies:
                os.close(copy)
    assert welcomed.works()


# -- frames --------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    mine, theirs = map(Channel, tls_pair())
    yield mine, theirs
    mine.close()
    theirs.close()


def test_what_follows_a_message_is_in_the_socket(pair: tuple[Channel, Channel]) -> None:
    """However many arrive at once: as long as one is there, `select` says so."""
    mine, theirs = pair
    messages = [0, b"x" * 40_000, *range(50), b"y" * (1 << 14), None]
    for message in messages:
        mine.send(message)
    for message in messages:
        assert select.select([theirs], [], [], PATIENCE_S)[0]
        assert theirs.has_message()
        assert theirs.receive() == message
    assert not theirs.has_message()
    with pytest.raises(TimeoutError):
        theirs.receive(0.01)


def test_last_words_are_heard_after_sending_has_failed(pair: tuple[Channel, Channel]) -> None:
    mine, theirs = pair
    mine.send("last")
    mine.close()
    for _ in range(3):
        with pytest.raises(OSError, match=r"."):
            theirs.send(bytes(1 << 22))
    assert theirs.receive() == "last"
    for _ in range(2):  # and for good
        with pytest.raises(EOFError):
            theirs.receive()


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


def test_a_message_that_is_too_large_says_what_to_do(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_MAX_BYTES", 100)
    with pytest.raises(ProtocolError, match="SharedPipeline"):
        pair[0].send(b"x" * 500)


# -- who is in between ----------------------------------------------------------------------------


class Relay:
    """Is between a client and a server: hears all that the client says, and may alter a byte."""

    def __init__(self, place: int = -1, bits: int = 1) -> None:
        self.heard = bytearray()
        self.place, self._bits = place, bits
        (client, self._near), (self._far, server) = (socket.socketpair() for _ in range(2))
        self._ends = tls_ends(client, server)

    def channels(self) -> tuple[Channel, Channel]:
        shake_hands(*self._ends, between=self.pass_on)
        mine, theirs = map(Channel, self._ends)
        return mine, theirs

    def pass_on(self) -> None:
        """What was said by now."""
        with contextlib.suppress(BlockingIOError):
            while data := bytearray(self._near.recv(1 << 16, socket.MSG_DONTWAIT)):
                self.heard += data
                if 0 <= (at := self.place - len(self.heard) + len(data)) < len(data):
                    data[at] ^= self._bits
                self._far.sendall(data)
        with contextlib.suppress(BlockingIOError):
            while data := bytearray(self._far.recv(1 << 16, socket.MSG_DONTWAIT)):
                self._near.sendall(data)

    def close(self) -> None:
        for sock in (*self._ends, self._near, self._far):
            sock.close()


def test_a_capture_holds_no_message() -> None:
    secret = b"the objective, in the clear"
    with contextlib.closing(Relay()) as relay:
        mine, theirs = relay.channels()
        for message in (secret, {"value": secret * 5000}, [secret]):
            mine.post(message)
            while not theirs.has_message():
                mine.flush()
                relay.pass_on()
            assert theirs.receive() == message
    assert len(relay.heard) > 5000 * len(secret)
    assert secret not in relay.heard


@settings(max_examples=60)
@given(place=st.integers(0, 1500), bits=st.integers(1, 255))
def test_what_is_altered_is_never_heard(place: int, bits: int) -> None:
    """Neither in the handshake nor after it; what came before it is."""
    heard: list[int] = []
    with contextlib.closing(Relay(place, bits)) as relay, contextlib.suppress(OSError):
        mine, theirs = relay.channels()
        for number in range(3):
            mine.post(number)
        relay.pass_on()
        while theirs.has_message():
            heard.append(theirs.receive())
    assert heard == list(range(len(heard)))


@pytest.mark.parametrize("place", [5, 40, 145])
def test_a_record_that_was_altered_cuts_the_connection(place: int) -> None:
    """Counted from the first byte of the message."""
    with contextlib.closing(Relay()) as relay:
        mine, theirs = relay.channels()
        relay.place = len(relay.heard) + place
        mine.post("x" * 150)
        relay.pass_on()
        with pytest.raises(ConnectionAbortedError, match="tampered"):
            theirs.receive()


# -- addresses ------------------------------------------------------------------------------------


@contextlib.contextmanager
def closed_port() -> Iterator[tuple[str, int]]:
    """An address where nobody listens, nor can meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()


def test_addresses_are_tried_in_their_order_and_the_error_names_each(welcomed: Welcomed) -> None:
    with contextlib.closing(Welcomed(OTHERS)) as other, closed_port() as refusing:
        tried = (refusing, other.address)
        invitation = replace(welcomed.invitation, addresses=tried)
        with pytest.raises(ProtocolError) as raised:
            connect(invitation)
        assert f"127.0.0.1:{refusing[1]}: Connection refused" in str(raised.value)
        assert f"127.0.0.1:{other.address[1]}: its certificate is not" in str(raised.value)
        with pytest.raises(ConnectionRefusedError, match="Does it run"):
            connect(replace(invitation, addresses=(refusing,)))
        connect(replace(invitation, addresses=(*tried, welcomed.address))).close()
    welcomed.channels.get(timeout=PATIENCE_S).close()


def test_who_listens_on_all_is_reached_at_each_address() -> None:
    with contextlib.closing(Connections(host=None)) as connections:
        found, port = connections.invitation.addresses, connections.port
        assert {chosen for _, chosen in found} == {port}
        for address in (*found, ("127.0.0.1", port)):
            connect(replace(connections.invitation, addresses=(address,))).close()
    hosts = [host for host, _ in found]
    assert hosts == ["127.0.0.1"] or not any(
        ipaddress.ip_address(host).is_loopback for host in hosts
    )


def test_an_address_of_this_machine_has_its_interface() -> None:
    assert invitations.interface_of("127.0.0.1") == "lo"
    assert invitations.interface_of("203.0.113.7") == ""
    names = {name for _, name in socket.if_nameindex()}
    assert {invitations.interface_of(address) for address in invitations.own_addresses()} <= names


def test_an_address_that_can_not_be_had_is_an_error_that_says_so() -> None:
    files = set(os.listdir("/proc/self/fd"))
    with contextlib.closing(Connections()) as first, pytest.raises(FleetConfigError) as raised:
        Connections(port=first.port)
    assert f"can't listen on 127.0.0.1:{first.port}" in str(raised.value)
    with pytest.raises(FleetConfigError, match=r"can't listen on no\.such\.host\.invalid"):
        Connections("no.such.host.invalid")
    assert set(os.listdir("/proc/self/fd")) <= files


def test_the_key_is_in_no_file_and_no_repr() -> None:
    files = set(os.listdir("/proc/self/fd"))
    invitation = Invitation(addresses=(), credentials=make_credentials())
    assert set(os.listdir("/proc/self/fd")) <= files
    assert "PRIVATE" not in repr(invitation)
    assert invitation.credentials != make_credentials()


# -- the connections ------------------------------------------------------------------------------


class Peers:
    """A connections with an agent and a trainer that are played by the test."""

    def __init__(self) -> None:
        self.connections = Connections()
        self.agent = self.connect()
        self.agent.send(joining())
        self.trainer = self.connect()
        self.trainer.send(ready(7))
        self.collect(2)

    def connect(self) -> Channel:
        return connect(self.connections.invitation)

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """Nothing is read meanwhile."""
        with self.connections.inbox._turn:
            yield

    def collect(self, number: int) -> list[Any]:
        return [self.connections.inbox.get(PATIENCE_S) for _ in range(number)]


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.connections.close()
    made.agent.close()
    made.trainer.close()


def test_last_words_come_before_the_death(peers: Peers) -> None:
    """All is there when it is read, in whatever order the sockets are looked at."""
    with peers.held_up():
        peers.agent.send(exited())
        for number in range(100):
            peers.trainer.send(number)
        peers.trainer.close()
    got = peers.collect(101)
    assert got[:100] == list(range(100))
    assert isinstance(got[100], TrainerExited)


def test_a_trainer_is_started_before_it_is_ready_and_never_ready_after_its_death(
    peers: Peers,
) -> None:
    """Each says so on a connection of its own."""
    with contextlib.closing(peers.connect()) as next_:
        with peers.held_up():
            next_.send(ready(8))
            peers.agent.send(started := TrainerStarted(device=0, process=ProcessId(AGENT, 8)))
        assert peers.collect(2) == [started, ready(8)]
    with contextlib.closing(peers.connect()) as late:
        peers.agent.send(exited(9))
        assert peers.collect(1) == [exited(9)]
        late.send(ready(9))
        peers.agent.send("goes on")
        assert peers.collect(1) == ["goes on"]
        with pytest.raises((EOFError, OSError)):
            late.receive()
    with contextlib.closing(peers.connect()) as again:
        peers.agent.send(started := TrainerStarted(device=0, process=ProcessId(AGENT, 9)))
        again.send(ready(9))  # the number is used again
        assert peers.collect(2) == [started, ready(9)]


def test_one_trainer_that_says_much_does_not_hold_up_the_others(peers: Peers) -> None:
    """It waits itself, until what it has said is taken: nothing is lost."""
    number = 2000
    thread = threading.Thread(
        target=lambda: [peers.trainer.send((n, bytes(4096))) for n in range(number)]
    )
    thread.start()
    first = peers.collect(1)
    peers.agent.send("of the agent")
    got: list[Any] = []
    while "of the agent" not in got:
        got += peers.collect(1)
    assert len(got) <= 50
    rest = [said for said in got if said != "of the agent"]
    rest += peers.collect(number - 1 - len(rest))
    assert [n for n, _ in first + rest] == list(range(number))
    thread.join(PATIENCE_S)


def test_all_that_a_node_has_said_comes_before_the_news_of_its_loss(peers: Peers) -> None:
    for number in range(500):
        peers.trainer.send(number)
    peers.agent.send("of the agent")
    peers.connections.give_up(AGENT, "lost")
    got = peers.collect(502)
    assert [one for one in got if isinstance(one, int)] == list(range(500))
    assert "of the agent" in got[:-1]
    assert got[-1] == "lost"
    assert not peers.connections._peers
    with pytest.raises((EOFError, OSError)):
        peers.agent.receive()


def test_a_time_comes_after_all_that_a_trainer_has_said_while_nobody_took(peers: Peers) -> None:
    """As while a sampler is at work: a kill that is due must not overtake its victim's end."""
    said = list(range(10))
    for number in said:
        peers.trainer.send(number)
    peers.connections.inbox.later(0.0, "the time")
    passed = threading.Event()
    peers.connections.inbox.call_later(0.1, passed.set)  # which the thread that stands in does
    assert passed.wait(PATIENCE_S)
    peers.trainer.send("the end")
    assert peers.collect(12) == [*said, "the end", "the time"]


def test_a_time_comes_though_a_trainer_never_ceases_to_talk(peers: Peers) -> None:
    over = threading.Event()

    def talk() -> None:
        while not over.is_set():
            peers.trainer.send("of the trainer")
        peers.trainer.send("the end")

    thread = threading.Thread(target=talk)
    thread.start()
    peers.collect(10)
    peers.connections.inbox.later(0.1, "the time")
    while peers.collect(1) != ["the time"]:
        pass
    over.set()
    while peers.collect(1) != ["the end"]:
        pass
    thread.join(PATIENCE_S)


def test_an_agent_is_silent_only_if_nothing_came_however_long_nobody_read(peers: Peers) -> None:
    """A driver that was stopped finds the signs of life in its sockets."""
    connections = peers.connections
    connections.keep_leases(1.0)
    peers.agent.send(SignOfLife())
    assert peers.agent.receive() == SignOfLife()  # both ways
    with peers.held_up():
        threading.Event().wait(2.5)  # by now it is due to look who is silent
        peers.agent.send(SignOfLife())
        peers.agent.send("here")
    assert peers.collect(1) == ["here"]
    assert peers.collect(1) == [AgentUnheard(agent=AGENT, cause="nothing was heard of it for 1 s")]
    assert connections.inbox.get(0.0) is None


def test_what_goes_wrong_while_it_is_waited_is_told_to_whoever_takes(peers: Peers) -> None:
    def fail() -> None:
        raise ValueError("what was not foreseen")

    peers.connections.inbox.call_later(0.0, fail)
    for _ in range(2):
        with pytest.raises(LaunchError, match="ValueError: what was not foreseen"):
            peers.connections.inbox.get(PATIENCE_S)


def turns_in(inbox: Inbox, seconds: float) -> int:
    """How often it is looked what is there, while somebody waits for what does not come."""
    with mock.patch.object(inbox, "_take_turn", wraps=inbox._take_turn) as take:
        assert inbox.get(seconds) is None
    return take.call_count


def test_nobody_spins_after_what_came_at_leisure_was_taken_with_what_was_pressing() -> None:
    with contextlib.closing(Inbox()) as inbox:
        inbox.call_later(0.0, inbox.put_at_leisure, "at leisure")
        inbox.call_later(0.0, inbox.put, "at once")
        assert [inbox.get(), inbox.get()] == ["at leisure", "at once"]
        assert turns_in(inbox, 0.5) < 20
        inbox.call_later(0.0, inbox.put_at_leisure, "at leisure")
        began = time.monotonic()
        assert inbox.get() == "at leisure"
        assert time.monotonic() - began >= 0.05


def test_half_a_message_does_not_hold_up_the_hub(peers: Peers) -> None:
    """As of a trainer that is stopped while it sends."""
    large = os.urandom(30 << 20)
    peers.trainer.post(large)
    assert peers.trainer.has_unsent
    for _ in range(3):
        peers.agent.send("of the agent")
        assert peers.collect(1) == ["of the agent"]
    thread = threading.Thread(target=peers.trainer.send, args=["of the trainer"])
    thread.start()
    assert peers.collect(2) == [large, "of the trainer"]
    thread.join(PATIENCE_S)


def test_a_peer_that_does_not_read_does_not_hold_up_the_hub(peers: Peers) -> None:
    """As a trainer that is stopped before it is sent an objective of some size."""
    large = os.urandom(30 << 20)
    peers.connections.send(peers.connections.trainers[ProcessId(AGENT, 7)], large)
    peers.connections.send(peers.connections.trainers[ProcessId(AGENT, 7)], "and this")
    peers.agent.send("of the agent")
    assert peers.collect(1) == ["of the agent"]
    read: queue.Queue[Any] = queue.Queue()

    def reader() -> None:
        read.put(peers.trainer.receive())
        read.put(peers.trainer.receive())
        peers.trainer.send("thanks")

    thread = threading.Thread(target=reader)
    thread.start()
    assert peers.collect(1) == ["thanks"]
    thread.join(PATIENCE_S)
    assert read.get() == large
    assert read.get() == "and this"


def test_nobody_spins_if_the_rest_was_sent_by_another_message(peers: Peers) -> None:
    """Or by a sign of life: it is looked no more whether the peer takes anything."""
    channel = peers.connections.trainers[ProcessId(AGENT, 7)]
    peers.connections.send(channel, os.urandom(30 << 20))
    assert peers.connections.inbox.get(0.2) is None  # from now on it is waited for the peer
    with peers.held_up():
        thread = threading.Thread(target=peers.trainer.receive)
        thread.start()
        while channel.has_unsent:
            channel.flush()
        thread.join(PATIENCE_S)
    assert turns_in(peers.connections.inbox, 0.5) < 20


def test_a_message_that_only_another_version_knows_cuts_its_sender_off(peers: Peers) -> None:
    peers.agent.post_bytes(b"coptuna_fleet.wire.messages\nNewerThanThis\n.")
    text, ended = peers.collect(2)
    assert "has another version of optuna_fleet" in text
    assert ended == AgentUnheard(agent=AGENT, cause="its connection ended")


def test_what_an_engine_tells_of_an_agent_comes_first_however_late_it_is_taken(
    peers: Peers,
) -> None:
    """Else its successor, which the engine has started, would be taken for it and ended."""
    inbox = peers.connections.inbox
    peers.agent.close()
    inbox.put("its engine has started another one")
    time.sleep(1.2)  # by now it is due to tell that nothing is heard of it
    assert peers.collect(1) == ["its engine has started another one"]
    peers.connections.give_up(AGENT, "it is gone")
    unheard = AgentUnheard(agent=AGENT, cause="its connection ended")
    assert peers.collect(2) == ["it is gone", unheard]


def test_what_is_closed_leaves_neither_port_nor_thread_nor_anybody_who_waits() -> None:
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    connections = Connections()
    admitted, waiting = (connect(connections.invitation) for _ in range(2))
    with stranger((connections.host, connections.port)) as sock:
        sock.sendall(client_hello())
        assert sock.recv(1)  # a handshake is under way
        connections.close()
        assert hangs_up(sock)
        for channel in (admitted, waiting):
            with pytest.raises((EOFError, OSError)):
                channel.receive()
            channel.close()
    assert set(threading.enumerate()) <= threads
    assert set(os.listdir("/proc/self/fd")) <= files
    with pytest.raises(ConnectionRefusedError):
        stranger((connections.host, connections.port))
