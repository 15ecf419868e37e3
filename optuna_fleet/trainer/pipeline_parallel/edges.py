"""How messages get from stage to stage, when each is in a process of its own.

By gloo, through the memory of the host, wherever stages compute. A thread per neighbour receives:
gloo says of nothing that it has arrived, and a send ends only when it is received.
"""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.nested import map_tensors, to_device
from optuna_fleet.trainer.pipeline_parallel.messages import (
    Activations,
    Address,
    Gradients,
    Message,
    StageAddress,
)
from optuna_fleet.wsp.schedules import Tag

_LEAVES, _ACTIVATIONS, _GRADIENTS, _VALUES = range(4)
_NEIGHBOURS, _ANY = 0, 1  # tags
_HEADER = 5  # what it is, number, tag (2), bytes of the description if that is a new one
_FOREVER = timedelta(days=365)  # who is lost closes its connections; who hangs is seen by others


class Edges:
    """The ways of one stage to its neighbours, and what has come by them.

    Every rank of the trial must make one, at the same time.

    Args:
        ranks: Rank of each stage.
        stage: Of this process.
        device: Where it computes.
        room: Most messages of a neighbour that are kept here; more stay where they are.
    """

    def __init__(self, ranks: Sequence[int], stage: int, device: torch.device, room: int) -> None:
        group = dist.new_group(backend="gloo", timeout=_FOREVER)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._stage = stage
        self._device = device
        self._inbox: queue.SimpleQueue[tuple[int, Message | Exception]] = queue.SimpleQueue()
        self._gone: list[Exception] = []
        near = [place for place in (stage - 1, stage + 1) if 0 <= place < len(ranks)]
        self._outbound = {place: _Outbound(self._group, ranks[place]) for place in near}
        self._room = {place: threading.Semaphore(room) for place in near}
        self._threads = [
            threading.Thread(
                target=self._listen,
                args=(place, ranks[place]),
                name=f"optuna-fleet-stage-{place}",
                daemon=True,
            )
            for place in near
        ]
        for thread in self._threads:
            thread.start()

    def send(self, sender: Address, to: Address, message: Message) -> None:
        """Return when the message before has arrived; this one is on its way then."""
        assert isinstance(to, StageAddress)
        match message:
            case Activations(number=number, tag=tag, values=values):
                self._outbound[to.stage].send(_ACTIVATIONS, (number, *tag), values)
            case Gradients(number=number, values=values, loss=loss):
                self._outbound[to.stage].send(_GRADIENTS, (number, 0, 0), (loss, *values))
            case _:
                raise AssertionError(f"{type(message).__name__} does not travel")

    def receive(self) -> Message:
        """The next message, waiting for it; its tensors are on the device.

        Raises:
            RuntimeError: A neighbour has left, or is gone.
        """
        if (waiting := self.poll()) is not None:
            return waiting
        if self._gone:
            raise self._gone[0]
        return self._taken(*self._inbox.get())

    def poll(self) -> Message | None:
        """The next message, if there is one; who has left may have said all there is to say."""
        while not self._inbox.empty():
            place, message = self._inbox.get()
            if not isinstance(message, Exception):
                return self._taken(place, message)
            self._gone.append(message)
        return None

    def _taken(self, place: int, message: Message | Exception) -> Message:
        if isinstance(message, Exception):
            raise message
        self._room[place].release()
        if self._device.type == "cpu" or not isinstance(message, Activations | Gradients):
            return message
        return replace(message, values=to_device(message.values, self._device))

    def gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """What each rank gives, on rank 0, and nothing on the others, who all must call it."""
        if self._group.rank() > 0:
            out = _Outbound(self._group, 0, _ANY)
            out.send(_VALUES, (0, 0, 0), own)
            out.wait()
            return []
        others = range(1, self._group.size())
        return [own, *(_Inbound(self._group, rank, _ANY).values() for rank in others)]

    def close(self, *, alone: bool) -> None:
        """Say so to the neighbours, and wait until they have done so too.

        Args:
            alone: They may never do so: don't wait.
        """
        for out in self._outbound.values():
            out.leave()
        for place in self._room:
            self._room[place].release(1000)  # for what is not read any more
        if alone:
            return
        for thread in self._threads:
            thread.join()
        with suppress(RuntimeError):  # some are gone
            # Who closes its connections ends what others receive, from whomever.
            self._group.barrier().wait()

    def _listen(self, place: int, rank: int) -> None:
        inbound = _Inbound(self._group, rank)
        try:
            while True:
                self._room[place].acquire()
                if (message := inbound.receive()) is None:
                    break
                self._inbox.put((place, message))
        except Exception as error:
            self._inbox.put((place, error))
            return
        gone = dist.DistNetworkError(  # as when a peer's connection breaks
            f"stage {place} has left the pipeline, while stage {self._stage} waited for it"
        )
        self._inbox.put((place, gone))


class _Outbound:
    """The way to a neighbour."""

    def __init__(self, group: dist.ProcessGroup, rank: int, tag: int = _NEIGHBOURS) -> None:
        self._group = group
        self._rank = rank
        self._tag = tag
        self._described: Any = None
        self._works: list[tuple[Any, Tensor]] = []  # a buffer must stay what it is

    def send(self, what: int, numbers: tuple[int, int, int], values: Any) -> None:
        tensors: list[Tensor] = []

        def taken(tensor: Tensor) -> Any:
            tensors.append(tensor.detach().cpu().contiguous())
            return f"{tensor.dtype} {tuple(tensor.shape)}"

        described = what, map_tensors(values, taken, _refused)
        description = torch.empty(0, dtype=torch.uint8)
        if described != self._described:
            self._described = described
            buffer = io.BytesIO()
            torch.save(map_tensors(values, _form_of), buffer)
            description = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        self.wait()
        self._start(torch.tensor([what, *numbers, len(description)]))
        for tensor in (description, *tensors):
            if tensor.numel():
                self._start(tensor)

    def leave(self) -> None:
        with suppress(RuntimeError):  # it is gone
            self._start(torch.tensor([_LEAVES, 0, 0, 0, 0]))

    def _start(self, tensor: Tensor) -> None:
        self._works.append((self._group.send([tensor], self._rank, self._tag), tensor))

    def wait(self) -> None:
        for work, _ in self._works:
            work.wait()
        self._works.clear()


class _Inbound:
    """The way from a neighbour."""

    def __init__(self, group: dist.ProcessGroup, rank: int, tag: int = _NEIGHBOURS) -> None:
        self._group = group
        self._rank = rank
        self._tag = tag
        self._form: Any = None

    def receive(self) -> Message | None:
        """The next message; None if there will be no more."""
        what, number, tag, values = self._next()
        if what == _LEAVES:
            return None
        if what == _ACTIVATIONS:
            return Activations(number=number, tag=tag, values=values)
        loss, *gradients = values
        return Gradients(number=number, values=tuple(gradients), loss=loss)

    def values(self) -> Any:
        """What `Edges.gather` sends."""
        return self._next()[-1]

    def _next(self) -> tuple[int, int, Tag, Any]:
        header = self._received(torch.empty(_HEADER, dtype=torch.int64))
        what, number, local, clock, size = header.tolist()
        if size:
            data = self._received(torch.empty(size, dtype=torch.uint8))
            buffer = io.BytesIO(data.numpy().tobytes())
            self._form = torch.load(buffer, weights_only=True)  # its sender has proved nothing
        values = None if what == _LEAVES else map_tensors(self._form, self._like)
        return what, number, Tag(local, clock), values

    def _like(self, form: Tensor) -> Tensor:
        empty = torch.empty(form.shape, dtype=form.dtype)
        return self._received(empty) if empty.numel() else empty

    def _received(self, tensor: Tensor) -> Tensor:
        self._group.recv([tensor], self._rank, self._tag).wait()
        return tensor


def _form_of(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _refused(data: Any) -> Any:
    raise FleetConfigError(
        f"A `{type(data).__name__}` goes from layer to layer, but only tensors, in dicts, lists "
        "and tuples, can go from stage to stage: have the layers pass these on."
    )
