"""Virtual workers in one process, and an oracle that does on one device what they recorded.

One pass comes after the other, by a clock of its own: whose turn it is depends on how long passes
are said to take, not on how long they take. Runs are deterministic, unlike speeds cost no time,
and they are what the simulator says.
"""

from __future__ import annotations

import copy
import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from optuna_fleet.virtual_workers.parameter_server import (
    Directory,
    ParameterServer,
    ServerClient,
)
from optuna_fleet.virtual_workers.stage import Loss, PassDone, PipelineStage
from optuna_fleet.virtual_workers.stage_messages import (
    Message,
    Pull,
    Push,
    StageAddress,
    Tensors,
    ToStage,
)
from optuna_fleet.virtual_workers.versions import (
    FlushedWeights,
    SgdRule,
    VersionedWeights,
    Weights,
)
from optuna_fleet.virtual_workers.whole import parameters_of, part_of
from optuna_fleet.virtual_workers.wsp import Flush, Pass, Turn, WaveSynchronous

Address = StageAddress | int
"""A server's is the piece that it has."""
Observer = Callable[[StageAddress, PassDone], None]
Seconds = Callable[[StageAddress, Turn], float]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Batches = Callable[[int, int], tuple[Any, Any]]
"""Inputs and targets of a virtual worker's minibatch, counted from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Virtual workers that train one model.

    Attributes:
        model: Its layers. One virtual worker with flushes trains its own parameters; else these
            are w_0.
        cuts: Of each virtual worker, where its stages end, without the last.
        schedule: When a minibatch may start; with flushes, or without a clock distance, there is
            one virtual worker.
        loss: From the model's output and a minibatch's targets to a scalar.
        optimizer: Makes the optimizer of some of the parameters.
    """

    model: nn.Sequential
    cuts: tuple[tuple[int, ...], ...]
    schedule: WaveSynchronous | Flush
    loss: Loss
    optimizer: MakeOptimizer

    @property
    def is_alone(self) -> bool:
        """Whether there is one virtual worker, so that no servers are needed."""
        return len(self.cuts) == 1

    @property
    def directory(self) -> Directory:
        """With a rank for each stage, all on one node."""
        ranks = count()
        of_workers = [[next(ranks) for _ in (*cuts, ())] for cuts in self.cuts]
        layers, nodes = dict.fromkeys(self.model._modules, 1.0), [0] * next(ranks)
        return Directory.of(of_workers, self.cuts, layers, nodes)

    def stage(self, address: StageAddress, transport: InProcess) -> PipelineStage:
        """Make a stage; copies of its part, so that virtual workers share nothing."""
        bounds = (0, *self.cuts[address.worker], len(self.model))
        part = part_of(self.model, bounds[address.stage], bounds[address.stage + 1])
        if not self.is_alone:
            part = copy.deepcopy(part)
        return PipelineStage(
            address=address,
            num_stages=len(bounds) - 1,
            part=part,
            loss=self.loss,
            weights=self._weights(address, part, transport),
            schedule=self.schedule,
            transport=transport,
        )

    def server(self, piece: int, transport: InProcess) -> ParameterServer:
        """Make a parameter server."""
        assert isinstance(self.schedule, WaveSynchronous)
        assert self.schedule.clock_distance is not None
        return ParameterServer(
            piece=piece,
            weights=parameters_of(part_of(self.model, *self.directory.pieces[piece])),
            num_workers=len(self.cuts),
            clock_distance=self.schedule.clock_distance,
            transport=transport,
        )

    def _weights(self, address: StageAddress, part: nn.Module, transport: InProcess) -> Weights:
        parameters = dict(parameters_of(part))
        optimizer = self.optimizer([*parameters.values(), nn.Parameter(torch.zeros(()))])
        if isinstance(self.schedule, Flush):
            size = self.schedule.wave_size
            return FlushedWeights(parameters, optimizer, size, lambda parameters: None)
        client = None
        if not self.is_alone:
            client = ServerClient(address, self.directory, transport)
        rule = SgdRule(optimizer, parameters.items())
        return VersionedWeights(parameters, rule, self.schedule.wave_size, client)


class InProcess:
    """A transport, and the loop that runs who is connected by it.

    Args:
        pass_s: How long a pass takes; all take a second if not given.
        latency_s: How long a message takes.
    """

    def __init__(
        self, pass_s: Seconds | None = None, latency_s: Callable[[], float] | None = None
    ) -> None:
        self._pass_s = pass_s or (lambda _address, _turn: 1.0)
        self._latency_s = latency_s or (lambda: 0.0)
        self._observe: Observer | None = None
        self._stages: dict[StageAddress, PipelineStage] = {}
        self._servers: dict[int, ParameterServer] = {}
        self._busy: set[StageAddress] = set()
        self._speaks: Address | None = None
        self._sent: list[tuple[Address, Message]] | None = None
        self._arrival_s: dict[tuple[Address | None, Address], float] = {}
        self._events: list[tuple[float, int, partial[None]]] = []
        self._order = count()
        self.now_s = 0.0

    def connect(
        self,
        stages: dict[StageAddress, PipelineStage],
        servers: dict[int, ParameterServer],
        observe: Observer,
    ) -> None:
        """From now on messages are theirs."""
        self._stages, self._servers, self._observe = stages, servers, observe

    def send(self, to: StageAddress, message: ToStage) -> None:
        self._say(to, message)

    def ask(self, message: Push | Pull) -> None:
        self._say(message.piece, message)

    def _say(self, to: Address, message: Message) -> None:
        """What a pass sends leaves when the pass is over."""
        if self._sent is not None:
            self._sent.append((to, message))
            return
        edge = (self._speaks, to)
        arrival_s = max(self.now_s + self._latency_s(), self._arrival_s.get(edge, 0.0))
        self._arrival_s[edge] = arrival_s  # in order, whatever the latencies
        self._at(arrival_s, partial(self._deliver, to, message))

    def run(self) -> None:
        """Go on until nothing is left to do."""
        for stage in self._stages.values():
            self._go_on(stage)
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when_s: float, event: partial[None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), event))

    def _deliver(self, to: Address, message: Message) -> None:
        self._speaks = to
        if isinstance(message, Push | Pull):
            self._servers[message.piece].receive(message)
            return
        assert isinstance(to, StageAddress)
        self._stages[to].receive(message)
        self._go_on(self._stages[to])

    def _go_on(self, stage: PipelineStage) -> None:
        self._speaks = stage.address
        if stage.address in self._busy or (turn := stage.next_turn()) is None:
            return
        self._busy.add(stage.address)
        sent: list[tuple[Address, Message]] = []
        self._sent = sent
        done = stage.run(turn)
        self._sent = None
        if self._observe is not None:
            self._observe(stage.address, done)
        duration_s = self._pass_s(stage.address, turn)
        self._at(self.now_s + duration_s, partial(self._end, stage, sent))

    def _end(self, stage: PipelineStage, sent: list[tuple[Address, Message]]) -> None:
        self._busy.discard(stage.address)
        self._speaks = stage.address
        for to, message in sent:
            self._say(to, message)
        self._go_on(stage)


LR = 0.05


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LR)


def mlp(width: int = 6, depth: int = 4) -> nn.Sequential:
    """As many layers as `depth`, in float64."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers).double()


def batch(worker: int, number: int, width: int = 6, size: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + number)
    x = torch.randn(2, size, width, generator=generator, dtype=torch.float64)
    return x[0], x[1]


@dataclass
class Run:
    """What came of it: passes in their order, and everybody's state."""

    transport: InProcess
    stages: dict[StageAddress, PipelineStage]
    servers: dict[int, ParameterServer]
    passes: list[tuple[StageAddress, PassDone]] = field(default_factory=list)

    def note(self, address: StageAddress, done: PassDone) -> None:
        self.passes.append((address, done))

    @property
    def starts(self) -> list[tuple[int, int, Any]]:
        """(virtual worker, minibatch, tag) as first stages started them."""
        return [
            (address.worker, done.turn.number, done.tag)
            for address, done in self.passes
            if address.stage == 0 and done.turn.what is Pass.FORWARD
        ]

    @property
    def weights(self) -> dict[str, Tensor]:
        """What training came to: of the servers, or of all stages of the only virtual worker."""
        parts: list[Tensors] = [server.weights for server in self.servers.values()]
        if not parts:
            parts = [stage.weights.latest() for stage in self.stages.values()]  # type: ignore
        return {name: w.detach() for part in parts for name, w in part.items()}


def train(
    blueprint: Blueprint,
    num_waves: int,
    *,
    batches: Batches = batch,
    pass_s: Seconds | None = None,
    latency_s: Callable[[], float] | None = None,
) -> Run:
    """Run until every virtual worker has trained as many waves."""
    transport, directory = InProcess(pass_s, latency_s), blueprint.directory
    run = Run(
        transport=transport,
        stages={a: blueprint.stage(a, transport) for a in directory.stages},
        servers={p: blueprint.server(p, transport) for p in range(len(directory.hosts))},
    )
    transport.connect(run.stages, run.servers, run.note)
    num_minibatches = num_waves * blueprint.schedule.wave_size
    for address, stage in run.stages.items():
        for number in range(1, num_minibatches + 1):
            stage.give(number, *batches(address.worker, number))
    transport.run()
    ended = Counter((address, done.turn.what) for address, done in run.passes)
    assert set(ended.values()) == {num_minibatches}, "some never ended"
    return run


class Oracle:
    """Plain SGD on one device, at the weights that the tags of a run say."""

    def __init__(self, blueprint: Blueprint, batches: Batches = batch) -> None:
        self._model = blueprint.model
        self._loss = blueprint.loss
        self._batches = batches
        self._wave_size = blueprint.schedule.wave_size
        self._num_workers = len(blueprint.cuts)
        first = {name: p.detach().clone() for name, p in self._model.named_parameters()}
        self._snapshots: list[Tensors] = [first]
        self._updates: dict[tuple[int, int], Tensors] = {}

    def weights(self, starts: list[tuple[int, int, Any]]) -> Tensors:
        """After all minibatches of a run, which started in this order."""
        for worker, number, tag in starts:
            self._updates[worker, number] = self._update(worker, number, tag)
        numbers = max(number for _, number, _ in starts)
        return self._snapshot(numbers // self._wave_size)

    def _update(self, worker: int, number: int, tag: Any) -> Tensors:
        weights = self._snapshot(tag.clock)
        for own in range(tag.clock * self._wave_size + 1, tag.local + 1):
            weights = self._plus(weights, self._updates[worker, own])
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        x, y = self._batches(worker, number)
        self._loss(functional_call(self._model, leaves, (x,)), y).backward()
        return {name: -LR * w.grad for name, w in leaves.items() if w.grad is not None}

    def _snapshot(self, clock: int) -> Tensors:
        while len(self._snapshots) <= clock:
            wave, weights = len(self._snapshots) - 1, self._snapshots[-1]
            for number in range(wave * self._wave_size + 1, (wave + 1) * self._wave_size + 1):
                for worker in range(self._num_workers):
                    weights = self._plus(weights, self._updates[worker, number])
            self._snapshots.append(weights)
        return self._snapshots[clock]

    @staticmethod
    def _plus(weights: Tensors, update: Tensors) -> Tensors:
        return {n: w + update[n] if n in update else w for n, w in weights.items()}


def furthest(some: Tensors, others: Tensors) -> float:
    """The largest difference of two sets of weights."""
    assert some.keys() == others.keys()
    return max((some[name] - others[name]).abs().max().item() for name in some)
