"""Which layers are where, on the devices that a trial has, or what else it needs."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

import torch
from torch import nn

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.gradients import collectives
from optuna_fleet.trainer.groups import group_size
from optuna_fleet.trainer.parts import Parts
from optuna_fleet.virtual_workers.directory import Directory
from optuna_fleet.virtual_workers.layer_costs import LayerCost, layer_costs, measured_links
from optuna_fleet.virtual_workers.partition import DoesNotFit
from optuna_fleet.virtual_workers.stage import Loss
from optuna_fleet.virtual_workers.stage_placement import (
    WIRE,
    Demand,
    Placement,
    Ranks,
    TooManyDevices,
)

Need = Callable[[int], NoReturn]
"""Has the trial begin anew on so many devices."""

_logger = logging.getLogger(__name__)

_OF_GPU = 0.9  # the rest is for what is not counted: fragments, libraries, messages


def memory_of_device(device: torch.device) -> float:
    """What a stage may take there; nothing is known of a CPU's."""
    if device.type == "cpu":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return _OF_GPU * (free + torch.cuda.memory_reserved(device))


def place(
    model: nn.Sequential,
    loss: Loss,
    batch: tuple[Any, Any],
    demand: Demand,
    parts: Parts,
    need: Need,
) -> tuple[Placement, Directory]:
    """Decide which layers are where, by what they cost with these samples; all ranks call it.

    If they need more devices, it is for `need` to say so.

    Raises:
        FleetConfigError: The devices have too little memory.
    """
    if group_size() == 1 and math.isinf(demand.memory_bytes):
        alone = Placement(cuts=((),), ranks=((0,),), held=1, in_flight=demand.in_flight or 1)
        return alone, _directory(alone, [0.0] * len(model), [0], demand)
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
    layer_bytes = [cost.parameter_bytes for cost in costs[0]]
    return placement, _directory(placement, layer_bytes, on.nodes, demand)


def _directory(
    placement: Placement, layer_bytes: Sequence[float], nodes: Sequence[int], demand: Demand
) -> Directory:
    has_servers = len(placement.ranks) > 1 and not demand.is_flushed
    given = placement.ranks, placement.cuts, layer_bytes, nodes
    return Directory.of(*given, has_servers=has_servers)


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
