"""What travels between stages and parameter servers, and who they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

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
