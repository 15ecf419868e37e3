"""The control channel against strangers, and the hub against trainers that die at a bad moment."""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optuna_fleet import channel as channels
from optuna_fleet.alloc import GreedyAllocator, IsolatedAllocator
from optuna_fleet.channel import Channel, Listener, connect
from optuna_fleet.events import DeviceJoined
from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.executor import runtime as runtimes
from optuna_fleet.executor.hub import Hub
from optuna_fleet.messages import AgentReady, TrainerExited, TrainerReady
from optuna_fleet.resources import Device, Fleet

SECRET = b"s" * 32
PATIENCE_S = 20.0

AGENT = 5


def ready(pid: int) -> TrainerReady:
    return TrainerReady(device=0, pid=pid, agent=AGENT)


class Welcomed:
    """A listener and the channels it let in."""

    def __init__(self) -> None:
        self.channels: queue.Queue[Channel] = queue.Queue()
        self.listener = Listener("127.0.0.1", SECRET, self.channels.put)
        self.address = (self.listener.host, self.listener.port)

    def works(self) -> bool:
        """A client that knows the secret gets in, and is the first who did."""
        with_secret = connect(*self.address, SECRET)
        theirs = self.channels.get(timeout=PATIENCE_S)
        with_secret.send({"a": 1})
        same = theirs.receive() == {"a": 1}
        with_secret.close()
        theirs.close()
        return same and self.channels.empty()


@pytest.fixture
def welcomed() -> Iterator[Welcomed]:
    made = Welcomed()
    yield made
    made.listener.close()


def stranger(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=PATIENCE_S)


def is_dropped(sock: socket.socket) -> bool:
    """The listener hangs up (after its own hello) without being told to."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_messages_pass_both_ways(welcomed: Welcomed) -> None:
    assert welcomed.works()


def test_a_wrong_secret_is_refused_on_both_ends(welcomed: Welcomed) -> None:
    with pytest.raises((ProtocolError, OSError, EOFError)):
        connect(*welcomed.address, b"x" * 32)
    assert welcomed.works()


def test_a_client_refuses_a_listener_that_does_not_know_the_secret() -> None:
    impostor = Listener("127.0.0.1", b"i" * 32, lambda channel: None)
    with pytest.raises((ProtocolError, OSError, EOFError)):
        connect(impostor.host, impostor.port, SECRET)
    impostor.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        struct.pack("!i", 46) + b"optuna-fleet 0" + bytes(32),
        struct.pack("!i", 46) + b"optuna-fleet 1" + bytes(32) + struct.pack("!i", 32) + bytes(32),
        struct.pack("!i", 0),
        struct.pack("!i", -2) + b"x",
        struct.pack("!i", -1) + struct.pack("!Q", 1 << 62),
        struct.pack("!i", 0x7FFFFFFF) + bytes(1 << 20),
        os.urandom(1 << 16),
    ],
    ids=["short", "http", "other version", "no proof", "empty", "negative", "huge", "2g", "noise"],
)
def test_garbage_is_dropped(welcomed: Welcomed, garbage: bytes) -> None:
    with stranger(welcomed.address) as sock:
        try:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # hung up on us already
        assert is_dropped(sock)
    assert welcomed.works()


def test_a_proof_played_back_is_refused(welcomed: Welcomed) -> None:
    """Sending the listener's own hello and proof back to it does not let anyone in."""
    with stranger(welcomed.address) as sock:
        hello = sock.recv(50, socket.MSG_WAITALL)
        sock.sendall(hello)
        proof = sock.recv(36, socket.MSG_WAITALL)
        sock.sendall(proof)
        assert is_dropped(sock)
    assert welcomed.works()


def test_a_stalled_handshake_keeps_nobody_out(welcomed: Welcomed) -> None:
    with stranger(welcomed.address) as silent, stranger(welcomed.address) as half:
        half.sendall(struct.pack("!i", 46) + b"opt")
        assert welcomed.works()
        assert silent.fileno() != half.fileno()


def test_a_stalled_handshake_is_dropped(
    welcomed: Welcomed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_HANDSHAKE_LIMIT_S", 1.0)
    with stranger(welcomed.address) as silent:
        assert is_dropped(silent)
    assert welcomed.works()


def test_nothing_is_unpickled_from_a_stranger(welcomed: Welcomed, tmp_path: Path) -> None:
    bomb = f"cos\nsystem\n(S'touch {tmp_path}/boom'\ntR.".encode()
    with stranger(welcomed.address) as sock:
        sock.sendall(struct.pack("!i", len(bomb)) + bomb)
        assert is_dropped(sock)
    assert welcomed.works()
    assert not list(tmp_path.iterdir())


def test_a_closed_listener_leaves_neither_port_nor_thread() -> None:
    before = set(threading.enumerate())
    listener = Listener("127.0.0.1", SECRET, lambda channel: None)
    (accepting,) = set(threading.enumerate()) - before
    listener.close()
    accepting.join(PATIENCE_S)
    assert not accepting.is_alive()
    with pytest.raises(ConnectionRefusedError):
        stranger((listener.host, listener.port))


# -- the hub -------------------------------------------------------------------------------------


class Peers:
    """A hub with an agent and a trainer that are played by the test."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.agent = self.connect()
        self.agent.send(AgentReady(node=0, pid=1))
        self.trainer = self.connect()
        self.trainer.send(ready(7))
        self.collect(2)

    def connect(self) -> Channel:
        return connect(self.hub.host, self.hub.port, self.hub.secret)

    def collect(self, number: int) -> list[Any]:
        got: list[Any] = []
        while len(got) < number:
            got += self.hub.messages(PATIENCE_S)
        return got


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.hub.close()
    made.agent.close()
    made.trainer.close()


def test_last_words_come_before_the_death(peers: Peers) -> None:
    peers.agent.send(TrainerExited(device=0, pid=7, cause="signal SIGKILL"))
    peers.trainer.send("last words")
    peers.trainer.close()
    got = peers.collect(2)
    assert got[0] == "last words"
    assert isinstance(got[1], TrainerExited)


def test_death_and_end_of_stream_may_be_seen_at_once(peers: Peers) -> None:
    """Both are pending, the agent's word first: as when two trainers die at one time."""
    peers.agent.send("of another trainer")
    peers.agent.send(TrainerExited(device=0, pid=7, cause="signal SIGKILL"))
    assert peers.collect(1) == ["of another trainer"]
    peers.trainer.close()
    (death,) = peers.collect(1)
    assert isinstance(death, TrainerExited)
    assert not peers.hub.trainers
    peers.agent.send("the agent is still heard")
    assert peers.collect(1) == ["the agent is still heard"]


def test_a_handshake_that_ends_after_the_hub_closed_is_harmless() -> None:
    # pytest turns an exception on the listener's thread into a failure.
    hub = Hub()
    before = set(threading.enumerate())
    with stranger((hub.host, hub.port)) as sock:
        hello = sock.recv(50, socket.MSG_WAITALL)  # the listener's thread is in its handshake
        (welcoming,) = set(threading.enumerate()) - before
        hub.close()
        mine, theirs = os.urandom(32), hello[-32:]
        sock.sendall(struct.pack("!i", 46) + b"optuna-fleet 1" + mine)
        proof = channels._proof(hub.secret, b"client", mine, theirs)
        sock.sendall(struct.pack("!i", len(proof)) + proof)
        welcoming.join(PATIENCE_S)
        assert not welcoming.is_alive()
        assert is_dropped(sock)


# -- the runtime's books -------------------------------------------------------------------------


class FakeAgent:
    pid = AGENT

    def __init__(self, config: Any) -> None:
        self.config = config

    def close(self) -> None:
        pass


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[runtimes.Runtime]:
    monkeypatch.setattr(runtimes, "AgentProcess", FakeAgent)
    device = Device(index=0, node=0, kind="cpu")
    allocator = IsolatedAllocator(GreedyAllocator(), GreedyAllocator())
    made = runtimes.Runtime(Fleet(devices=(device,)), None, allocator, tmp_path, preload=False)
    yield made
    made.close()


def test_a_successor_is_announced_after_the_loss(runtime: runtimes.Runtime) -> None:
    assert runtime.device_events(ready(7)) == [DeviceJoined(device=0)]
    assert runtime.device_events(ready(8)) == []
    lost, joined = runtime.device_events(TrainerExited(device=0, pid=7, cause="exit code 1"))
    assert joined == DeviceJoined(device=0)
    assert lost != joined


def test_a_trainer_whose_death_was_told_before_its_hello_is_never_announced(
    runtime: runtimes.Runtime,
) -> None:
    """Its hello is still in its socket when the agent tells of its death: it is not up."""
    assert runtime.device_events(TrainerExited(device=0, pid=7, cause="signal SIGKILL")) == []
    assert runtime.device_events(ready(7)) == []
    assert runtime.device_events(ready(8)) == [DeviceJoined(device=0)]


def test_no_temporary_folder_stays_if_the_agent_cannot_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(config: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(runtimes, "AgentProcess", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    device = Device(index=0, node=0, kind="cpu")
    allocator = IsolatedAllocator(GreedyAllocator(), GreedyAllocator())
    with pytest.raises(OSError, match="no more processes"):
        runtimes.Runtime(Fleet(devices=(device,)), None, allocator, None, preload=False)
    assert not list(tmp_path.iterdir())
