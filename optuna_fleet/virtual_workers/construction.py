"""What this rank of a trial has of its virtual workers: a stage, and perhaps servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.groups import group_size, wire_device
from optuna_fleet.virtual_workers.agreement import Agreement, Statistics, names_by_piece
from optuna_fleet.virtual_workers.parameter_server import ParameterServer, ServerClient
from optuna_fleet.virtual_workers.pipeline_options import PipelineOptions
from optuna_fleet.virtual_workers.placing import Placed
from optuna_fleet.virtual_workers.stage import Loss, Observer, PipelineStage
from optuna_fleet.virtual_workers.stage_messages import ServerAddress
from optuna_fleet.virtual_workers.versions import (
    FlushedWeights,
    SgdRule,
    VersionedWeights,
    Weights,
)
from optuna_fleet.virtual_workers.whole import parameters_of, part_of
from optuna_fleet.virtual_workers.wsp import Flush, Schedule, WaveSynchronous

_HOOKS = "_post_accumulate_grad_hooks"


class Construction:
    """Makes them anew, whenever training begins from weights that all agree on.

    Args:
        model: The whole one; layers of other stages have no memory.
        names: Of all parameters that are trained.

    Attributes:
        rule: From gradients to updates; None where the optimizer steps.
        agreement: With the same layers of other virtual workers.
        statistics: Of BatchNorm, with flushes and several virtual workers.
    """

    def __init__(
        self,
        model: nn.Sequential,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        names: Sequence[str],
        options: PipelineOptions,
        placed: Placed,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._names = names
        self._options = options
        self.placed = placed
        share = 1 / placed.num_workers
        self.rule: SgdRule | None = None
        if not options.is_flushed:
            self.rule = SgdRule(optimizer, parameters_of(placed.part).items(), share)
        self._trained = set(parameters_of(placed.part))
        differing = None if options.is_flushed else optimizer
        self.agreement = Agreement(placed.part, differing, share)
        self.statistics = Statistics(placed.part, placed.address.worker, placed.num_workers)

    @property
    def in_flight(self) -> int:
        """Parts of a batch; without flushes, minibatches of a wave."""
        return self.placed.placement.in_flight

    @property
    def parts(self) -> range:
        """Which parts of a batch go through this virtual worker, as a minibatch each."""
        if not self._options.is_flushed:
            return range(1)
        worker, number = self.placed.address.worker, self.placed.num_workers
        in_flight, shares = self.in_flight, self.placed.placement.shares
        if shares:
            return range(sum(shares[:worker]), sum(shares[: worker + 1]))
        return range(worker * in_flight // number, (worker + 1) * in_flight // number)

    @property
    def schedule(self) -> Schedule:
        """When a minibatch may start."""
        if self._options.is_flushed:
            return Flush(len(self.parts))
        is_alone = self.placed.num_workers == 1
        distance = None if is_alone else self._options.clock_distance
        return WaveSynchronous(self.in_flight, distance)

    def stage(self, observer: Observer) -> PipelineStage:
        """Begins with the module's weights, and minibatch 1."""
        placed = self.placed
        return PipelineStage(
            address=placed.address,
            num_stages=placed.num_stages,
            part=placed.part,
            loss=self._loss,
            weights=self._weights(),
            schedule=self.schedule,
            transport=placed.edges or _NoTransport(),
            observer=observer,
            most_held=placed.placement.held,
        )

    def servers(self) -> dict[int, ParameterServer]:
        """Those of this rank, by their pieces; they begin with the module's weights, too."""
        placed = self.placed
        if placed.edges is None:
            return {}
        return {
            place: ParameterServer(
                address=ServerAddress(place),
                weights={
                    n: p.detach().cpu() for n, p in parameters_of(self._piece(place)).items()
                },
                num_workers=placed.num_workers,
                clock_distance=self._options.clock_distance or 0,
                transport=placed.edges,
            )
            for place in placed.directory.hosted(placed.rank)
        }

    def _weights(self) -> Weights:
        placed = self.placed
        if self.rule is None:
            parameters = dict(placed.part.named_parameters())  # also those to be trained later
            return FlushedWeights(parameters, self._optimizer, len(self.parts), self._before_step)
        parameters = dict(parameters_of(placed.part))
        if changed := self._trained ^ parameters.keys():
            raise FleetConfigError(
                f"`requires_grad` of {min(changed)!r} has changed since the first batch, but only "
                "pipelines with flushes can begin or cease to train a parameter: leave out "
                "`clock_distance` and flush=False, or give it a learning rate of 0 meanwhile."
            )
        for name, parameter in parameters.items():
            if getattr(parameter, _HOOKS, None):
                raise FleetConfigError(
                    f"The parameter {name!r} has a hook for when its gradient is accumulated, but "
                    "without flushes that never is: use `register_hook`, or train with flushes."
                )
        client = None
        if placed.edges is not None and placed.num_workers > 1:
            names = names_by_piece(self._model, placed.directory, placed.address)
            client = ServerClient(placed.address, names, placed.edges)
        return VersionedWeights(parameters, self.rule, self.in_flight, client)

    def _piece(self, place: int) -> nn.Sequential:
        return part_of(self._model, *self.placed.directory.pieces[place])

    def _before_step(self, parameters: Mapping[str, nn.Parameter]) -> None:
        placed = self.placed
        placed.ties.add_up()
        if placed.columns is not None:
            calls = placed.columns.add_gradients(parameters, self.statistics.calls())
            left = placed.columns.add(self.statistics.left(calls))
            self.statistics.take(left, calls)
        placed.ties.clear()
        for parameter in parameters.values():
            hooks = getattr(parameter, _HOOKS, None) if parameter.grad is not None else None
            for hook in (hooks or {}).values():
                hook(parameter)
        if (most := self._options.max_grad_norm) is not None:
            is_copy = placed.address.worker > 0
            _clip_gradients(parameters, self._names, most, is_copy=is_copy)


class _NoTransport:
    """Of a stage that is alone."""

    def send(self, *_: Any) -> None:
        raise AssertionError("a stage that is alone has nobody to send to")


@torch.no_grad()
def _clip_gradients(
    parameters: Mapping[str, nn.Parameter],
    names: Sequence[str],
    max_norm: float,
    *,
    is_copy: bool = False,
) -> None:
    """As ``torch.nn.utils.clip_grad_norm_`` does with the whole model; all ranks must call it.

    Norms of single parameters are gathered, so the result does not depend on who has which.

    Args:
        parameters: Those of this rank.
        names: Of all of them, the same on each rank.
        max_norm: Of all gradients together.
        is_copy: Another rank has the same gradients, and counts them.
    """
    graded = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    own = {name: torch.linalg.vector_norm(g).double() for name, g in graded.items()}
    device = wire_device()
    zero = torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(
        [own[name].to(device) if name in own and not is_copy else zero for name in names]
    )
    if group_size() > 1:
        dist.all_reduce(norms)  # all but one of each are 0
    scale = (max_norm / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
    for gradient in graded.values():
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
