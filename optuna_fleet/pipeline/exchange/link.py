"""One connection between two nodes over torch.distributed (gloo), with several lanes.

On a lane one request is answered at a time, in each direction. Each pair of nodes has a process
group of its own, so that a death concerns one link only. Gloo's traps: a receive that times out
closes the pair, so nothing here has a limit (the exchanger gives up on its own); a message larger
than its buffer aborts the process, so bytes are announced by a frame.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from mmap import mmap
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.pipeline.exchange.bandwidth import Bandwidth
from optuna_fleet.pipeline.exchange.config import ExchangeConfig
from optuna_fleet.pipeline.exchange.frames import FRAME_BYTES, NUM_NUMBERS, Frame, Sealer, Status

_FOREVER = timedelta(days=10_000)

NUM_ECHOED = 4
"""An answer begins with so many numbers of its request; its last is the bytes that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is answered to a request: numbers, and perhaps bytes; ``done`` is called after it."""

    status: Status = Status.GIVEN
    numbers: tuple[int, ...] = ()
    body: mmap | None = None
    done: Callable[[], None] = lambda: None


class CorruptError(Exception):
    """Bytes do not match the digest that announced them."""


class Link:
    """A connection to one node.

    Args:
        group: The process group of the two.
        rank: Ours in it.
        sealer: Knows the secret.
        bandwidth: Measures what is received.
    """

    def __init__(
        self, group: ProcessGroupGloo, *, rank: int, sealer: Sealer, bandwidth: Bandwidth
    ) -> None:
        # The stubs know neither send and receive nor the options.
        self._group: Any = group
        self._peer = 1 - rank
        self._sealer = sealer
        self._bandwidth = bandwidth

    def call(
        self,
        lane: int,
        request: Frame,
        store: Callable[[int, Callable[[mmap], None]], int] | None = None,
    ) -> tuple[Frame, int | None]:
        """Sends a request and waits for the answer; one thread per lane.

        Args:
            lane: The lane.
            request: The request.
            store: Makes a file of so many bytes, filled by what it is given.

        Returns:
            The answer, and what ``store`` returned if bytes came with it.

        Raises:
            CorruptError: The bytes are not those that were sent.
            RuntimeError: The link broke.
            ProtocolError: The answer is none.
        """
        self._send(self._sealer.pack(request), 3 * lane)
        answer = self._sealer.unpack(self._receive(3 * lane + 1))
        echo = request.numbers[:NUM_ECHOED]
        if answer.kind != request.kind or answer.numbers[: len(echo)] != echo:
            raise ProtocolError(f"it answered {request} with {answer}")
        nbytes = answer.numbers[-1]
        if not nbytes:
            return answer, None
        if store is None:
            raise ProtocolError(f"it answered {request} with {nbytes} bytes")

        def fill(memory: mmap) -> None:
            with self._bandwidth.receiving(nbytes):
                self._receive_into(memory, 3 * lane + 2)
                digest = self._sealer.digest(memory)
            if digest != answer.digest:
                raise CorruptError

        return answer, store(nbytes, fill)

    def serve(self, lane: int, handle: Callable[[Frame], Answer]) -> NoReturn:
        """Answers the requests of the other side; one thread per lane.

        Raises:
            RuntimeError: The link broke.
            ProtocolError: A request is none.
        """
        while True:
            request = self._sealer.unpack(self._receive(3 * lane))
            answer = handle(request)
            try:
                self._answer(lane, request, answer)
            finally:
                answer.done()

    def _answer(self, lane: int, request: Frame, answer: Answer) -> None:
        body = answer.body
        numbers = request.numbers[:NUM_ECHOED] + answer.numbers
        numbers += (0,) * (NUM_NUMBERS - 1 - len(numbers)) + (len(body) if body else 0,)
        frame = Frame(kind=request.kind, status=answer.status, numbers=numbers)
        if body:
            frame = frame.announcing(self._sealer.digest(body))
        self._send(self._sealer.pack(frame), 3 * lane + 1)
        if body:
            self._send(body, 3 * lane + 2)

    def _send(self, data: bytes | mmap, tag: int) -> None:
        # A copy of what can't be written: torch warns of memory that is read-only.
        memory = bytearray(data) if isinstance(data, bytes) else data
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._group.send([tensor], self._peer, tag).wait(_FOREVER)

    def _receive(self, tag: int) -> bytes:
        data = bytearray(FRAME_BYTES)
        self._receive_into(data, tag)
        return bytes(data)

    def _receive_into(self, memory: bytearray | mmap, tag: int) -> None:
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._group.recv([tensor], self._peer, tag).wait(_FOREVER)


def open_meeting_point(config: ExchangeConfig) -> TCPStore:
    """Returns node 0's store, over which nodes find each other; it listens on ``host`` only."""
    family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
    sock = socket.create_server((config.host, config.port), family=family, backlog=128)
    return TCPStore(
        config.host,
        config.port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=sock.detach(),
    )


def connect(config: ExchangeConfig, node: int, *, sealer: Sealer, bandwidth: Bandwidth) -> Link:
    """Waits for a node and returns the link to it.

    Raises:
        RuntimeError: It did not come in time.
    """
    limit = timedelta(seconds=config.join_timeout_s)
    # A client of its own: one that waits for a node keeps all other users of it waiting.
    store = TCPStore(config.host, config.port, timeout=limit, wait_for_workers=False)
    low, high = sorted((config.node, node))
    rank = 0 if config.node == low else 1
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_device(config)]
    options._timeout = limit
    options._threads = 1
    meeting = PrefixStore(f"{sealer.store_prefix()}/{low}-{high}", store)
    group = ProcessGroupGloo(meeting, rank, 2, options)
    return Link(group, rank=rank, sealer=sealer, bandwidth=bandwidth)


def _device(config: ExchangeConfig) -> ProcessGroupGloo.Device:
    interface = config.interface or os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_device(hostname=_own_address(config.host, config.port))


def _own_address(host: str, port: int) -> str:
    """The address under which this machine reaches ``host``; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])
