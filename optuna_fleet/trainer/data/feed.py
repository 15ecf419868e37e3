"""From shared memory to an accelerator: pinned by a thread of its own, ahead, finished there."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, Protocol

import torch

from optuna_fleet.pipeline.reader.batches import Batch
from optuna_fleet.trainer.nested import map_tensors, to_device

Finish = Callable[[Any], Any]
"""The elementwise end of the preprocessing (types, normalisation), left to whoever trains."""


def feed(
    batches: Iterable[Batch], device: torch.device, finish: Finish | None
) -> Generator[tuple[Batch, Any], None, None]:
    """Yields each batch and its data on the device.

    Close it before the batches: the next one may be on its way.
    """
    if device.type != "cpu":
        yield from ahead(batches, Stage(CudaCopies(device), _thread(device)), finish)
        return
    for batch in batches:
        yield batch, batch.data if finish is None or batch.is_finished else finish(batch.data)


def ahead(
    batches: Iterable[Batch], stage: Stage, finish: Finish | None = None
) -> Generator[tuple[Batch, Any], None, None]:
    """Yields each batch and its data as they arrive; the next one is on its way meanwhile.

    Bytes travel as the pipeline made them, and are finished where they arrive.

    Args:
        batches: What the pipeline gives. The memory of one is its own until the next is asked for.
        stage: Brings them to the device.
        finish: What is left to do there.
    """
    on_the_way: tuple[Batch, Staged] | None = None
    for batch in batches:
        staged = stage(batch.data)
        try:
            if on_the_way is not None:
                yield _arrived(*on_the_way, finish)
        finally:
            staged.wait_until_read()
        on_the_way = batch, staged
    if on_the_way is not None:
        yield _arrived(*on_the_way, finish)


def _arrived(batch: Batch, staged: Staged, finish: Finish | None) -> tuple[Batch, Any]:
    data = staged.arrive()
    return batch, data if finish is None or batch.is_finished else finish(data)


class Copies(Protocol):
    """How bytes get to a device."""

    def pin(self, data: Any) -> Any:
        """Returns nested data that does not lie where it was, ready for `send`; takes its time."""
        ...

    def send(self, pinned: Any) -> tuple[Any, Any]:
        """Starts the copies; returns the data on the device, and a mark of when they are there."""
        ...

    def take(self, sent: Any, mark: Any) -> Any:
        """Returns the data, for what the calling thread has the device do from now on."""
        ...


class Stage:
    """Starts to bring data to a device, without keeping up whoever trains.

    It knows nothing of a trial: several that train on one device can share what one has staged.
    """

    def __init__(self, copies: Copies, thread: Executor) -> None:
        self._copies = copies
        self._thread = thread

    def __call__(self, data: Any) -> Staged:
        """Starts."""
        return Staged(data, self._copies, self._thread)


class Staged:
    """Nested data on its way to a device: copied once, for as many as take it."""

    def __init__(self, data: Any, copies: Copies, thread: Executor) -> None:
        self._copies = copies
        self._pinned = thread.submit(copies.pin, data)
        self._sent = thread.submit(lambda: copies.send(self._pinned.result()))

    def wait_until_read(self) -> None:
        """Waits until the memory that the data were in may be used for others."""
        wait([self._pinned])

    def arrive(self) -> Any:
        """Returns the data on the device, or raises what went wrong on the way."""
        return self._copies.take(*self._sent.result())


class CudaCopies:
    """By way of pinned memory, on a stream of its own.

    PyTorch's caching allocator keeps the pinned memory until the transfer is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _side_stream(device)

    def pin(self, data: Any) -> Any:  # noqa: D102
        return map_tensors(data, _pinned, self._pinned_by_itself)

    def send(self, pinned: Any) -> tuple[Any, torch.cuda.Event]:  # noqa: D102
        with torch.cuda.stream(self._stream):
            sent = map_tensors(pinned, lambda x: x.to(self._device, non_blocking=True))
            return sent, self._stream.record_event()

    def take(self, sent: Any, mark: torch.cuda.Event) -> Any:  # noqa: D102
        current = torch.cuda.current_stream(self._device)
        current.wait_event(mark)
        map_tensors(sent, lambda tensor: _used_on(tensor, current))
        return to_device(sent, self._device)  # what moves itself: memory of this stream

    def _pinned_by_itself(self, data: Any) -> Any:
        """What moves itself, as a `DataLoader` pins it; else it goes by the usual stream now."""
        return data.pin_memory() if hasattr(data, "pin_memory") else data.to(self._device)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: the caching allocator keeps memory for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _thread(device: torch.device) -> Executor:
    return ThreadPoolExecutor(1, "staging", torch.cuda.set_device, (device,))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    is_pinnable = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return tensor.pin_memory() if is_pinnable else tensor


def _used_on(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor
