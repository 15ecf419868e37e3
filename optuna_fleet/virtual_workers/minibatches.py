"""A batch in the parts that go through a pipeline; and batches that are not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.gradients import collectives
from optuna_fleet.trainer.nested import map_tensors, to_device
from optuna_fleet.virtual_workers.construction import Construction
from optuna_fleet.virtual_workers.stage_messages import Activations, ToStage

Metric = Callable[[Any, Any], Any]
_SAMPLES = "number of samples"
_EVALUATED = 0  # in place of a minibatch's number


def is_evaluated(message: ToStage) -> TypeGuard[Activations]:
    """Whether it comes from a stage that does not train."""
    return isinstance(message, Activations) and message.number == _EVALUATED


class Evaluation:
    """Sums over samples; virtual workers take batches in turn, which are added up in order."""

    def __init__(self, metric: Metric, device: torch.device) -> None:
        self._metric = metric
        self._device = device
        # Of layers that draw when they are evaluated; alike on all ranks, and another each time.
        self._seed = int(torch.randint(2**31, (), device="cpu"))
        self._measured: dict[int, dict[str, float]] = {}  # sums, of batches that ended here
        self._num_batches = 0

    def add(self, own: Construction, inputs: Any, targets: Any) -> None:
        """This stage's part in a batch."""
        number, self._num_batches = self._num_batches, self._num_batches + 1
        if number % own.num_workers != own.address.worker:
            return
        with own.naming_errors(), own.noise.of(self._seed, number):
            if own.is_first:
                values = to_device(inputs, self._device)
            else:
                received = own.edges.receive()
                if not is_evaluated(received):
                    raise own.parted(received, "trains", "evaluates")
                values = received.values
            output = own.part(values)
            if own.is_last:
                self._measured[number] = self._sums(output, targets, num_samples(inputs))
            else:
                own.edges.send(own.next_stage(), Activations(_EVALUATED, 0, 0, output))

    def _sums(self, output: Any, targets: Any, size: int) -> dict[str, float]:
        found = self._metric(output, to_device(targets, self._device))
        named = found if isinstance(found, dict) else {"": found}
        return {name: float(value) * size for name, value in {**named, _SAMPLES: 1.0}.items()}

    def means(self) -> Any:
        """Of all batches, on every rank; all must call it."""
        sums: dict[str, float] = {}
        told = collectives.gather({"measured": self._measured})
        measured = {number: own for rank in told for number, own in rank["measured"].items()}
        for number in sorted(measured):
            for name, total in measured[number].items():
                sums[name] = sums.get(name, 0.0) + total
        size = sums.pop(_SAMPLES, 0.0)
        means = {name: total / size for name, total in sums.items()}
        return means.get("", math.nan) if means.keys() <= {""} else means


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Some samples of a batch, and their share in the mean over it."""

    inputs: Any
    targets: Any
    weight: float


def num_samples(values: Any) -> int:
    """Length of the first tensor's first dimension.

    Raises:
        FleetConfigError: There is none.
    """
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.extend(tensor.shape[:1])
        return tensor

    map_tensors(values, note)
    if not sizes or not sizes[0]:
        raise FleetConfigError(
            f"The inputs are {values!r:.80}, but must be a batch: tensors, also in dicts, lists "
            "and tuples, whose first dimension counts its samples."
        )
    return sizes[0]


def microbatches(inputs: Any, targets: Any, number: int) -> Iterator[Microbatch]:
    """So many of them, whose sizes differ by 1 at most.

    A batch of fewer samples has stand-ins of weight 0. Tensors of another length go along whole.
    """
    size = num_samples(inputs)
    for place in range(number):
        if size >= number:
            first, end = place * size // number, (place + 1) * size // number
            weight = (end - first) / size
        else:
            first = min(place, size - 1)
            end, weight = first + 1, float(place < size) / size
        yield Microbatch(_cut(inputs, first, end, size), _cut(targets, first, end, size), weight)


def _cut(values: Any, first: int, end: int, size: int) -> Any:
    def some(tensor: Tensor) -> Tensor:
        return tensor[first:end] if tensor.shape[:1] == (size,) else tensor

    return map_tensors(values, some)
