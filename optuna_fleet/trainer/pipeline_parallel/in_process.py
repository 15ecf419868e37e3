"""All stages and servers in one process, one pass after the other, by a clock of its own.

Whose turn it is depends on how long passes are said to take, not on how long they take: runs are
deterministic, unlike speeds cost no time, and they are what the simulator of `replay` says.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor

from optuna_fleet.trainer.pipeline_parallel.blueprint import Blueprint
from optuna_fleet.trainer.pipeline_parallel.messages import (
    Address,
    Inputs,
    Message,
    ServerAddress,
    StageAddress,
    Targets,
    Tensors,
)
from optuna_fleet.trainer.pipeline_parallel.server import ParameterServer
from optuna_fleet.trainer.pipeline_parallel.stage import Observer, PipelineStage
from optuna_fleet.wsp.turns import Turn

Seconds = Callable[[StageAddress, Turn], float]


class InProcess:
    """A transport, and the loop that runs who is connected by it.

    Args:
        pass_s: How long a pass takes; all take a second if not given.
        latency_s: How long a message takes.
    """

    def __init__(
        self,
        pass_s: Seconds | None = None,
        latency_s: Callable[[Address, Address], float] | None = None,
    ) -> None:
        self._pass_s = pass_s or (lambda _address, _turn: 1.0)
        self._latency_s = latency_s or (lambda _sender, _to: 0.0)
        self._actors: dict[Address, PipelineStage | ParameterServer] = {}
        self._busy: set[Address] = set()
        self._sent: list[tuple[Address, Address, Message]] | None = None
        self._arrival_s: dict[tuple[Address, Address], float] = {}
        self._events: list[tuple[float, int, partial[None]]] = []
        self._order = count()
        self.now_s = 0.0

    def connect(self, address: Address, actor: PipelineStage | ParameterServer) -> None:
        """From now on messages to this address are the actor's."""
        self._actors[address] = actor

    def send(self, sender: Address, to: Address, message: Message) -> None:
        """What a pass sends leaves when the pass is over."""
        if self._sent is not None:
            self._sent.append((sender, to, message))
            return
        edge = (sender, to)
        arrival_s = max(self.now_s + self._latency_s(*edge), self._arrival_s.get(edge, 0.0))
        self._arrival_s[edge] = arrival_s  # in order, whatever the latencies
        self._at(arrival_s, partial(self._deliver, to, message))

    def run(self) -> None:
        """Go on until nothing is left to do."""
        for actor in self._actors.values():
            self._go_on(actor)
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when_s: float, event: partial[None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), event))

    def _deliver(self, to: Address, message: Message) -> None:
        actor = self._actors[to]
        actor.receive(message)
        self._go_on(actor)

    def _go_on(self, actor: PipelineStage | ParameterServer) -> None:
        if isinstance(actor, ParameterServer) or actor.address in self._busy:
            return
        if (turn := actor.next_turn()) is None:
            return
        self._busy.add(actor.address)
        sent: list[tuple[Address, Address, Message]] = []
        self._sent = sent
        actor.run(turn)
        self._sent = None
        duration_s = self._pass_s(actor.address, turn)
        self._at(self.now_s + duration_s, partial(self._end, actor, sent))

    def _end(self, actor: PipelineStage, sent: list[tuple[Address, Address, Message]]) -> None:
        self._busy.discard(actor.address)
        for sender, to, message in sent:
            self.send(sender, to, message)
        self._go_on(actor)


Batches = Callable[[int, int], tuple[Any, Any]]
"""Inputs and targets of a virtual worker's minibatch, counted from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Everybody that a blueprint tells of, connected by one transport."""

    stages: Mapping[StageAddress, PipelineStage]
    servers: Mapping[ServerAddress, ParameterServer]

    @classmethod
    def of(
        cls, blueprint: Blueprint, transport: InProcess, observer: Observer | None = None
    ) -> Workers:
        """Make and connect them."""
        stages = {a: blueprint.stage(a, transport, observer) for a in blueprint.stages}
        servers = {a: blueprint.server(a, transport) for a in blueprint.servers}
        for stage_address, stage in stages.items():
            transport.connect(stage_address, stage)
        for server_address, server in servers.items():
            transport.connect(server_address, server)
        return cls(stages=stages, servers=servers)

    def give(self, batches: Batches, num_minibatches: int) -> None:
        """Give so many minibatches to each virtual worker; `InProcess.run` trains them."""
        for worker, last in {a.worker: a.stage for a in sorted(self.stages)}.items():
            for number in range(1, num_minibatches + 1):
                inputs, targets = batches(worker, number)
                first, end = StageAddress(worker, 0), StageAddress(worker, last)
                self.stages[first].receive(Inputs(number=number, values=inputs))
                self.stages[end].receive(Targets(number=number, values=targets))

    def weights(self) -> dict[str, Tensor]:
        """What training came to: of the servers, or of all stages of the only virtual worker."""
        parts: list[Tensors] = [server.weights for server in self.servers.values()]
        if not parts:
            parts = [stage.weights.latest() for stage in self.stages.values()]
        return {name: w.detach() for part in parts for name, w in part.items()}
