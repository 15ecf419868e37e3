"""Puts layers where they are to be: a stage of a virtual worker on each rank of the trial."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn

from optuna_fleet.exceptions import FleetConfigError, TrialError
from optuna_fleet.trainer.gradients import collectives
from optuna_fleet.trainer.groups import gloo_group, group_size
from optuna_fleet.trainer.parts import Parts
from optuna_fleet.virtual_workers.agreement import Columns, names_by_piece, parted
from optuna_fleet.virtual_workers.directory import Directory
from optuna_fleet.virtual_workers.edges import Edges
from optuna_fleet.virtual_workers.layer_costs import LayerCost, layer_costs, measured_links
from optuna_fleet.virtual_workers.partition import DoesNotFit
from optuna_fleet.virtual_workers.stage import Loss, Noise
from optuna_fleet.virtual_workers.stage_messages import Gradients, Message, StageAddress
from optuna_fleet.virtual_workers.stage_placement import (
    WIRE,
    Demand,
    Placement,
    Ranks,
    TooManyDevices,
)
from optuna_fleet.virtual_workers.tied import Shared, Ties, shared_parameters
from optuna_fleet.virtual_workers.whole import HeldModel, part_of

Need = Callable[[int], NoReturn]
"""Has the trial begin anew on so many devices."""

_logger = logging.getLogger(__name__)

_OF_GPU = 0.9  # the rest is for what is not counted: fragments, libraries, messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """This rank's stage of the model.

    Attributes:
        columns: The same layers of virtual workers that step together; None if there are none.
        ties: What its layers share with each other and those of other stages.
    """

    placement: Placement
    directory: Directory
    address: StageAddress
    part: nn.Sequential
    edges: Edges | None
    columns: Columns | None
    ties: Ties
    noise: Noise
    rank: int

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

    def parted(self, message: Message, others: str, own: str) -> TrialError:
        """The error for a message of a stage that does something else, in words, than this one."""
        side = 1 if isinstance(message, Gradients) else -1
        rank = self.placement.ranks[self.address.worker][self.address.stage + side]
        return parted(rank, others, self.rank, own)

    def close(self, *, alone: bool) -> None:
        """The trial has ended here; `alone` if the other ranks may not have."""
        self.noise.close()
        self.ties.close()
        if self.columns is not None:
            self.columns.close()
        if self.edges is not None:
            self.edges.close(alone=alone)

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Errors say in which stage they came about, and on which rank."""
        try:
            yield
        except Exception as error:
            if self.edges is not None:
                self.edges.is_broken = True
            if self.edges is not None and error.args and isinstance(error.args[0], str):
                names = list(dict(self.part.named_children()))
                of = f"stage {self.address.stage} of {self.num_stages}"
                if self.num_workers > 1:
                    of += f" of virtual worker {self.address.worker}"
                where = f" (in {of}, rank {self.rank}: layers {names[0]} to {names[-1]})"
                error.args = (error.args[0] + where, *error.args[1:])
            raise


def place(
    holding: HeldModel,
    loss: Loss,
    batch: tuple[Any, Any],
    demand: Demand,
    parts: Parts,
    need: Need,
) -> Placed:
    """Measure the layers with some samples, and keep those of one stage; all ranks call it.

    If they need more devices, it is for `need` to say so.

    Raises:
        FleetConfigError: The devices have too little memory.
    """
    model = holding.model
    shared = shared_parameters(model) if demand.is_flushed else []  # as long as all are here
    placement, costs, nodes = _placement(model, loss, batch, demand, parts, need)
    directory = Directory.of(
        placement.ranks,
        placement.cuts,
        [cost.parameter_bytes for cost in costs] or [0.0] * len(model),
        nodes,
        has_servers=len(placement.ranks) > 1 and not demand.is_flushed,
    )
    edges = None
    if group_size() > 1:
        group = gloo_group()
        assert group is not None
        edges = Edges(group, directory, parts.device, room=2 * placement.in_flight + 2)
    try:
        return _keep(holding, shared, placement, directory, edges, demand, parts)
    except BaseException:
        if edges is not None:
            edges.close(alone=True)  # others wait for this rank
        raise


def _keep(
    holding: HeldModel,
    shared: list[Shared],
    placement: Placement,
    directory: Directory,
    edges: Edges | None,
    demand: Demand,
    parts: Parts,
) -> Placed:
    """Keep the layers of this rank's stage."""
    model, optimizer, run = holding.model, holding.optimizer, parts.run
    address = directory.address_of(run.rank)
    bounds = (0, *placement.cuts[address.worker], len(model))
    first, end = bounds[address.stage], bounds[address.stage + 1]
    part = part_of(model, first, end)
    if edges is not None:
        holding.keep(part, edges.gather, is_copy=address.worker > 0)
    part.to(parts.device)
    optimizer.load_state_dict(optimizer.state_dict())  # to where the parameters are
    pipelines = list(zip(placement.cuts, placement.ranks, strict=True))
    columns = None
    ties = Ties(model, shared, pipelines, run.rank)
    if len(placement.ranks) > 1 and demand.is_flushed:
        columns = Columns(directory, names_by_piece(model, directory, address))
    # Virtual workers that do not wait for each other have the same numbers of minibatches.
    draws_apart = address.worker > 0 and not demand.is_flushed
    seed = (run.seed, run.number, *([address.worker] if draws_apart else []))
    return Placed(
        placement=placement,
        directory=directory,
        address=address,
        part=part,
        edges=edges,
        columns=columns,
        ties=ties,
        noise=Noise(dict(enumerate(part, first)), parts.device, seed),
        rank=run.rank,
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
    parts: Parts,
    need: Need,
) -> tuple[Placement, list[LayerCost], list[int]]:
    """Also what layers cost, and nodes of ranks, as far as these matter."""
    if group_size() == 1 and math.isinf(demand.memory_bytes):
        alone = Placement(cuts=((),), ranks=((0,),), held=1, in_flight=demand.in_flight or 1)
        return alone, [], [0]
    costs, on = _measured(model, loss, batch, demand, parts)
    demand = replace(demand, memory_bytes=on.memory_bytes[0])
    if any(cost.leaves_something for own in costs for cost in own):
        demand = replace(demand, may_replicate=False)
    if group_size() > 1:
        demand = replace(demand, links=measured_links(on.nodes, parts.run.rank, WIRE))
    try:
        placement = demand.place(costs, on)
    except DoesNotFit as error:
        _use_others(error, costs[0], demand, parts, need)
    if placement.is_free:
        parts.session.remark(["layout"], placement.reason)
    if placement.reason:
        _logger.debug("Trial %d: %s", parts.run.number, placement.reason)
    return placement, costs[0], list(on.nodes)


def _measured(
    model: nn.Sequential,
    loss: Loss,
    batch: tuple[Any, Any],
    demand: Demand,
    parts: Parts,
) -> tuple[list[list[LayerCost]], Ranks]:
    """What each rank knows of the layers and of its device, on all of them."""
    costs = layer_costs(list(model), loss, *batch, parts.device)
    told = collectives.gather(
        {
            "costs": [asdict(cost) for cost in costs],
            "node": platform.node(),
            "memory_bytes": demand.memory_bytes,  # devices may be unlike, or shared
        }
    )
    names = [rank["node"] for rank in told]
    on = Ranks(
        nodes=tuple(map(names.index, names)),
        memory_bytes=tuple(rank["memory_bytes"] for rank in told),
    )
    return [[LayerCost(**cost) for cost in rank["costs"]] for rank in told], on


def _use_others(
    refusal: DoesNotFit, costs: list[LayerCost], demand: Demand, parts: Parts, need: Need
) -> NoReturn:
    """The devices of now won't do, though as many like the first one, or unlike it, may."""
    number, num_blocks = group_size(), len(demand.blocks)
    if number > num_blocks and (demand.most_workers == 1 or isinstance(refusal, TooManyDevices)):
        why = f"On {number} devices: {refusal}"
        raise parts.weights.too_wide(why, max_devices=num_blocks)
    most = demand.most_devices
    fewest = demand.fewest_stages(costs, most)
    if number >= most or (fewest is None and parts.run.are_alike):
        raise FleetConfigError(_too_large(costs, demand, most))
    need(max(fewest or min(2 * number, most), number + 1))


def _too_large(costs: list[LayerCost], demand: Demand, most: int) -> str:
    largest = max(range(len(costs)), key=lambda i: costs[i].parameter_bytes + costs[i].kept_bytes)
    mb = costs[largest].parameter_bytes / 1e6, costs[largest].kept_bytes / 1e6
    stages = min(most, len(demand.blocks))
    laid_out = f" in the layout {demand.layout!r}" if demand.layout else ""
    return (
        f"The model's {len(costs)} layers do not fit on {stages} devices of "
        f"{demand.memory_bytes / 1e6:.6g} MB{laid_out}, the most that this trial can have: the "
        f"largest, layer {largest}, has {mb[0]:.4g} MB of parameters and keeps {mb[1]:.4g} MB of "
        "each part of a batch. Give it more devices, a larger `memory_bytes`, a smaller batch, "
        "more parts (`in_flight`), or smaller layers."
    )
