"""Puts the layers where they are to be: one stage on each rank of the trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.groups import group_size
from optuna_fleet.trainer.pipeline_parallel.costs import LayerCost, layer_costs
from optuna_fleet.trainer.pipeline_parallel.edges import Edges
from optuna_fleet.trainer.pipeline_parallel.noise import Noise
from optuna_fleet.trainer.pipeline_parallel.parts import part_of
from optuna_fleet.trainer.pipeline_parallel.passes import Loss
from optuna_fleet.trainer.pipeline_parallel.placement import Demand, Placement
from optuna_fleet.trainer.pipeline_parallel.tied import Ties, shared_parameters
from optuna_fleet.trainer.pipeline_parallel.whole import Holding

_OF_GPU = 0.9  # the rest is for what is not counted: fragments, libraries, messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Of a pipeline: this rank, and its trial.

    Attributes:
        device: Where this rank computes.
        rank: Of this process.
        most_devices: That the trial can have.
        seed: Of the trial's random numbers.
        check: Raises what unwinds the objective, if anything does.
        need: Says how many devices the trial needs, and leaves the objective.
    """

    device: torch.device
    rank: int
    most_devices: int
    seed: tuple[int, ...]
    check: Callable[[], None]
    need: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """This rank's stage of the model.

    Attributes:
        placement: Of all stages.
        stage: This rank's, from 0.
        part: Its layers, on its device.
        edges: To the other stages; None if there are none.
        ties: What its layers share with each other and those of other stages.
        noise: Of its layers.
        rank: Of this process.
    """

    placement: Placement
    stage: int
    part: nn.Sequential
    edges: Edges | None
    ties: Ties
    noise: Noise
    rank: int

    @property
    def is_first(self) -> bool:
        """Whether it gets the inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes the loss."""
        return self.stage == len(self.placement.ranks) - 1

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Errors say in which stage they came about, and on which rank."""
        try:
            yield
        except Exception as error:
            if self.edges is not None and error.args and isinstance(error.args[0], str):
                names = list(dict(self.part.named_children()))
                of = f"stage {self.stage} of {len(self.placement.ranks)}, rank {self.rank}"
                where = f" (in {of}: layers {names[0]} to {names[-1]})"
                error.args = (error.args[0] + where, *error.args[1:])
            raise


def place(
    holding: Holding, loss: Loss, batch: tuple[Any, Any], demand: Demand, around: Surroundings
) -> Placed:
    """Measure the layers with some samples, and keep those of one stage; all ranks call it.

    Args:
        holding: The whole model, of which the rest is dropped.
        loss: Of its output and the targets.
        batch: Inputs and targets of one minibatch.
        demand: What its pipeline takes.
        around: This rank.

    Raises:
        FleetConfigError: The devices have too little memory.
    """
    model = holding.model
    shared = shared_parameters(model) if demand.is_flushed else []  # as long as all are here
    placement = _placement(model, loss, batch, demand, around)
    stage = placement.ranks.index(around.rank)
    bounds = (0, *placement.cuts, len(model))
    first, end = bounds[stage], bounds[stage + 1]
    part = part_of(model, first, end)
    edges = None
    if len(placement.ranks) > 1:
        edges = Edges(placement.ranks, stage, around.device, room=2 * demand.in_flight + 2)
        holding.keep(part, edges.gather)
    part.to(around.device)
    optimizer = holding.optimizer
    optimizer.load_state_dict(optimizer.state_dict())  # to where the parameters are
    ties = Ties(model, shared, [(placement.cuts, placement.ranks)], around.rank)
    layers = dict(enumerate(part, first))
    noise = Noise(layers, around.device, around.seed)
    return Placed(
        placement=placement,
        stage=stage,
        part=part,
        edges=edges,
        ties=ties,
        noise=noise,
        rank=around.rank,
    )


def memory_of_device(device: torch.device) -> float:
    """What a stage may take there; nothing is known of a CPU's."""
    if device.type == "cpu":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return _OF_GPU * (free + torch.cuda.memory_reserved(device))


def _placement(
    model: nn.Sequential,
    loss: Loss,
    batch: tuple[Any, Any],
    demand: Demand,
    around: Surroundings,
) -> Placement:
    number = group_size()
    if number == 1 and math.isinf(demand.memory_bytes):
        return Placement(cuts=(), ranks=(0,), held=1)
    own = layer_costs(list(model), loss, *batch, around.device)
    told = checkpoint.gather({"costs": [asdict(cost) for cost in own]})
    costs = [[LayerCost(**cost) for cost in rank["costs"]] for rank in told]
    fewest = demand.fewest_stages(costs[0], around.most_devices)
    if fewest is None:
        raise FleetConfigError(_too_large(costs[0], demand, around.most_devices))
    if fewest > number:
        around.need(fewest)
    return demand.place(costs)


def _too_large(costs: list[LayerCost], demand: Demand, most: int) -> str:
    largest = max(range(len(costs)), key=lambda i: costs[i].parameter_bytes + costs[i].kept_bytes)
    mb = costs[largest].parameter_bytes / 1e6, costs[largest].kept_bytes / 1e6
    stages = min(most, len(demand.blocks))
    return (
        f"The model's {len(costs)} layers do not fit on {stages} devices of "
        f"{demand.memory_bytes / 1e6:.6g} MB, the most that this trial can have: the largest, "
        f"layer {largest}, has {mb[0]:.4g} MB of parameters and keeps {mb[1]:.4g} MB of each part "
        "of a batch. Give it more devices, a larger `memory_bytes`, a smaller batch, more parts "
        "(`in_flight`), or smaller layers."
    )
