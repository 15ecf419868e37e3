"""From shared memory to an accelerator: pinned by a thread of its own, ahead, finished there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch

from optuna_fleet.accelerator import accelerator_of
from optuna_fleet.pipeline.reader.client import Batch
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
        copies, thread = _side(device)
        try:
            for batch, data in ahead(batches, copies, thread):
                yield batch, finish(data) if finish else data
        finally:
            wait([thread.submit(copies.forget)])
        return
    for batch in batches:
        yield batch, finish(batch.data) if finish else batch.data


@cache
def _side(device: torch.device) -> tuple[Copies, Executor]:
    """One for all passes: the caching allocator keeps memory for each stream."""
    return Copies(device), ThreadPoolExecutor(1, "staging")


def ahead(
    batches: Iterable[Batch], copies: Copies, thread: Executor
) -> Generator[tuple[Batch, Any], None, None]:
    """Yields each batch and its data as they arrive; the next one is on its way meanwhile.

    Bytes travel as the pipeline made them, and are finished where they arrive. The memory of one
    is its own until the next is asked for; the thread starts the copies, so that they don't keep
    up whoever trains.
    """
    on_the_way: tuple[Batch, Future[Any]] | None = None
    for batch in batches:
        pinned = thread.submit(copies.pin, batch.data)
        sent = thread.submit(_send, copies, pinned)
        try:
            if on_the_way is not None:
                yield on_the_way[0], copies.take(*on_the_way[1].result())
        finally:
            wait([pinned])  # its memory may be used for others now
        on_the_way = batch, sent
    if on_the_way is not None:
        yield on_the_way[0], copies.take(*on_the_way[1].result())


def _send(copies: Copies, pinned: Future[Any]) -> Any:
    return copies.send(pinned.result())


class Copies:
    """By way of pinned memory, on a stream of its own.

    PyTorch's caching allocator keeps the pinned memory until the transfer is done. While the
    device has failed, to free it aborts the process: it is held until a query has gone well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = accelerator_of(device.type).module
        self._stream = self._module.Stream(device)
        # The batch in use and the one on its way, pinned and sent; if the device fails they stay.
        self._lately = deque[Any](maxlen=4)

    def pin(self, data: Any) -> Any:
        """Nested data that does not lie where it was, ready for `send`; takes its time."""
        return map_tensors(data, _pinned, self._pinned_by_itself)

    def send(self, pinned: Any) -> tuple[Any, torch.Event]:
        """Start the copies; return the data on the device, and a mark of when they are there."""
        self._stream.query()
        self._lately.append(pinned)
        with self._module.stream(self._stream):
            sent = map_tensors(pinned, lambda x: x.to(self._device, non_blocking=True))
            mark = self._stream.record_event()
        self._lately.append(sent)
        return sent, mark

    def forget(self) -> None:
        """Free what was sent lately."""
        self._stream.query()
        self._lately.clear()

    def take(self, sent: Any, mark: torch.Event) -> Any:
        """The data, for what the calling thread has the device do from now on."""
        current = self._module.current_stream(self._device)
        current.wait_event(mark)
        map_tensors(sent, lambda tensor: _used_on(tensor, current))
        return to_device(sent, self._device)  # what moves itself: memory of this stream

    def _pinned_by_itself(self, data: Any) -> Any:
        """What moves itself, as a `DataLoader` pins it; else it goes by the usual stream now."""
        return data.pin_memory() if hasattr(data, "pin_memory") else data.to(self._device)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    is_pinnable = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return tensor.pin_memory() if is_pinnable else tensor


def _used_on(tensor: torch.Tensor, stream: torch.Stream) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor
