"""What this rank of a trial has of its virtual workers: a stage, and perhaps servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optuna_fleet.exceptions import FleetConfigError, TrialError
from optuna_fleet.trainer.groups import gloo_group, group_size, wire_device
from optuna_fleet.trainer.run_parts import Parts
from optuna_fleet.virtual_workers.edges import Edges
from optuna_fleet.virtual_workers.layouts import Placement
from optuna_fleet.virtual_workers.parameter_server import (
    Directory,
    ParameterServer,
    ServerClient,
)
from optuna_fleet.virtual_workers.pipeline_options import PipelineOptions
from optuna_fleet.virtual_workers.stage import Loss, Noise, PipelineStage
from optuna_fleet.virtual_workers.stage_messages import Gradients, StageAddress, ToStage
from optuna_fleet.virtual_workers.sums import PartSums, Ties, shared_parameters
from optuna_fleet.virtual_workers.versions import (
    Agreement,
    FlushedWeights,
    SgdRule,
    VersionedWeights,
    Weights,
)
from optuna_fleet.virtual_workers.whole import HeldModel, parameters_of, part_of
from optuna_fleet.virtual_workers.wsp import Flush, Schedule, WaveSynchronous

_HOOKS = "_post_accumulate_grad_hooks"


class Construction:
    """Made by all ranks at the same time; the rest of the model has no memory here from then on.

    It makes a stage and servers anew, whenever training begins from weights that all agree on.

    Args:
        holding: The whole model and its optimizer.
        loss: From the model's output and a minibatch's targets to a scalar.
        options: How it trains.
        placement: Which layers are where.
        directory: Who is on which rank.
        parts: Of this rank's training.

    Attributes:
        address: Of this rank's stage.
        part: Its layers.
        edges: The ways to others.
        ties: What its layers share with each other and those of other stages.
        noise: Of its layers.
        sums: Over virtual workers that share the parts of a batch; None if there are none.
        share: Of this virtual worker in the update of a minibatch.
        rule: From gradients to updates; None where the optimizer steps.
        agreement: With the same layers of other virtual workers.
    """

    def __init__(
        self,
        holding: HeldModel,
        loss: Loss,
        options: PipelineOptions,
        placement: Placement,
        directory: Directory,
        parts: Parts,
    ) -> None:
        self._model, self._optimizer = holding.model, holding.optimizer
        self._names = tuple(name for name, _ in holding.model.named_parameters())
        self._loss = loss
        self._options = options
        self.placement = placement
        self.directory = directory
        self.rank = parts.run.rank
        self.address = directory.address_of(self.rank)
        group = gloo_group() if group_size() > 1 else None
        self.edges = Edges(group, directory, parts.device, room=2 * placement.in_flight + 2)
        try:
            self._keep(holding, parts)
        except BaseException:
            self.edges.close(alone=True)  # others wait for this rank
            raise

    def _keep(self, holding: HeldModel, parts: Parts) -> None:
        """Keep the layers of this rank's stage."""
        model, placement, is_flushed = self._model, self.placement, self._options.is_flushed
        worker, stage = self.address
        shared = shared_parameters(model) if is_flushed else []  # as long as all are here
        bounds = (0, *placement.cuts[worker], len(model))
        self.part = part_of(model, bounds[stage], bounds[stage + 1])
        if not self.edges.is_alone:
            holding.keep(self.part, self.edges.gather, is_copy=worker > 0)
        self.part.to(parts.device)
        self._optimizer.load_state_dict(self._optimizer.state_dict())  # to where parameters are
        self.ties = Ties(model, shared, self.directory, self.address, self.edges)
        layers = dict(enumerate(self.part, bounds[stage]))
        self.noise = Noise(layers, parts.device, (parts.run.seed, parts.run.number))
        self._trained = set(parameters_of(self.part))
        self.share = 1.0 if is_flushed else 1 / self.num_workers
        self.sums: PartSums | None = None
        if is_flushed and self.num_workers > 1:
            self.sums = PartSums(self.part, self.directory, self.address, self.edges)
        self.loss: Tensor | None = None
        self.rule: SgdRule | None = None
        if not is_flushed:
            self.rule = SgdRule(self._optimizer, parameters_of(self.part).items(), self.share)
        self.agreement = Agreement(self.part, self._optimizer, self.share)

    # -- where it is ------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """Virtual workers."""
        return len(self.placement.ranks)

    @property
    def num_stages(self) -> int:
        """Of this virtual worker."""
        return len(self.placement.ranks[self.address.worker])

    @property
    def is_first(self) -> bool:
        """Whether it gets the inputs."""
        return self.address.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes the loss."""
        return self.address.stage == self.num_stages - 1

    def next_stage(self) -> StageAddress:
        """Which gets what it computes."""
        return self.address._replace(stage=self.address.stage + 1)

    def parted(self, message: ToStage, others: str, own: str) -> TrialError:
        """The error for a message of a stage that does something else, in words, than this one."""
        side = 1 if isinstance(message, Gradients) else -1
        rank = self.placement.ranks[self.address.worker][self.address.stage + side]
        return self.edges.parted(rank, others, own)

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Errors say in which stage they came about, and on which rank."""
        try:
            yield
        except Exception as error:
            self.edges.is_broken = not self.edges.is_alone
            if self.edges.is_broken and error.args and isinstance(error.args[0], str):
                names = list(dict(self.part.named_children()))
                of = self.directory.name_of(self.rank)
                where = f" (in {of}, rank {self.rank}: layers {names[0]} to {names[-1]})"
                error.args = (error.args[0] + where, *error.args[1:])
            raise

    def close(self, *, alone: bool) -> None:
        """The trial has ended here; `alone` if the other ranks may not have."""
        self.noise.close()
        if self.sums is not None:
            self.sums.close()
        self.edges.close(alone=alone)

    # -- how it trains ----------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Another one is given to it."""
        if self.rule is not None:
            self.rule.foresee()
        self.ties.heed()

    @property
    def in_flight(self) -> int:
        """Parts of a batch; without flushes, minibatches of a wave."""
        return self.placement.in_flight

    @property
    def num_parts(self) -> int:
        """That a batch is cut into; without flushes each virtual worker has one of them."""
        return self.in_flight if self._options.is_flushed else self.num_workers

    @property
    def parts(self) -> range:
        """Which of them go through this virtual worker."""
        worker, total, number = self.address.worker, self.num_parts, self.num_workers
        return range(worker * total // number, (worker + 1) * total // number)

    @property
    def schedule(self) -> Schedule:
        """When a minibatch may start."""
        if self._options.is_flushed:
            return Flush(len(self.parts))
        is_alone = self.num_workers == 1
        distance = None if is_alone else self._options.clock_distance
        return WaveSynchronous(self.in_flight, distance)

    def stage(self) -> PipelineStage:
        """Begins with the module's weights, and minibatch 1."""
        return PipelineStage(
            address=self.address,
            num_stages=self.num_stages,
            part=self.part,
            loss=self._loss,
            weights=self._weights(),
            schedule=self.schedule,
            transport=self.edges,
            most_held=self.placement.held,
        )

    def servers(self) -> dict[int, ParameterServer]:
        """Those of this rank, by their pieces; they begin with the module's weights, too."""
        found: dict[int, ParameterServer] = {}
        for place in self.directory.hosted(self.rank):
            piece = part_of(self._model, *self.directory.pieces[place])
            found[place] = ParameterServer(
                piece=place,
                weights={n: p.detach().cpu() for n, p in parameters_of(piece).items()},
                num_workers=self.num_workers,
                clock_distance=self._options.clock_distance or 0,
                transport=self.edges,
            )
        return found

    def _weights(self) -> Weights:
        if self.rule is None:
            parameters = dict(self.part.named_parameters())  # also those to be trained later
            note = self.sums.note if self.sums else None
            given = parameters, self._optimizer, len(self.parts), self._before_step
            return FlushedWeights(*given, note)
        parameters = dict(parameters_of(self.part))
        if changed := self._trained ^ parameters.keys():
            raise FleetConfigError(
                f"`requires_grad` of {min(changed)!r} has changed since the first batch, but only "
                "pipelines with flushes can begin or cease to train a parameter: leave out "
                "`clock_distance`, or give it a learning rate of 0 meanwhile."
            )
        for name, parameter in parameters.items():
            if getattr(parameter, _HOOKS, None):
                raise FleetConfigError(
                    f"The parameter {name!r} has a hook for when its gradient is accumulated, but "
                    "without flushes that never is: use `register_hook`, or train with flushes."
                )
        client = None
        if self.num_workers > 1:
            client = ServerClient(self.address, self.directory, self.edges)
        return VersionedWeights(parameters, self.rule, self.in_flight, client)

    def _before_step(self, parameters: Mapping[str, nn.Parameter]) -> None:
        if self.sums is not None:
            self.loss = self.sums.add_up(parameters)
        self.ties.add_up()
        for parameter in parameters.values():
            hooks = getattr(parameter, _HOOKS, None) if parameter.grad is not None else None
            for hook in (hooks or {}).values():
                hook(parameter)
        if (most := self._options.max_grad_norm) is not None:
            is_copy = self.address.worker > 0
            _clip_gradients(parameters, self._names, most, is_copy=is_copy)


@torch.no_grad()
def _clip_gradients(
    parameters: Mapping[str, nn.Parameter],
    names: Sequence[str],
    max_norm: float,
    *,
    is_copy: bool,
) -> None:
    """As ``torch.nn.utils.clip_grad_norm_`` does with the whole model; all ranks must call it.

    Norms of single parameters are gathered, so the result does not depend on who has which.

    Args:
        parameters: Those of this rank.
        names: Of all of them, the same on each rank.
        max_norm: Of all gradients together.
        is_copy: Another rank has the same gradients, and is counted.
    """
    graded = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    own = {name: torch.linalg.vector_norm(g).double() for name, g in graded.items()}
    device = wire_device()
    zero = torch.zeros((), dtype=torch.float64, device=device)
    counted = {} if is_copy else own
    norms = torch.stack([counted[name].to(device) if name in counted else zero for name in names])
    if group_size() > 1:
        dist.all_reduce(norms)  # all but one of each are 0
    scale = (max_norm / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
    for gradient in graded.values():
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
