"""From shared memory to an accelerator: pinned, asynchronous, a batch ahead, finished there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch

from optuna_fleet.pipeline.reader.batches import Batch
from optuna_fleet.trainer.nested import map_tensors, to_device

Finish = Callable[[Any], Any]
"""The elementwise end of the preprocessing (types, normalisation), left to whoever trains."""

Arrive = Callable[[], Any]
"""Returns the data where the trial computes, ready for its next kernel."""


def feed(
    batches: Iterable[Batch], device: torch.device, finish: Finish | None
) -> Iterator[tuple[Batch, Any]]:
    """Yields each batch and its data on the device.

    Args:
        batches: What the pipeline gives.
        device: Where the trial computes.
        finish: What preprocessors left to do.
    """
    if device.type != "cpu":
        yield from ahead(batches, CudaStage(device, finish))
        return
    for batch in batches:
        yield batch, batch.data if finish is None or batch.is_finished else finish(batch.data)


def ahead(
    batches: Iterable[Batch], stage: Callable[[Batch], Arrive]
) -> Iterator[tuple[Batch, Any]]:
    """Yields each batch and its data as they arrive; the next one is on its way meanwhile.

    Args:
        batches: What the pipeline gives.
        stage: Starts the transfer of a batch.
    """
    on_the_way: tuple[Batch, Arrive] | None = None
    for batch in batches:
        staged = (batch, stage(batch))
        if on_the_way is not None:
            yield on_the_way[0], on_the_way[1]()
        on_the_way = staged
    if on_the_way is not None:
        yield on_the_way[0], on_the_way[1]()


class CudaStage:
    """Copies by way of pinned memory, and finishes, on a stream of its own.

    The chunk is free as soon as its samples are in pinned memory, which PyTorch's caching
    allocator keeps until the transfer is done.

    Args:
        device: Where to.
        finish: What to do there, unless it is done: images travel as uint8.
    """

    def __init__(self, device: torch.device, finish: Finish | None = None) -> None:
        self._device = device
        self._finish = finish
        self._stream = _side_stream(device)

    def __call__(self, batch: Batch) -> Arrive:
        """Starts the transfer of a batch."""
        finish = None if batch.is_finished else self._finish
        pinned = map_tensors(batch.data, _pinned)
        with torch.cuda.stream(self._stream):
            ready = map_tensors(pinned, lambda x: x.to(self._device, non_blocking=True))
            if finish is not None:
                ready = finish(ready)
            there = self._stream.record_event()

        def arrive() -> Any:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(there)
            map_tensors(ready, lambda tensor: _used_on(tensor, current))
            return to_device(ready, self._device)  # what moves itself: memory of this stream

        return arrive


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: the caching allocator keeps memory for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    is_pinnable = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return tensor.pin_memory() if is_pinnable else tensor


def _used_on(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor
