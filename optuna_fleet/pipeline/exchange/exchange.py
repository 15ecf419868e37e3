"""The exchange as the agent sees it: which chunks other nodes are asked for, and what they say."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from optuna_fleet.pipeline.exchange.alarm import Alarm
from optuna_fleet.pipeline.exchange.config import ExchangeConfig
from optuna_fleet.pipeline.exchange.messages import (
    AskSize,
    ChunkFetched,
    ChunkNotFetched,
    ChunkTooLarge,
    ExchangeReady,
    FetchChunk,
    LinkChanged,
    PlanChosen,
    RateMeasured,
    SizeTold,
)
from optuna_fleet.pipeline.exchange.scheme import source
from optuna_fleet.pipeline.server.instructions import Produce
from optuna_fleet.pipeline.server.workers import Spawn
from optuna_fleet.pipeline.spec import ChunkKey, PipelineSpec
from optuna_fleet.pipeline.wire import Port, socket_pair

logger = logging.getLogger(__name__)

_CHUNKS_TO_MEASURE = 4
"""The decode rate is the median over so many chunks."""

_START_S = 60.0
"""What the exchanger may take to start: it imports torch, perhaps from a slow disk."""

_GRACE_S = 10.0
"""How much later than it should an exchanger may give its answers on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inlets:
    """Whom the exchange tells what came.

    Attributes:
        fetched: Given a chunk and its file.
        outgrew: Given a chunk that takes more bytes than was allowed.
        unfetched: Given the order of a chunk that is to be made here after all.
        sized: Given a data set and its chunk size, or None: ask again.
        changed: Called after each of these, and when other chunks can be fetched than before.
    """

    fetched: Callable[[ChunkKey, int], None]
    outgrew: Callable[[ChunkKey, int], None]
    unfetched: Callable[[Produce], None]
    sized: Callable[[str, int | None], None]
    changed: Callable[[], None]


class Exchange:
    """Routes chunks to the exchanger process, and keeps what is known of the other nodes.

    Args:
        config: The exchange; None for a node by itself, for which nothing is ever fetched.
        spec: The data sets.
        inlets: Whom to tell.
        room_bytes: Memory that may be set aside for chunks on their way. If it were all there is,
            two nodes that fetch from each other would have no room to make what the other waits
            for.

    Attributes:
        pid: The exchanger's, while it runs.
    """

    def __init__(
        self,
        config: ExchangeConfig | None,
        *,
        spec: PipelineSpec,
        inlets: Inlets,
        room_bytes: int,
    ) -> None:
        self._config = config
        self._spec = spec
        self._inlets = inlets
        self._room_bytes = room_bytes
        self._plan = config.first_plan() if config else None
        self._port: Port | None = None
        self._alarm: Alarm | None = None
        self._is_ready = config is None
        self._up: set[int] = set()
        self._fetching: dict[ChunkKey, tuple[int, Produce]] = {}
        self._asked: set[str] = set()
        self._late: set[object] = set()
        self._rates: list[float] = []
        self._trouble = "" if config else "there is one node"
        self._reason = "as it was given"
        if config and config.scheme == "auto":
            self._reason = "until measurements have chosen"
        self.pid: int | None = None

    @property
    def status(self) -> str:
        """A sentence about the plan and its reason."""
        if self._trouble and not self._reachable:
            return f"self: {self._trouble}"
        return f"{self._plan}: {self._reason}"

    def start(
        self,
        *,
        spawn: Spawn,
        selector: selectors.BaseSelector,
        close_in_child: Callable[[], None],
    ) -> socket.socket | None:
        """Starts the exchanger; returns the socket on which it reads as a trainer does."""
        config, spec = self._config, self._spec
        if config is None:
            return None
        ours, theirs = socket_pair()

        def main(sock: socket.socket) -> None:
            ours.close()
            close_in_child()
            # Imported in the child: the agent itself never uses torch.
            from optuna_fleet.pipeline.exchange.exchanger import exchanger_main

            exchanger_main(sock, theirs, config=config, spec=spec)

        self.pid, sock = spawn(main)
        theirs.close()
        self._port = Port(sock, selector, on_message=self._received, on_close=self._died)
        self._alarm = Alarm(selector, self._silent)
        self._watch()
        return ours

    def close(self) -> None:
        """Cuts off the exchanger, which exits when it notices."""
        if self._port is not None:
            self._port.close()
        if self._alarm is not None:
            self._alarm.close()

    def close_in_child(self) -> None:
        """Closes what a forked child inherited."""
        if self._port is not None:
            self._port.close_in_child()
        if self._alarm is not None:
            self._alarm.close_in_child()

    # What to ask whom

    def source(self, key: ChunkKey) -> int | None:
        """Returns the node to fetch a chunk from, or None: it is to be preprocessed here."""
        if self._config is None or self._plan is None:
            return None
        return source(self._plan, self._config.node, key.chunk, self._reachable)

    def has_room(self, node: int | None = None) -> bool:
        """Returns whether a node (None: any) may be asked for one more chunk now."""
        on_the_way = sum(order.max_bytes for _, order in self._fetching.values())
        if self._config is None or on_the_way > self._room_bytes:
            return False
        nodes = self._reachable if node is None else {node}
        asked = [each for each, _ in self._fetching.values()]
        return any(asked.count(each) < self._config.num_lanes for each in nodes)

    def fetch(self, order: Produce, *, node: int, chunk_size: int, spill_dir: str | None) -> None:
        """Has a chunk fetched."""
        self._fetching[order.key] = node, order
        self._send(
            FetchChunk(
                key=order.key,
                chunk_size=chunk_size,
                max_bytes=order.max_bytes,
                node=node,
                version=self._plan.version if self._plan else 0,
                spill_dir=spill_dir if order.place == "disk" else None,
            )
        )
        self._expect()

    def ask_size(self, name: str) -> bool:
        """Asks how many samples make a chunk; returns False if that is for this node to say.

        Chunks must be the same on all nodes: the lowest one that can be asked decides. Nobody
        decides before it is known who takes part.
        """
        first = min(self._reachable, default=None)
        if self._is_ready and (first is None or first > self._own_node):
            return False
        self._asked.add(name)
        if first is not None:
            self._send(AskSize(name=name, node=first))
            self._expect()
        return True

    def preprocessed(self, *, num_samples: int, busy_s: float, nbytes: int, workers: int) -> None:
        """A preprocessor of this node, of so many, made a chunk: measures the decode rate."""
        self._rates.append(num_samples / max(busy_s, 1e-9))
        if len(self._rates) == _CHUNKS_TO_MEASURE:
            self._send(
                RateMeasured(
                    samples_per_s=statistics.median(self._rates) * workers,
                    sample_bytes=nbytes / num_samples,
                    chunk_samples=num_samples,
                )
            )

    @property
    def _own_node(self) -> int:
        return self._config.node if self._config else 0

    @property
    def _reachable(self) -> set[int]:
        """Nodes that can be asked: none while our own exchanger does not answer."""
        return set() if self._late else self._up

    def _send(self, message: object) -> None:
        if self._port is not None:
            self._port.send(message)

    # What the exchanger says

    def _received(self, message: object, fd: int | None) -> None:
        match message:
            case ExchangeReady():
                self._answers(ExchangeReady)
                self._joined(message)
            case LinkChanged():
                (self._up.add if message.up else self._up.discard)(message.node)
            case PlanChosen():
                self._plan, self._reason = message.plan, message.reason
                logger.info("Nodes exchange preprocessed samples by %s", self.status)
            case SizeTold():
                if self._answers(message.name):
                    self._asked.discard(message.name)
                    self._inlets.sized(message.name, message.chunk_size)
            case ChunkFetched() | ChunkTooLarge() | ChunkNotFetched():
                self._fetched(message, fd)
        self._inlets.changed()
        self._watch()

    def _fetched(
        self, message: ChunkFetched | ChunkTooLarge | ChunkNotFetched, fd: int | None
    ) -> None:
        if not self._answers(message.key):
            if fd is not None:
                os.close(fd)
            return
        _, order = self._fetching.pop(message.key)
        match message:
            case ChunkFetched(key=key):
                assert fd is not None
                self._inlets.fetched(key, fd)
            case ChunkTooLarge(key=key):
                self._inlets.outgrew(key, message.nbytes)
            case ChunkNotFetched():
                self._inlets.unfetched(order)

    def _joined(self, message: ExchangeReady) -> None:
        self._trouble = message.problem
        if message.problem and self._config is not None:
            logger.warning(
                "Node %d %s: %s. Look whether all nodes run, resolve %s and reach its port %d, "
                "whether it is free for node 0, and whether all have the same secret, seed and "
                "data sets, finished on the same kind of device.",
                self._own_node,
                "does without some nodes" if message.up else "preprocesses all for itself",
                message.problem,
                self._config.host,
                self._config.port,
            )
        self._take_part(message.up)

    def _take_part(self, up: tuple[int, ...]) -> None:
        self._is_ready = True
        self._up = set(up)
        self._ask_again()

    def _ask_again(self) -> None:
        asked, self._asked = self._asked, set()
        for name in asked:
            self._inlets.sized(name, None)

    def _died(self) -> None:
        """Without its exchanger this node works for itself."""
        if self._alarm is not None:
            self._alarm.close()
        self._port = self._alarm = self._plan = self.pid = None
        self._trouble = "the exchanger of this node died"
        logger.warning("The exchanger of node %d died: it goes on alone.", self._own_node)
        self._up = set()
        self._go_on_alone()

    def _go_on_alone(self) -> None:
        """Whatever the exchanger was to get is made here."""
        orders = [order for _, order in self._fetching.values()]
        self._fetching.clear()
        self._is_ready = True
        self._ask_again()
        for order in orders:
            self._inlets.unfetched(order)
        self._inlets.changed()

    # Whether the exchanger answers at all. It gives up on other nodes by itself and says so; as
    # long as it lives, all that it is asked is answered, once.

    def _expect(self) -> None:
        """Something was asked: it has its time from now, or from what was asked before it."""
        if self._alarm is not None and not self._alarm.is_set:
            self._watch()

    def _watch(self) -> None:
        """The exchanger is alive at this moment."""
        if self._alarm is None or self._config is None:
            return
        limit_s = self._config.fetch_timeout_s + _GRACE_S
        if not self._is_ready:  # each of three steps has its own limit: see the exchanger
            limit_s = 3 * self._config.join_timeout_s + _START_S
        self._alarm.set(limit_s if self._owes() else None)

    def _owes(self) -> bool:
        return bool(not self._is_ready or self._fetching or self._asked)

    def _silent(self) -> None:
        """It is stopped or stuck: it is done without until it has answered what it owes."""
        if self._port is not None:
            self._port.drain()  # perhaps it was this process that stood still
        if self._alarm is None or self._alarm.is_set or not self._owes():
            return
        self._late = {ExchangeReady}
        if self._is_ready:
            self._late = {*self._fetching, *self._asked}
        self._trouble = "the exchanger of this node does not answer"
        logger.warning(
            "The exchanger of node %d (process %s) does not answer: node %d preprocesses all for "
            "itself until it does. Look whether that process is stopped (SIGSTOP, a debugger).",
            self._own_node,
            self.pid,
            self._own_node,
        )
        self._go_on_alone()

    def _answers(self, owed: object) -> bool:
        """Takes notice of an answer; returns whether it is still waited for."""
        if owed not in self._late:
            return True
        self._late.discard(owed)
        if not self._late:
            self._trouble = ""
            logger.info("The exchanger of node %d answers again.", self._own_node)
        return False
