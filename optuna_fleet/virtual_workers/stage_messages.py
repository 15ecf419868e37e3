"""What goes between stages and parameter servers, and how it gets from process to process.

There a message is a header, a description if that is another than before, and tensors: by gloo,
through the memory of the host, wherever stages compute.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.nested import map_tensors
from optuna_fleet.virtual_workers.wsp import Tag

Tensors = Mapping[str, Tensor]
"""By the name of the parameter in the whole model."""


class StageAddress(NamedTuple):
    """A stage of a virtual worker, both from 0."""

    worker: int
    stage: int


# Messages begin with numbers; no more than one other field follows.


class Activations(NamedTuple):
    """To the next stage: what it goes on with, and the `Tag` of the weights."""

    number: int
    local: int
    clock: int
    values: Any

    @property
    def tag(self) -> Tag:
        """With which weights; all 0 where nothing is trained."""
        return Tag(self.local, self.clock)


class Gradients(NamedTuple):
    """To the stage before: the loss, which all stages note, and its gradients.

    Those are by the floating-point tensors that the stage had sent.
    """

    number: int
    loss_and_gradients: tuple[Tensor, tuple[Tensor | None, ...]]


class Push(NamedTuple):
    """To the parameter server of a piece of the model: the sum of the updates of a wave."""

    piece: int
    worker: int
    wave: int
    updates: Tensors


class Pull(NamedTuple):
    """To a parameter server: wanted are the weights with all waves before `clock`, or newer ones.

    An answer goes to the stage of this address; where `exactly`, weights must not be newer.
    """

    piece: int
    worker: int
    stage: int
    clock: int
    exactly: int


class Snapshot(NamedTuple):
    """To a stage: weights with all updates of the waves before `clock`, and no others."""

    piece: int
    clock: int
    weights: Tensors


class Sums(NamedTuple):
    """To the next virtual worker that shares a batch: what a layer's add up to; see `PartSums`."""

    piece: int  # here a layer
    is_step: int
    sums: Tensors


class Held(NamedTuple):
    """To rank 0: what a rank has of the model's state."""

    values: Any


ToStage = Activations | Gradients | Snapshot
Message = ToStage | Push | Pull | Sums | Held
_NUMBERS: dict[Any, int] = dict(
    zip(
        (Activations, Gradients, Push, Pull, Snapshot, Sums, Held),
        (3, 1, 3, 5, 2, 2, 0),
        strict=True,
    )
)
_KINDS = list(_NUMBERS)
_LEAVING = len(_KINDS)  # beside them
_MOST_NUMBERS = max(_NUMBERS.values())


class Transport(Protocol):
    """Carries messages; those from one sender to one receiver arrive in order.

    Returns at once; what a message refers to is not changed afterwards.
    """

    def send(self, to: StageAddress, message: ToStage) -> None:
        """To a stage."""

    def ask(self, message: Push | Pull) -> None:
        """To the parameter server of its piece."""


def added(some: Tensors, others: Tensors) -> dict[str, Tensor]:
    """By name, out of place; what is in one of them only is taken as it is."""
    sums = {n: some[n] + other if n in some else other for n, other in others.items()}
    return {**some, **sums}


class Lane(IntEnum):
    """Ways between two processes that do not wait for each other; gloo's tags."""

    STAGES = 0
    VALUES = 1
    TO_SERVERS = 2
    FROM_SERVERS = 3
    SUMS = 4


_HOST = torch.device("cpu")  # not torch's default device: gloo sends and receives no other memory


class Outbound:
    """A lane to another process, which one thread uses at a time."""

    def __init__(self, group: dist.ProcessGroup, rank: int, lane: Lane) -> None:
        self._group = group
        self._rank = rank
        self._lane = lane
        self._described: dict[tuple[int, int], str] = {}
        self._works: list[tuple[Any, Tensor]] = []  # a buffer must stay what it is
        self._lock = threading.Lock()  # for who leaves

    def send(self, message: Message) -> None:
        """Return when the message before has arrived; this one is on its way then."""
        kind, tensors = type(message), list[Tensor]()
        key = _KINDS.index(kind), getattr(message, "piece", 0)
        numbers: tuple[Any, ...] = message[: _NUMBERS[kind]]
        values = message[_NUMBERS[kind] :]

        def taken(tensor: Tensor) -> Any:
            tensors.append(tensor.detach().cpu().contiguous().resolve_conj().resolve_neg())
            return f"{tensor.dtype} {tuple(tensor.shape)}"

        with self._lock:
            described = repr(map_tensors(values, taken, _refused))  # dicts in other order differ
            description = torch.empty(0, dtype=torch.uint8)
            if described != self._described.get(key):
                description = _description(values)
                self._described[key] = described
            self.wait()
            self._start(_header(*key, len(description), numbers))
            for tensor in (description, *tensors):
                if tensor.numel():
                    self._start(tensor)

    def leave(self, *, alone: bool) -> None:
        """There will be no more messages; nothing is said where another thread is amidst one."""
        if self._lock.acquire(blocking=not alone):
            with suppress(RuntimeError):  # it is gone
                self._start(_header(_LEAVING, 0, 0, (alone,)))
            self._lock.release()

    def finish(self) -> None:
        """Return when all has arrived, or whoever it was for is gone."""
        with self._lock, suppress(RuntimeError):
            self.wait()

    def wait(self) -> None:
        """Return when all has arrived.

        Raises:
            RuntimeError: Whoever it was for is gone.
        """
        for work, _ in self._works:
            work.wait()
        self._works.clear()

    def _start(self, tensor: Tensor) -> None:
        self._works.append((self._group.send([tensor], self._rank, self._lane), tensor))


class Inbound:
    """A lane from another process.

    Attributes:
        was_left_alone: Who left it has failed, or may have.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, lane: Lane) -> None:
        self._group = group
        self._rank = rank
        self._lane = lane
        self._forms: dict[tuple[int, int], Any] = {}
        self.was_left_alone = False

    def receive(self) -> Any:
        """The next message; None if there will be no more."""
        header = self._received((3 + _MOST_NUMBERS,), torch.int64)
        code, piece, size, *numbers = header.tolist()
        if code == _LEAVING:
            self.was_left_alone = bool(numbers[0])
            return None
        if size:
            buffer = io.BytesIO(self._received((size,), torch.uint8).numpy().tobytes())
            form = torch.load(buffer, weights_only=True)  # its sender has proved nothing
            self._forms[code, piece] = form
        kind, values = _KINDS[code], map_tensors(self._forms[code, piece], self._like)
        return kind(*numbers[: _NUMBERS[kind]], *values)

    def _like(self, form: Tensor) -> Tensor:
        return self._received(tuple(form.shape), form.dtype)

    def _received(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=_HOST)
        if tensor.numel():
            self._group.recv([tensor], self._rank, self._lane).wait()
        return tensor


def _header(code: int, piece: int, size: int, numbers: tuple[int, ...]) -> Tensor:
    padding = [0] * (_MOST_NUMBERS - len(numbers))
    return torch.tensor([code, piece, size, *numbers, *padding], device=_HOST)


def _description(values: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(map_tensors(values, _form_of), buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise FleetConfigError(
            f"What goes to another stage, or is the state of a stage's layers and optimizer, is "
            f"{values!r:.300}, but must be tensors, numbers and strings, in dicts, lists and "
            "tuples."
        ) from error
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _form_of(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _refused(data: Any) -> Any:
    raise FleetConfigError(
        f"A `{type(data).__name__}` goes from layer to layer, but only tensors, in dicts, lists "
        "and tuples, can go from stage to stage: have the layers pass these on."
    )
