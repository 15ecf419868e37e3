"""The control channel against strangers, and against trainers that die at a bad moment."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import pickle
import queue
import resource
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.executor.cluster.agent.main import versions
from optuna_fleet.executor.cluster.config import machine
from optuna_fleet.executor.fleet import listener as listeners
from optuna_fleet.executor.fleet.connections import Connections
from optuna_fleet.executor.fleet.listener import Listener
from optuna_fleet.resources import Device
from optuna_fleet.wire import channel as channels
from optuna_fleet.wire.channel import HELLO, Channel, connect
from optuna_fleet.wire.invitation import Invitation
from optuna_fleet.wire.messages import TrainerReady
from optuna_fleet.wire.node_messages import (
    AgentJoining,
    ConnectionEnded,
    ProcessId,
    TrainerExited,
)
from optuna_fleet.wire.tls import Certificate, make_certificate

SECRET = b"s" * 32
HELLO_BYTES = len(HELLO) + 32
ANSWER_BYTES = HELLO_BYTES + 32
PATIENCE_S = 240.0

AGENT = "5"


def ready(pid: int) -> TrainerReady:
    return TrainerReady(device=0, process=ProcessId(AGENT, pid))


def exited(cause: str = "signal SIGKILL") -> TrainerExited:
    return TrainerExited(device=0, process=ProcessId(AGENT, 7), cause=cause)


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

    def __init__(self, certificate: Certificate | None = None) -> None:
        self.channels: queue.Queue[Channel] = queue.Queue()
        self.lines: queue.Queue[str] = queue.Queue()
        self.listener = Listener(
            "127.0.0.1", SECRET, self.channels.put, self.lines.put, certificate=certificate
        )
        self.address = (self.listener.host, self.listener.port)
        self.invitation = Invitation(
            addresses=(self.address,),
            secret=SECRET,
            fingerprint=certificate.fingerprint if certificate else None,
        )

    def close(self) -> None:
        self.listener.close()
        while not self.channels.empty():  # let in, and gone before it heard of it
            self.channels.get().close()

    def works(self) -> bool:
        """A client that knows the secret gets in, and is the first who did."""
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


@pytest.fixture(params=["plain", "TLS"])
def either(request: pytest.FixtureRequest) -> Iterator[Welcomed]:
    """On loopback, and beyond it."""
    made = Welcomed(make_certificate() if request.param == "TLS" else None)
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


def answer(hello: bytes, secret: bytes) -> bytes:
    """What a client says to a listener's hello."""
    client, server = bytes(32), hello[-32:]
    return HELLO + client + channels.derived(secret, b"client", client, server)


def test_messages_pass_both_ways(either: Welcomed) -> None:
    mine, theirs = either.pair()
    for message in ({"a": 1}, b"", os.urandom(5 << 20), None):
        threading.Thread(target=mine.send, args=(message,)).start()
        assert theirs.receive() == message
    theirs.send("back")
    assert mine.receive() == "back"
    mine.close()
    theirs.close()


def test_who_waits_for_a_machine_that_has_vanished_is_told_in_five_minutes(
    either: Welcomed,
) -> None:
    mine, theirs = either.pair()
    with socket.socket(fileno=os.dup(mine.fileno())) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s, every_s, number = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle_s + number * every_s == 300
    mine.close()
    theirs.close()


def test_a_wrong_secret_is_refused_on_both_ends(either: Welcomed) -> None:
    with pytest.raises(ProtocolError, match="different sweeps"):
        connect(replace(either.invitation, secret=b"x" * 32))
    assert "does not know this sweep's secret" in either.lines.get(timeout=PATIENCE_S)
    assert either.works()


def test_a_client_refuses_a_listener_that_does_not_know_the_secret() -> None:
    """One that takes whoever comes, and answers with something."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(HELLO + bytes(32))
                got = sock.recv(ANSWER_BYTES, socket.MSG_WAITALL)
                sock.sendall(got[-32:])  # the client's own proof

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(ProtocolError, match="different sweeps"):
            connect(Invitation(addresses=(server.getsockname(),), secret=SECRET))
        thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"optuna-fleet 1" + bytes(64),
        HELLO,
        HELLO + bytes(63),
        HELLO + bytes(64),
        struct.pack("!Q", 1 << 62) + bytes(16),
        bytes(1 << 20),
        os.urandom(1 << 16),
    ],
    ids=[
        *("empty", "short", "http", "other version", "truncated", "one byte short", "no proof"),
        *("huge", "megabyte", "noise"),
    ],
)
def test_garbage_is_dropped(either: Welcomed, garbage: bytes) -> None:
    with stranger(either.address) as sock:
        with contextlib.suppress(OSError):  # hung up on us already
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
        assert hangs_up(sock)
    assert "A stranger was refused" in either.lines.get(timeout=PATIENCE_S)
    assert either.works()


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_bytes_get_in_without_the_secret(welcomed: Welcomed, data: st.DataObject) -> None:
    """Of any length, in any pieces, as noise or as a proper answer that was altered."""
    with stranger(welcomed.address) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        proper = answer(sock.recv(HELLO_BYTES, socket.MSG_WAITALL), SECRET)
        altered = bytearray(proper + data.draw(st.binary(max_size=40)))
        place = data.draw(st.integers(0, len(proper) - 1))
        altered[place] ^= data.draw(st.integers(1, 255))
        words = data.draw(st.sampled_from([bytes(altered), proper[:place]]) | st.binary())
        cuts = sorted(data.draw(st.sets(st.integers(0, len(words)), max_size=5)))
        with contextlib.suppress(OSError):
            for begin, end in itertools.pairwise([0, *cuts, len(words)]):
                sock.sendall(words[begin:end])
            sock.shutdown(socket.SHUT_WR)
        assert hangs_up(sock)
    assert welcomed.channels.empty()


def test_a_proof_played_back_is_refused(welcomed: Welcomed) -> None:
    """Neither the listener's own words nor those of a client who was let in open it again."""
    with stranger(welcomed.address) as first:
        words = answer(first.recv(HELLO_BYTES, socket.MSG_WAITALL), SECRET)
        first.sendall(words)
        its_proof = first.recv(32, socket.MSG_WAITALL)
        welcomed.channels.get(timeout=PATIENCE_S).close()
    for proof in (words[-32:], its_proof):
        with stranger(welcomed.address) as sock:
            hello = sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
            sock.sendall(words[:-32] + proof)
            assert hangs_up(sock)
        with stranger(welcomed.address) as sock:
            sock.sendall(hello + proof)
            assert hangs_up(sock)
    assert welcomed.works()


def test_half_open_connections_keep_nobody_out(either: Welcomed) -> None:
    """More than are waited for at a time; and those who wait longest go first."""
    with contextlib.ExitStack() as open_ones:
        crowd = [open_ones.enter_context(stranger(either.address)) for _ in range(300)]
        crowd[0].settimeout(PATIENCE_S)
        assert hangs_up(crowd[0])
        crowd[-1].sendall(HELLO[:3])
        assert either.works()
        assert len(either.listener._applicants) <= 128


def test_of_a_crowd_that_comes_at_once_none_is_refused(
    welcomed: Welcomed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a large fleet starts: who finds no place waits for one."""
    monkeypatch.setattr(listeners, "HANDSHAKE_LIMIT_S", 1000.0)
    monkeypatch.setattr(listeners, "_TURN_S", 1000.0)
    with contextlib.ExitStack() as open_ones:
        crowd = [open_ones.enter_context(stranger(welcomed.address)) for _ in range(300)]
        for sock in crowd:
            sock.sendall(answer(sock.recv(HELLO_BYTES, socket.MSG_WAITALL), SECRET))
            assert len(sock.recv(32, socket.MSG_WAITALL)) == 32
            welcomed.channels.get(timeout=PATIENCE_S).close()
    assert welcomed.lines.empty()
    assert welcomed.works()


def test_a_stalled_handshake_is_dropped(either: Welcomed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no excuse."""
    with (
        monkeypatch.context() as patch,
        stranger(either.address) as silent,
        stranger(either.address) as slow,
    ):
        patch.setattr(listeners, "HANDSHAKE_LIMIT_S", 1.0)
        slow.settimeout(0.1)
        with contextlib.suppress(ConnectionError):
            for byte in itertools.cycle(HELLO + bytes(32)):
                slow.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    if not slow.recv(HELLO_BYTES):
                        break
        assert hangs_up(silent)
    assert either.works()


def test_a_flood_is_told_in_one_line(either: Welcomed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_QUIET_S", 1000.0)
    for _ in range(2000):
        stranger(either.address).close()
    assert either.works()
    assert "A stranger was refused" in either.lines.get(timeout=PATIENCE_S)
    assert either.lines.empty()


def test_what_came_after_a_line_is_told_later(
    welcomed: Welcomed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "_QUIET_S", 0.5)
    stranger(welcomed.address).close()
    welcomed.lines.get(timeout=PATIENCE_S)
    for _ in range(3):
        with stranger(welcomed.address) as sock:
            sock.sendall(b"x")
            assert hangs_up(sock)
    told, number = "", 0
    while number < 3:
        told = welcomed.lines.get(timeout=PATIENCE_S)
        number += 1 + (int(told.split(", and ")[1].split()[0]) if ", and " in told else 0)
    assert "does not speak this protocol" in told


def test_a_stranger_takes_no_memory_and_no_thread(either: Welcomed) -> None:
    assert either.works()
    threads = threading.active_count()
    tracemalloc.start()
    with contextlib.ExitStack() as open_ones:
        for prefix in (struct.pack("!Q", 1 << 40), struct.pack("!i", 0x7FFFFFFF), HELLO) * 10:
            sock = open_ones.enter_context(stranger(either.address))
            with contextlib.suppress(OSError):
                sock.sendall(prefix + bytes(1 << 18))
        assert threading.active_count() <= threads
        assert either.works()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20


def test_nothing_is_unpickled_from_a_stranger(either: Welcomed, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    frame = struct.pack("!Q", len(bomb)) + bytes(32) + bomb
    for words in (bomb, frame, HELLO + bomb, answer(bytes(32), b"x" * 32) + frame):
        with stranger(either.address) as sock:
            sock.sendall(words)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            assert hangs_up(sock)
    assert either.works()
    assert not list(tmp_path.iterdir())
    pickle.loads(bomb)
    assert list(tmp_path.iterdir())  # it would have gone off


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.path),)


def test_a_closed_listener_leaves_neither_port_nor_thread() -> None:
    before, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    listener = Listener("127.0.0.1", SECRET, lambda channel: None)
    with stranger((listener.host, listener.port)) as sock:
        sock.recv(HELLO_BYTES, socket.MSG_WAITALL)  # a handshake is under way
        listener.close()
        assert hangs_up(sock)
    assert set(threading.enumerate()) <= before
    assert set(os.listdir("/proc/self/fd")) <= files
    with pytest.raises(ConnectionRefusedError):
        stranger((listener.host, listener.port))


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
        early.recv(HELLO_BYTES, socket.MSG_WAITALL)
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
            assert late.recv(len(HELLO)) == HELLO
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            late.close()
            for copy in copies:
                os.close(copy)
    assert welcomed.works()


# -- frames --------------------------------------------------------------------------------------

KEYS = {"outgoing": b"a" * 32, "incoming": b"b" * 32}
SAID = ["first", "second", {"third": 3}, b"x" * 300]


def heard(stream: bytes) -> list[Any]:
    """What a channel makes of these bytes, until it gives up on them."""
    messages = []
    with contextlib.closing(tcp_pair()) as (there, here):
        channel = Channel(here, outgoing=KEYS["incoming"], incoming=KEYS["outgoing"])
        there.sendall(stream)
        there.close()
        with contextlib.suppress(EOFError, ConnectionAbortedError):
            while True:
                assert channel.has_message()
                messages.append(channel.receive())
        for _ in range(2):  # and for good
            with pytest.raises((EOFError, ConnectionAbortedError)):
                channel.receive()
    return messages


class tcp_pair(tuple[socket.socket, socket.socket]):
    """Two connected sockets."""

    def __new__(cls) -> tcp_pair:
        with socket.create_server(("127.0.0.1", 0)) as server:
            one = socket.create_connection(server.getsockname())
            other, _ = server.accept()
        return super().__new__(cls, (one, other))

    def close(self) -> None:
        for sock in self:
            sock.close()


@functools.cache
def said_frames() -> tuple[bytes, ...]:
    """What a channel sends for `SAID`, frame by frame."""
    with contextlib.closing(tcp_pair()) as (here, there):
        channel = Channel(here, **KEYS)
        frames = []
        for message in SAID:
            channel.send(message)
            frames.append(there.recv(1 << 20))
    return tuple(frames)


def test_what_was_said_is_heard() -> None:
    assert heard(b"".join(said_frames())) == SAID


@settings(max_examples=150)
@given(data=st.data())
def test_of_a_stream_that_was_altered_only_what_came_before_is_heard(data: st.DataObject) -> None:
    """Bits flipped; bytes put in, left out or repeated; the end cut off."""
    stream = b"".join(said_frames())
    begin = data.draw(st.integers(0, len(stream)))
    end = data.draw(st.integers(begin, len(stream)))
    others = [st.binary(max_size=60), st.just(stream[begin:end] * 2), st.just(stream[:begin])]
    middle = data.draw(st.one_of(*others))
    altered = stream[:begin] + middle + stream[end:]
    assume(altered != stream)
    pairs = zip(altered, stream, strict=False)
    intact = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    ends = itertools.accumulate(map(len, said_frames()))
    assert heard(altered) == SAID[: sum(end <= intact for end in ends)]


@settings(max_examples=40)
@given(order=st.lists(st.integers(0, len(SAID) - 1), max_size=6))
def test_frames_count_in_their_order_and_once(order: list[int]) -> None:
    proper = list(itertools.takewhile(lambda pair: pair[0] == pair[1], enumerate(order)))
    assert heard(b"".join(said_frames()[n] for n in order)) == SAID[: len(proper)]


def test_a_frame_is_not_taken_back_by_its_sender_nor_by_another_connection(
    welcomed: Welcomed,
) -> None:
    for echo in (True, False):
        mine, theirs = welcomed.pair()
        other_mine, other_theirs = welcomed.pair()
        mine.send("said")
        with socket.socket(fileno=os.dup(theirs.fileno())) as raw:
            frame = raw.recv(1 << 10)
        victim, attacker = (mine, theirs) if echo else (other_theirs, other_mine)
        with socket.socket(fileno=os.dup(attacker.fileno())) as raw:
            raw.sendall(frame)
        with pytest.raises(ConnectionAbortedError, match="tampered"):
            victim.receive()
        for channel in (mine, theirs, other_mine, other_theirs):
            channel.close()


def test_a_length_that_is_not_proven_takes_no_memory() -> None:
    for length in (1 << 62, 0x7FFFFFFF, 64 << 20):
        tracemalloc.start()
        assert heard(struct.pack("!Q", length) + bytes(16) + bytes(1 << 16)) == []
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


def test_a_bomb_in_a_frame_without_proof_does_not_go_off(tmp_path: Path) -> None:
    """The frame is the sender's but for its content, of the same length."""
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    with contextlib.closing(tcp_pair()) as (here, there):
        Channel(here, **KEYS).send(b"x" * 500)
        frame = there.recv(1 << 20)
    head = len(frame) - len(pickle.dumps(b"x" * 500))
    assert heard(frame[:head] + bomb.ljust(len(frame) - head, b".")) == []
    assert not list(tmp_path.iterdir())


def test_a_message_that_is_too_large_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_MAX_BYTES", 100)
    with contextlib.closing(tcp_pair()) as (here, there):
        with pytest.raises(ProtocolError, match="SharedPipeline"):
            Channel(here, **KEYS).send(b"x" * 500)
        assert there.fileno() >= 0


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

    def collect(self, number: int) -> list[Any]:
        got: list[Any] = []
        while len(got) < number:
            got += self.connections.messages(PATIENCE_S)
        return got


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.connections.close()
    made.agent.close()
    made.trainer.close()


def test_last_words_come_before_the_death(peers: Peers) -> None:
    peers.agent.send(exited())
    peers.trainer.send("last words")
    peers.trainer.close()
    got = peers.collect(2)
    assert got[0] == "last words"
    assert isinstance(got[1], TrainerExited)


def test_death_and_end_of_stream_may_be_seen_at_once(peers: Peers) -> None:
    """Both are pending, the agent's word first: as when two trainers die at one time."""
    peers.trainer.close()
    peers.agent.send("of another trainer")
    peers.agent.send(exited())
    (_, death) = peers.collect(2)
    assert isinstance(death, TrainerExited)
    assert not peers.connections.trainers
    peers.agent.send("the agent is still heard")
    assert peers.collect(1) == ["the agent is still heard"]


def test_a_hub_that_is_closed_closes_those_who_have_not_said_who_they_are() -> None:
    files = set(os.listdir("/proc/self/fd"))
    connections = Connections()
    admitted, waiting = (connect(connections.invitation) for _ in range(2))
    with stranger((connections.host, connections.port)) as sock:
        sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
        list(connections.messages(PATIENCE_S))  # it hears of the first, perhaps of both
        connections.close()
        for channel in (admitted, waiting):
            with pytest.raises((EOFError, OSError)):
                channel.receive()
            channel.close()
    assert set(os.listdir("/proc/self/fd")) <= files


def test_all_that_an_agent_has_said_is_read_at_once(peers: Peers) -> None:
    """However long a turn of the driver takes: else signs of life would be old when read."""
    frames = [part for n in range(20) for part in peers.agent._frame(pickle.dumps(n))]
    with socket.socket(fileno=os.dup(peers.agent.fileno())) as raw:
        raw.sendall(b"".join(frames))
    assert list(peers.connections.messages(PATIENCE_S)) == list(range(20))


def test_one_trainer_that_says_much_does_not_hold_up_the_others(peers: Peers) -> None:
    frames = [part for n in range(20) for part in peers.trainer._frame(pickle.dumps(n))]
    with socket.socket(fileno=os.dup(peers.trainer.fileno())) as raw:
        raw.sendall(b"".join(frames))
    assert [list(peers.connections.messages(PATIENCE_S)) for _ in range(20)] == [
        [number] for number in range(20)
    ]


def test_half_a_message_does_not_hold_up_the_hub(peers: Peers) -> None:
    """As of a trainer that is stopped while it sends."""
    with socket.socket(fileno=os.dup(peers.trainer.fileno())) as raw:
        frame = b"".join(peers.trainer._frame(pickle.dumps("of the trainer")))
        for part in (frame[:5], frame[5:30]):
            raw.sendall(part)
            assert list(peers.connections.messages(PATIENCE_S)) == []
        peers.agent.send("of the agent")
        assert peers.collect(1) == ["of the agent"]
        raw.sendall(frame[30:])
        assert peers.collect(1) == ["of the trainer"]


def test_a_peer_that_does_not_read_does_not_hold_up_the_hub(peers: Peers) -> None:
    """As a trainer that is stopped before it is sent an objective of some size."""
    large = os.urandom(30 << 20)
    peers.connections.send(peers.connections.trainers[ProcessId(AGENT, 7)], large)
    peers.connections.send(peers.connections.trainers[ProcessId(AGENT, 7)], "and this")
    peers.agent.send("of the agent")
    while (got := list(peers.connections.messages(PATIENCE_S))) == []:
        pass
    assert got == ["of the agent"]
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


def test_a_message_that_was_tampered_with_cuts_its_sender_off(
    peers: Peers, said: list[logging.LogRecord]
) -> None:
    with socket.socket(fileno=os.dup(peers.trainer.fileno())) as raw:
        raw.sendall(b"x" * 100)
    while peers.connections.trainers:
        assert list(peers.connections.messages(PATIENCE_S)) == []
    (record,) = said
    assert "tampered" in record.getMessage()
    with pytest.raises((EOFError, OSError)):
        peers.trainer.receive()


def test_a_message_that_only_another_version_knows_cuts_its_sender_off(
    peers: Peers, said: list[logging.LogRecord]
) -> None:
    peers.agent.post_bytes(b"coptuna_fleet.wire.messages\nNewerThanThis\n.")
    (ended,) = peers.collect(1)
    assert ended == ConnectionEnded(agent=AGENT)
    (record,) = said
    assert "has another version of optuna_fleet" in record.getMessage()


def test_a_stranger_is_logged_by_who_waits_for_messages(said: list[logging.LogRecord]) -> None:
    """Not on the listener's thread: handlers are the user's code."""
    connections = Connections()
    for _ in range(5):
        with stranger((connections.host, connections.port)) as sock:
            sock.sendall(b"let me in")
            assert hangs_up(sock)
    assert not said
    while not said:
        assert list(connections.messages(PATIENCE_S)) == []
    connections.close()
    (record,) = said
    assert record.threadName == threading.current_thread().name
    assert record.name == "optuna.fleet"
    assert connections.secret.hex() not in record.getMessage()


@pytest.fixture
def said() -> Iterator[list[logging.LogRecord]]:
    """What the fleet says to its user."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("optuna.fleet")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
