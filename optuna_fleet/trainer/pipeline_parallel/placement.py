"""Which layers are on which rank: as many stages as there are ranks, or as memory needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from optuna_fleet.alloc.partition import (
    DoesNotFit,
    Layers,
    Link,
    Links,
    Memory,
    PartitionProblem,
    StageDevice,
    Versions,
    best_partition,
)
from optuna_fleet.trainer.pipeline_parallel.costs import LayerCost

_WIRE = Link(bytes_per_s=1e9, latency_s=2e-4)  # gloo on one machine, measured
_ALIKE = 1.25  # times that differ by less are taken for noise
_STATES = {"SGD": 1, "Adagrad": 1, "RMSprop": 2, "Rprop": 2}  # copies; of others, as Adam, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Stages in their order.

    Attributes:
        cuts: Where stages end, in layers, without the last.
        ranks: Rank of each stage.
        held: Minibatches that each has memory for between their two passes.
    """

    cuts: tuple[int, ...]
    ranks: tuple[int, ...]
    held: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a pipeline takes.

    Attributes:
        blocks: Where each run of layers ends that must stay together.
        in_flight: Minibatches in the pipeline.
        memory: Copies of the weights.
        memory_bytes: Of each device; infinite if that does not matter.
        is_flushed: Whether weights change only when all that is in flight is through.
    """

    blocks: tuple[int, ...]
    in_flight: int
    memory: Memory
    memory_bytes: float
    is_flushed: bool = True

    def fewest_stages(self, costs: Sequence[LayerCost], most: int) -> int | None:
        """How many of the same device hold the model; None if not even `most` of them do."""
        for number in range(1, min(most, len(self.blocks)) + 1):
            try:
                self.place([costs] * number)
            except DoesNotFit:
                continue
            return number
        return None

    def place(self, costs: Sequence[Sequence[LayerCost]]) -> Placement:
        """One stage on each rank; where memory is short, stages hold fewer minibatches.

        Args:
            costs: Of all layers, as each rank has measured them.

        Raises:
            DoesNotFit: The devices have too little memory.
        """
        kinds = _kinds(costs)
        blocks = {kind: self._in_blocks(costs[kind]) for kind in set(kinds)}
        of_any = blocks[kinds[0]]
        layers = Layers(
            forward_s={str(k): tuple(c.forward_s for c in own) for k, own in blocks.items()},
            backward_s={str(k): tuple(c.backward_s for c in own) for k, own in blocks.items()},
            cut_bytes=tuple(cost.output_bytes for cost in of_any),
            parameter_bytes=tuple(cost.parameter_bytes for cost in of_any),
            kept_bytes=tuple(cost.kept_bytes for cost in of_any),
        )
        for held in range(self.in_flight, 0, -1):
            try:
                found = best_partition(self._problem(layers, kinds, held))
            except DoesNotFit:
                if held == 1:
                    raise
            else:
                break
        return Placement(
            cuts=tuple(self.blocks[cut - 1] for cut in found.cuts),
            ranks=tuple(stage.device.index for stage in found.stages),
            held=held,
        )

    def _problem(self, layers: Layers, kinds: Sequence[int], held: int) -> PartitionProblem:
        memory = self.memory
        if memory.versions is Versions.IN_FLIGHT:  # as many as are in flight, however few are held
            memory = replace(memory, copies=memory.copies + self.in_flight - held)
        return PartitionProblem(
            layers=layers,
            devices=tuple(
                StageDevice(index=rank, node=0, kind=str(kind), memory_bytes=self.memory_bytes)
                for rank, kind in enumerate(kinds)
            ),
            in_flight=held,
            links=Links(within=_WIRE, between=_WIRE),
            memory=memory,
        )

    def _in_blocks(self, costs: Sequence[LayerCost]) -> list[LayerCost]:
        return [_sum(costs[first:end]) for first, end in pairwise((0, *self.blocks))]


def memory_of(optimizer: torch.optim.Optimizer, *, is_flushed: bool) -> Memory:
    """Copies of the weights: themselves, gradients, the optimizer's state, versions."""
    kind = type(optimizer).__name__
    states = _STATES.get(kind, 2)
    if kind == "SGD" and not any(group["momentum"] for group in optimizer.param_groups):
        states = 0
    if is_flushed:
        return Memory(copies=2 + states, versions=Versions.NONE)
    return Memory(copies=3 + states, versions=Versions.IN_FLIGHT)


def blocks_of(model: nn.Sequential, *, may_part_ties: bool) -> tuple[int, ...]:
    """Where runs of layers end that can't be cut, as they share something.

    Args:
        model: Its layers.
        may_part_ties: Whether layers that share a parameter may be in several stages. Those that
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


def _kinds(costs: Sequence[Sequence[LayerCost]]) -> list[int]:
    """Of each rank the first one that is about as fast."""
    totals = [sum(c.forward_s + c.backward_s for c in own) for own in costs]
    kinds: list[int] = []
    for rank, total in enumerate(totals):
        alike = (k for k in kinds if max(total, totals[k]) <= _ALIKE * min(total, totals[k]))
        kinds.append(next(alike, rank))
    return kinds


def _sum(costs: Sequence[LayerCost]) -> LayerCost:
    return LayerCost(
        forward_s=math.fsum(cost.forward_s for cost in costs),
        backward_s=math.fsum(cost.backward_s for cost in costs),
        output_bytes=costs[-1].output_bytes,
        parameter_bytes=math.fsum(cost.parameter_bytes for cost in costs),
        kept_bytes=math.fsum(cost.kept_bytes for cost in costs),
    )
