"""The exchanger process of a node: fetches chunks from other nodes, and gives them ours."""

from __future__ import annotations

import logging
import os
import re
import select
import socket
import threading
import time

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.pipeline import wire
from optuna_fleet.pipeline.chunks.memory_files import sealed_file
from optuna_fleet.pipeline.chunks.spill import to_disk
from optuna_fleet.pipeline.exchange.bandwidth import Bandwidth
from optuna_fleet.pipeline.exchange.config import ExchangeConfig
from optuna_fleet.pipeline.exchange.deadlock_guard import DeadlockGuard
from optuna_fleet.pipeline.exchange.frames import Frame, Kind, Sealer, Status
from optuna_fleet.pipeline.exchange.joining import first_line, meet, told, within
from optuna_fleet.pipeline.exchange.link import (
    NUM_ECHOED,
    Answer,
    CorruptError,
    Link,
    connect,
    open_meeting_point,
)
from optuna_fleet.pipeline.exchange.local_reader import LocalReader
from optuna_fleet.pipeline.exchange.messages import (
    AskSize,
    ChunkFetched,
    ChunkNotFetched,
    ChunkTooLarge,
    ExchangeReady,
    FetchChunk,
    LinkChanged,
    RateMeasured,
    SizeTold,
)
from optuna_fleet.pipeline.exchange.negotiation import PlanNegotiation, echo
from optuna_fleet.pipeline.exchange.peer import Job, Peer
from optuna_fleet.pipeline.spec import ChunkKey, PipelineSpec

logger = logging.getLogger(__name__)


def exchanger_main(
    sock: socket.socket, reader: socket.socket, *, config: ExchangeConfig, spec: PipelineSpec
) -> None:
    """Serves the agent until it closes the sockets.

    Args:
        sock: Orders come and results go here.
        reader: Here this process reads as a trainer does.
        config: The exchange.
        spec: The data sets.
    """
    sock.setblocking(True)
    try:
        _Exchanger(sock, LocalReader(reader, spec), config, spec).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the agent is gone, or has no more use for this process


class _Exchanger:
    def __init__(
        self, sock: socket.socket, reader: LocalReader, config: ExchangeConfig, spec: PipelineSpec
    ) -> None:
        self._sock = sock
        self._reader = reader
        self._config = config
        self._names = [dataset.name for dataset in spec.datasets]
        self._sealer = Sealer(config.secret, about=_description(spec))
        self._bandwidth = Bandwidth()
        self._sending = threading.Lock()
        self._telling = threading.Lock()
        self._told: dict[int, bool] = {}
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._jobs: dict[Job, None] = {}  # in the order of their deadlines
        self._deadlock_guard = DeadlockGuard()
        self._negotiation = PlanNegotiation(config, self._bandwidth, self._send)

    def run(self) -> None:
        for action in (self._reader.run, self._join):
            threading.Thread(target=action, daemon=True).start()
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            if poll.poll(self._until_next_deadline_ms()):
                order, _ = wire.receive(self._sock)
                self._ordered(order)
            self._give_up_overdue()

    # Joining

    def _join(self) -> None:
        try:
            problem = "; ".join(filter(None, (self._meet(), self._probe())))
        except Exception as error:  # whatever it is: trials wait for the word
            problem = first_line(error)
        with self._telling:
            self._told = {node: not peer.overdue for node, peer in sorted(self._peers.items())}
            up = tuple(node for node, can_be_asked in self._told.items() if can_be_asked)
            self._send(ExchangeReady(up=up, problem=problem))
        self._negotiation.begin(self._peers)

    def _meet(self) -> str:
        """Returns what kept nodes away."""
        config = self._config
        if config.node == 0:
            try:
                limit_s = config.join_timeout_s
                self._meeting_point = within(limit_s, lambda: open_meeting_point(config))
            except Exception as error:
                return f"it can't open the meeting point ({first_line(error)})"
        absent = meet(
            [node for node in range(config.num_nodes) if node != config.node],
            limit_s=config.join_timeout_s,
            connect=lambda node: connect(
                config, node, sealer=self._sealer, bandwidth=self._bandwidth
            ),
            welcome=self._welcome,
        )
        return told(absent)

    def _welcome(self, node: int, link: Link) -> None:
        peer = Peer(node, link, num_lanes=self._config.num_lanes, lost=self._lost)
        self._peers[node] = peer
        peer.open(do=self._do, handle=self._handle)

    def _probe(self) -> str:
        """Measures the network with the following node; returns what was the matter with it.

        One that takes too long is not asked before it has answered.
        """
        peer = self._peers.get((self._config.node + 1) % self._config.num_nodes)
        if peer is None:
            return ""
        peer.overdue.add(self._negotiation)

        def probe() -> None:
            self._negotiation.probe(peer)
            peer.overdue.discard(self._negotiation)
            self._tell(peer.node, "it answered")

        try:
            within(self._config.join_timeout_s, probe)
        except TimeoutError as error:
            return f"node {peer.node} was asked how fast the network is ({error})"
        except (RuntimeError, ProtocolError, OSError) as error:
            self._lost(peer, str(error))
            return f"the link to node {peer.node} broke ({first_line(error)})"
        return ""

    def _lost(self, peer: Peer, error: str) -> None:
        with self._lock:
            if self._peers.pop(peer.node, None) is None:
                return  # another thread was first
        reason = first_line(error)
        logger.info("The link to node %d broke: %s", peer.node, reason)
        self._fail_all(peer.node, reason)
        self._negotiation.lost()

    # Orders of the agent

    def _ordered(self, order: object) -> None:
        if isinstance(order, RateMeasured):
            self._negotiation.measured(order)
            return
        assert isinstance(order, FetchChunk | AskSize)
        job = Job(order, time.monotonic() + self._config.fetch_timeout_s)
        with self._lock:
            peer = self._peers.get(order.node)
            if peer is not None:
                self._jobs[job] = None
                peer.put(job)
        if peer is None:
            self._fail(order, "the link broke")

    def _until_next_deadline_ms(self) -> float | None:
        with self._lock:
            first = next(iter(self._jobs), None)
        return None if first is None else max(0.0, 1000 * (first.deadline - time.monotonic()))

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = {job.order.node for job in self._jobs if job.deadline <= now}
        for node in late:
            reason = f"no answer for {self._config.fetch_timeout_s:g} s"
            logger.warning("Node %d gave %s: it is not asked again until it did.", node, reason)
            self._fail_all(node, reason)

    def _fail_all(self, node: int, reason: str) -> None:
        """Gives up whatever was asked of a node; it is not asked more before it answered that."""
        with self._lock:
            jobs = [job for job in self._jobs if job.order.node == node]
            for job in jobs:
                del self._jobs[job]
            if node in self._peers:
                self._peers[node].overdue.update(jobs)
        self._tell(node, reason)
        for job in jobs:
            self._fail(job.order, reason)

    def _fail(self, order: FetchChunk | AskSize, reason: str) -> None:
        match order:
            case FetchChunk():
                self._send(ChunkNotFetched(key=order.key, reason=reason))
            case AskSize():
                self._send(SizeTold(name=order.name, chunk_size=None))

    def _do(self, peer: Peer, lane: int, job: Job) -> None:
        """On a lane's thread: asks the peer."""
        order, fd = job.order, None
        match order:
            case AskSize():
                request = Frame(kind=Kind.SIZE, numbers=(self._names.index(order.name),))
                answer, _ = peer.link.call(lane, request)
                size = answer.numbers[NUM_ECHOED]
                result: object = SizeTold(name=order.name, chunk_size=size)
            case FetchChunk():
                result, fd = self._fetch(peer, lane, order)
        try:
            self._finish(peer, job, result, fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _fetch(self, peer: Peer, lane: int, order: FetchChunk) -> tuple[object, int | None]:
        key = order.key
        place = (self._names.index(key.name), key.epoch, key.chunk, order.chunk_size)
        request = Frame(kind=Kind.CHUNK, numbers=(*place, order.max_bytes, order.version))
        if not self._deadlock_guard.fetch(key, order.version):
            return ChunkNotFetched(key=key, reason="others wait for it here"), None
        try:
            answer, fd = peer.link.call(lane, request, sealed_file)
        except CorruptError:
            reason = f"{key} from node {peer.node} is not what was sent"
            logger.warning("%s; it is preprocessed here.", reason)
            return ChunkNotFetched(key=key, reason=reason), None
        finally:
            self._deadlock_guard.fetched(key)
        if answer.status is Status.OUTGREW:
            return ChunkTooLarge(key=key, nbytes=answer.numbers[NUM_ECHOED]), None
        if fd is None:
            return ChunkNotFetched(key=key, reason=f"node {peer.node} does not have it"), None
        if order.spill_dir is not None:
            try:
                fd = to_disk(fd, order.spill_dir)
            except OSError as error:
                return ChunkNotFetched(key=key, reason=str(error)), None
        return ChunkFetched(key=key), fd

    def _finish(self, peer: Peer, job: Job, result: object, fd: int | None) -> None:
        with self._lock:
            in_time = job in self._jobs
            self._jobs.pop(job, None)
            peer.overdue.discard(job)
        if in_time:
            self._send(result, fd)
        else:
            self._tell(peer.node, "it answered")

    # Requests of peers, each on a lane's thread

    def _handle(self, request: Frame) -> Answer:
        match request.kind:
            case Kind.CHUNK:
                return self._give(request)
            case Kind.SIZE:
                name = self._names[request.numbers[0]]
                return Answer(numbers=(self._reader.chunk_size(name),))
            case Kind.PLAN:
                return self._negotiation.answer(request)
            case Kind.PROBE:
                return echo(request)

    def _give(self, request: Frame) -> Answer:
        name, epoch, chunk, size, max_bytes, version = request.numbers[:6]
        key = ChunkKey(self._names[name], epoch, chunk)
        if not self._deadlock_guard.give(key, version):
            return Answer(status=Status.REFUSED)
        memory, release_memory = self._reader.borrow(key, size)

        def release() -> None:
            release_memory()
            self._deadlock_guard.given(key, version)

        if memory is None:
            return Answer(status=Status.REFUSED, done=release)
        if len(memory) > max_bytes:
            return Answer(status=Status.OUTGREW, numbers=(len(memory),), done=release)
        return Answer(body=memory, done=release)

    # To the agent

    def _tell(self, node: int, reason: str) -> None:
        """Tells whether a node can be asked, if that has changed."""
        with self._telling:
            peer = self._peers.get(node)
            up = peer is not None and not peer.overdue
            if self._told.get(node, up) != up:
                self._told[node] = up
                self._send(LinkChanged(node=node, up=up, reason=reason))

    def _send(self, message: object, fd: int | None = None) -> None:
        with self._sending:
            wire.send(self._sock, message, fd)


def _description(spec: PipelineSpec) -> bytes:
    """What must be the same on all nodes for their chunks to be."""
    datasets = [
        (each.name, each.num_samples, each.shuffled, _same(each.collate), _same(each.finish))
        for each in spec.datasets
    ]
    return repr((spec.seed, spec.on_error, spec.order, datasets)).encode()


def _same(pickled: bytes | None) -> bytes | None:
    """Pickled code as it is in every process that pickles it: without cloudpickle's random ids.

    Code that differs nevertheless (a set may) costs the exchange, but nobody's data is wrong.
    """
    return None if pickled is None else re.sub(rb"[0-9a-f]{32}", b"", pickled)
