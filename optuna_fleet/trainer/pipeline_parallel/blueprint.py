"""Which stages and servers there are, and how each of them is made, wherever it is to run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.pipeline_parallel.agreement import names_by_piece
from optuna_fleet.trainer.pipeline_parallel.directory import Directory
from optuna_fleet.trainer.pipeline_parallel.flushed import FlushedWeights
from optuna_fleet.trainer.pipeline_parallel.messages import (
    ServerAddress,
    StageAddress,
    Tensors,
    Transport,
)
from optuna_fleet.trainer.pipeline_parallel.parts import check_parts, parameters_of, part_of
from optuna_fleet.trainer.pipeline_parallel.passes import Loss
from optuna_fleet.trainer.pipeline_parallel.server import ParameterServer
from optuna_fleet.trainer.pipeline_parallel.server_client import ServerClient
from optuna_fleet.trainer.pipeline_parallel.stage import Observer, PipelineStage
from optuna_fleet.trainer.pipeline_parallel.updates import SgdRule
from optuna_fleet.trainer.pipeline_parallel.versions import VersionedWeights, Weights
from optuna_fleet.wsp.schedules import Alone, Flush, WaveSynchronous

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Virtual workers that train one model.

    Attributes:
        model: Its layers in order; what goes from one to the next are tensors, also nested in
            dicts, lists and tuples (so a skip connection can go along). A virtual worker that is
            alone and flushed trains the model's own parameters; else its parameters are w_0.
        cuts: Of each virtual worker, where its stages end, without the last.
        schedule: When a minibatch may start.
        loss: From the model's output and a minibatch's targets to a scalar.
        optimizer: Makes the optimizer of some of the parameters. Without flushes, and with several
            virtual workers, it must be SGD (see :mod:`.updates`).

    Raises:
        FleetConfigError: The model can't be cut like this.
    """

    model: nn.Sequential
    cuts: tuple[tuple[int, ...], ...]
    schedule: WaveSynchronous | Flush
    loss: Loss
    optimizer: MakeOptimizer

    def __post_init__(self) -> None:
        if not self.cuts:
            raise FleetConfigError("The value of `cuts` is empty, but there must be a worker.")
        for cuts in self.cuts:
            check_parts(self.model, cuts)
        check_parts(self.model, sorted({cut for cuts in self.cuts for cut in cuts}))

    @property
    def is_alone(self) -> bool:
        """Whether there is one virtual worker, so that no servers are needed."""
        return len(self.cuts) == 1

    @property
    def directory(self) -> Directory:
        """Who has which pieces of the model; servers are beside stages only where it matters."""
        ranks = count()
        of_workers = [[next(ranks) for _ in (*cuts, ())] for cuts in self.cuts]
        layers, nodes = [1.0] * len(self.model), [0] * next(ranks)
        return Directory.of(of_workers, self.cuts, layers, nodes, has_servers=not self.is_alone)

    @property
    def stages(self) -> tuple[StageAddress, ...]:
        """All of them."""
        return tuple(self.directory.stages)

    @property
    def servers(self) -> tuple[ServerAddress, ...]:
        """All of them: none for a virtual worker that is alone."""
        return tuple(map(ServerAddress, range(len(self.directory.hosts))))

    def stage(
        self, address: StageAddress, transport: Transport, observer: Observer | None = None
    ) -> PipelineStage:
        """Make a stage; copies of its part, so that virtual workers share nothing."""
        bounds = (0, *self.cuts[address.worker], len(self.model))
        first, end = bounds[address.stage], bounds[address.stage + 1]
        part = part_of(self.model, first, end)
        if not self.is_alone:
            part = copy.deepcopy(part)
        return PipelineStage(
            address=address,
            num_stages=len(bounds) - 1,
            part=part,
            loss=self.loss,
            weights=self._weights(address, part, transport),
            schedule=Alone(self.schedule) if self.is_alone else self.schedule,
            transport=transport,
            observer=observer,
        )

    def server(self, address: ServerAddress, transport: Transport) -> ParameterServer:
        """Make a parameter server."""
        piece = self.directory.pieces[address.piece]
        return ParameterServer(
            address=address,
            weights=parameters_of(part_of(self.model, *piece)),
            num_workers=len(self.cuts),
            clock_distance=self.schedule.clock_distance,
            transport=transport,
        )

    def _weights(self, address: StageAddress, part: nn.Module, transport: Transport) -> Weights:
        parameters = dict(parameters_of(part))
        optimizer = self.optimizer(parameters.values()) if parameters else None
        wave_size = self.schedule.wave_size
        if self.is_alone and isinstance(self.schedule, Flush):
            return FlushedWeights(parameters, optimizer, wave_size)
        client = None
        if not self.is_alone:
            names = names_by_piece(self.model, self.directory, address)
            client = ServerClient(address, names, transport)
        rule = SgdRule(optimizer, parameters.items()) if optimizer else _no_updates
        return VersionedWeights(parameters, rule, wave_size, client)


def _no_updates(weights: Tensors, gradients: Tensors) -> dict[str, Tensor]:
    return {}
