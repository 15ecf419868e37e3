"""What travels between stages and parameter servers, who they are, and how it gets there.

From process to process a message is a header, a description and tensors: by gloo, through the
memory of the host, wherever stages compute.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum, auto
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


class ServerAddress(NamedTuple):
    """The parameter server of a piece of the model, from 0."""

    piece: int


Address = StageAddress | ServerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """To a first stage: the next minibatch. Minibatches are counted from 1."""

    number: int
    values: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """To a last stage: what the loss needs of a minibatch, and the loss' share in the update."""

    number: int
    values: Any
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """To the next stage: what it goes on with, and with which weights."""

    number: int
    tag: Tag
    values: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """To the stage before: the loss' gradients by the floating-point tensors that it sent.

    And the loss itself, so that all stages know it.
    """

    number: int
    values: tuple[Tensor | None, ...]
    loss: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """To a parameter server: the sum of the updates of a wave."""

    worker: int
    wave: int
    updates: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """To a parameter server: wanted are the weights with all waves before `clock`, or newer ones.

    Attributes:
        asker: Who gets the answer, once there is one.
        clock: Waves of all virtual workers that they must contain.
        exactly: Whether they must not be newer.
    """

    asker: StageAddress
    clock: int
    exactly: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """To a stage: weights with all updates of the waves before `clock`, and no others."""

    piece: int
    clock: int
    weights: Tensors


Message = Inputs | Targets | Activations | Gradients | Push | Pull | Snapshot


class Transport(Protocol):
    """Carries messages; those from one sender to one receiver arrive in order."""

    def send(self, sender: Address, to: Address, message: Message) -> None:
        """Return at once; what the message refers to is not changed afterwards."""


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


class _What(IntEnum):
    LEAVING = auto()
    VALUES = auto()
    ACTIVATIONS = auto()
    GRADIENTS = auto()
    PUSH = auto()
    PULL = auto()
    SNAPSHOT = auto()


_HOST = torch.device("cpu")  # not torch's default device: gloo sends and receives no other memory
_NUMBERS = 4  # of a message, beside what it is and of which piece


class Outbound:
    """A lane to another process, which one thread uses."""

    def __init__(self, group: dist.ProcessGroup, rank: int, lane: Lane) -> None:
        self._group = group
        self._rank = rank
        self._lane = lane
        self._described: dict[tuple[int, int], Any] = {}
        self._works: list[tuple[Any, Tensor]] = []  # a buffer must stay what it is
        self._lock = threading.Lock()  # for who leaves

    def send(self, to: Address, message: Message) -> None:
        """Return when the message before has arrived; this one is on its way then."""
        what, numbers, values = _taken_apart(message)
        piece = to.piece if isinstance(to, ServerAddress) else getattr(message, "piece", 0)
        with self._lock:
            self._send(what, piece, numbers, values)

    def send_values(self, values: Callable[[], Any]) -> None:
        """Return when they have arrived; who waits for them is told if there are none to send."""
        try:
            self._send(_What.VALUES, 0, (), values())
        except Exception:
            self.leave(alone=True)
            self.finish()  # what is on its way is lost with the last reference to it
            raise
        self._wait()

    def leave(self, *, alone: bool) -> None:
        """There will be no more messages; nothing is said where another thread is amidst one."""
        if self._lock.acquire(blocking=not alone):
            with suppress(RuntimeError):  # it is gone
                self._start(_header(_What.LEAVING, 0, (alone,), 0))
            self._lock.release()

    def finish(self) -> None:
        """Return when all has arrived, or whoever it was for is gone."""
        with self._lock, suppress(RuntimeError):
            self._wait()

    def _send(self, what: _What, piece: int, numbers: tuple[int, ...], values: Any) -> None:
        tensors: list[Tensor] = []

        def taken(tensor: Tensor) -> Any:
            tensors.append(tensor.detach().cpu().contiguous().resolve_conj().resolve_neg())
            return f"{tensor.dtype} {tuple(tensor.shape)}"

        described, key = map_tensors(values, taken, _refused), (what, piece)
        description = torch.empty(0, dtype=torch.uint8)
        if described != self._described.get(key):
            description = _description(values)
            self._described[key] = described
        self._wait()
        self._start(_header(what, piece, numbers, len(description)))
        for tensor in (description, *tensors):
            if tensor.numel():
                self._start(tensor)

    def _start(self, tensor: Tensor) -> None:
        self._works.append((self._group.send([tensor], self._rank, self._lane), tensor))

    def _wait(self) -> None:
        for work, _ in self._works:
            work.wait()
        self._works.clear()


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

    def receive(self) -> tuple[int, Message] | None:
        """The next message, and of which piece it is; None if there will be no more."""
        what, piece, numbers, values = self._next()
        if what is _What.LEAVING:
            self.was_left_alone = bool(numbers[0])
            return None
        return piece, _put_together(what, piece, numbers, values)

    def values(self) -> Any:
        """What `Outbound.send_values` sends.

        Raises:
            RuntimeError: It can't be sent.
        """
        what, *_, values = self._next()
        if what is _What.LEAVING:
            raise dist.DistNetworkError(f"rank {self._rank} could not send what it holds")
        return values

    def _next(self) -> tuple[_What, int, list[int], Any]:
        header = self._received((_NUMBERS + 3,), torch.int64)
        code, piece, *numbers, size = header.tolist()
        what = _What(code)
        if size:
            data = self._received((size,), torch.uint8)
            buffer = io.BytesIO(data.numpy().tobytes())
            form = torch.load(buffer, weights_only=True)  # its sender has proved nothing
            self._forms[what, piece] = form
        values = None
        if what is not _What.LEAVING:
            values = map_tensors(self._forms[what, piece], self._like)
        return what, piece, numbers, values

    def _like(self, form: Tensor) -> Tensor:
        return self._received(tuple(form.shape), form.dtype)

    def _received(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=_HOST)
        if tensor.numel():
            self._group.recv([tensor], self._rank, self._lane).wait()
        return tensor


def _taken_apart(message: Message) -> tuple[_What, tuple[int, ...], Any]:
    match message:
        case Activations(number=number, tag=tag, values=values):
            return _What.ACTIVATIONS, (number, *tag), values
        case Gradients(number=number, values=gradients, loss=loss):
            return _What.GRADIENTS, (number,), (loss, *gradients)
        case Push(worker=worker, wave=wave, updates=updates):
            return _What.PUSH, (worker, wave), dict(updates)
        case Pull(asker=asker, clock=clock, exactly=exactly):
            return _What.PULL, (*asker, clock, exactly), ()
        case Snapshot(clock=clock, weights=weights):
            return _What.SNAPSHOT, (clock,), dict(weights)
        case _:
            raise AssertionError(f"{type(message).__name__} does not travel")


def _put_together(what: _What, piece: int, numbers: list[int], values: Any) -> Message:
    first, second, third, last = numbers
    match what:
        case _What.ACTIVATIONS:
            return Activations(number=first, tag=Tag(second, third), values=values)
        case _What.GRADIENTS:
            loss, *gradients = values
            return Gradients(number=first, values=tuple(gradients), loss=loss)
        case _What.PUSH:
            return Push(worker=first, wave=second, updates=values)
        case _What.PULL:
            return Pull(asker=StageAddress(first, second), clock=third, exactly=bool(last))
        case _What.SNAPSHOT:
            return Snapshot(piece=piece, clock=first, weights=values)
        case _:
            raise AssertionError(f"{what.name} is no message")


def _header(what: _What, piece: int, numbers: tuple[int, ...], size: int) -> Tensor:
    padding = [0] * (_NUMBERS - len(numbers))
    return torch.tensor([what, piece, *numbers, *padding, size], device=_HOST)


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
