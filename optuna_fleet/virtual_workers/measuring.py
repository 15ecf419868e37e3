"""What layers, links and devices are like; so which layers are where, or what else is needed."""

from __future__ import annotations

import copy
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optuna_fleet.accelerator import accelerator_of
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.gradients import collectives
from optuna_fleet.trainer.groups import gloo_group, group_size
from optuna_fleet.trainer.nested import map_tensors, tensors_in, to_device
from optuna_fleet.trainer.randomness import own_randomness
from optuna_fleet.trainer.run_parts import Parts
from optuna_fleet.virtual_workers.layouts import (
    WIRE,
    Demand,
    LayerCost,
    Placement,
    Ranks,
    TooManyDevices,
)
from optuna_fleet.virtual_workers.parameter_server import Directory
from optuna_fleet.virtual_workers.partition import DoesNotFit, Link, Links
from optuna_fleet.virtual_workers.stage import Loss, leaf_of
from optuna_fleet.virtual_workers.sums import has_statistics

Need = Callable[[int], NoReturn]
"""Has the trial begin anew on so many devices."""

_STATES = {"SGD": 1, "Adagrad": 1, "RMSprop": 2, "Rprop": 2}  # copies; of others, as Adam, 2
_OF_GPU = 0.9  # the rest is for what is not counted: fragments, libraries, messages


def copies_of(optimizer: torch.optim.Optimizer, *, is_flushed: bool) -> float:
    """Copies of the weights: themselves, gradients, the optimizer's state, an update."""
    kind = type(optimizer).__name__
    states = _STATES.get(kind, 2)
    if kind == "SGD" and not any(group["momentum"] for group in optimizer.param_groups):
        states = 0
    return (2 if is_flushed else 3) + states


def memory_of_device(device: torch.device) -> float:
    """What a stage may take there; nothing is known of a CPU's."""
    if device.type == "cpu":
        return math.inf
    gpu = accelerator_of(device.type).module
    free, _ = gpu.mem_get_info(device)
    return _OF_GPU * float(free + gpu.memory_reserved(device))


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
        return alone, Directory.of(((0,),), ((),), dict.fromkeys(model._modules, 0.0), [0])
    costs, on = _measured(model, loss, batch, demand, parts)
    demand = replace(demand, memory_bytes=on.memory_bytes[0])
    if demand.is_flushed and any(cost.leaves_something for own in costs for cost in own):
        demand = replace(demand, most_workers=1)
    if group_size() > 1:
        demand = replace(demand, links=measured_links(on.nodes, parts.run.rank, WIRE))
    try:
        placement = demand.place(costs, on)
    except DoesNotFit as error:
        _use_others(error, costs[0], demand, parts, need)
    if placement.reason:
        parts.session.remark(["layout"], placement.reason)
    sizes = (cost.parameter_bytes for cost in costs[0])
    layer_bytes = dict(zip(model._modules, sizes, strict=True))
    given = placement.ranks, placement.cuts, layer_bytes, on.nodes
    return placement, Directory.of(*given, has_servers=not demand.is_flushed)


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
    if number > num_blocks:  # several virtual workers, for which it may be an odd number
        of_blocks = (demand.most_workers or 1) * num_blocks
        is_odd = isinstance(refusal, TooManyDevices)
        if fewer := of_blocks if is_odd else demand.most_below(costs, number):
            why = f"On {number} devices: {refusal}"
            raise parts.weights.too_wide(why, max_devices=fewer)
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


_REPEATS = 3
_NUM_BYTES = 2**20  # of a long message


def layer_costs(
    layers: Sequence[nn.Module], loss: Loss, values: Any, targets: Any, device: torch.device
) -> list[LayerCost]:
    """Measure copies of layers, of which no two are on the device at the same time.

    The layers stay what and where they are, as do all generators. The last one has the loss.
    """
    costs: list[LayerCost] = []
    with own_randomness(), torch.enable_grad():
        values, targets = to_device(values, device), to_device(targets, device)
        for place, layer in enumerate(layers):
            own = _copy(layer).to(device)
            is_last = place == len(layers) - 1
            cost, values = _measure(own, loss if is_last else None, values, targets, device)
            costs.append(replace(cost, leaves_something=_leaves_something(own, layer)))
    return costs


def _copy(layer: nn.Module) -> nn.Module:
    """Also of one with results of autograd, as those of `nn.utils.weight_norm`, or of a pass."""
    held = [t for module in layer.modules() for t in tensors_in(vars(module)) if not t.is_leaf]
    return copy.deepcopy(layer, {id(tensor): tensor.detach().clone() for tensor in held})


def _leaves_something(layer: nn.Module, before: nn.Module) -> bool:
    """Whether passes have changed buffers of a copy, or made some, other than BatchNorm's."""
    kept = dict(before.named_buffers())
    return any(
        name not in kept or not torch.equal(buffer.cpu(), kept[name].cpu())
        for path, module in layer.named_modules()
        if not has_statistics(module)
        for name, buffer in module.named_buffers(path, recurse=False)
    )


def _measure(
    layer: nn.Module, loss: Loss | None, values: Any, targets: Any, device: torch.device
) -> tuple[LayerCost, Any]:
    timed: list[tuple[float, float]] = []
    for _ in range(_REPEATS):
        leaves = map_tensors(values, leaf_of)
        given = map_tensors(leaves, torch.clone)  # layers may work in place
        began = _now(device)
        with _counting_kept(layer) as kept:
            output = layer(given)
            result = output if loss is None else loss(output, targets)
        middle = _now(device)
        outputs = [t for t in tensors_in(result) if t.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        timed.append((middle - began, _now(device) - middle))
        layer.zero_grad(set_to_none=True)
    output = map_tensors(output, Tensor.detach)
    parameters = {id(p): p.nbytes for p in layer.parameters()}
    cost = LayerCost(
        forward_s=min(forward_s for forward_s, _ in timed),
        backward_s=min(backward_s for _, backward_s in timed),
        output_bytes=float(sum(t.nbytes for t in tensors_in(output))),
        parameter_bytes=float(sum(parameters.values())),
        kept_bytes=float(sum(kept.values())),
    )
    return cost, output


@contextmanager
def _counting_kept(layer: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of each piece of memory that autograd keeps, without those of parameters."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        accelerator_of(device.type).module.synchronize(device)
    return time.perf_counter()


def measured_links(nodes: Sequence[int], rank: int, usual: Link) -> Links:
    """Links within a node and between nodes, each by one pair of neighbouring ranks; all call it.

    Where there is no such pair the link is the `usual` one; messages take its latency at least.
    """
    group: Any = dist.group.WORLD  # by gloo, as everything between stages
    if dist.get_backend() != "gloo":
        group = gloo_group()
    found: list[Link] = []
    for is_within in (True, False):
        firsts = [at for at, (a, b) in enumerate(pairwise(nodes)) if (a == b) is is_within]
        own: dict[str, float] = {}
        if firsts and rank in (firsts[0], firsts[0] + 1):
            there = 2 * firsts[0] + 1 - rank
            short_s = _there_and_back_s(1, there, group, starts=rank < there)
            long_s = _there_and_back_s(_NUM_BYTES, there, group, starts=rank < there)
            own = {"short_s": short_s, "long_s": long_s}
        told = collectives.gather(own)
        found.append(link_of(**told[firsts[0]], usual=usual) if firsts else usual)
    return Links(within=found[0], between=found[1])


def link_of(short_s: float, long_s: float, usual: Link) -> Link:
    """By the seconds that a short and a long message took there and back."""
    each_s = max(long_s - short_s, 1e-9) / 2
    return Link(bytes_per_s=_NUM_BYTES / each_s, latency_s=max(short_s / 2, usual.latency_s))


def _there_and_back_s(num_bytes: int, there: int, group: Any, *, starts: bool) -> float:
    message = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")  # not torch's default one
    taken: list[float] = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        if starts:
            dist.send(message, there, group=group)
            dist.recv(message, there, group=group)
        else:
            dist.recv(message, there, group=group)
            dist.send(message, there, group=group)
        taken.append(time.perf_counter() - began)
    return min(taken)


def blocks_of(model: nn.Sequential, *, may_part_ties: bool) -> tuple[int, ...]:
    """Where runs of layers end that can't be cut, as they share something.

    Layers that share a parameter may be in several stages if they `may_part_ties`; those that
    share a module with parameters or buffers never are.
    """
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for place, layer in enumerate(model):
        for key in _held_by(layer, may_part_ties=may_part_ties):
            first.setdefault(key, place)
            last[key] = place
    spans = [(first[key], last[key]) for key in first]
    return tuple(
        end
        for end in range(1, len(model) + 1)
        if not any(begins < end <= ends for begins, ends in spans)
    )


def _held_by(layer: nn.Module, *, may_part_ties: bool) -> Iterator[int]:
    for module in layer.modules():
        if module._parameters or module._buffers:
            yield id(module)
    if not may_part_ties:
        yield from map(id, layer.parameters())
