"""Choices that are objects: each process has its own, and to Optuna they must be equal."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import optuna

from optuna_fleet.exceptions import TrialError
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.wire.packing import is_primitive, pack, unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedChoice:
    """A choice that is an object, on its way to the driver."""

    packed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The driver's answer where a choice that is an object was chosen: its position."""

    index: int


def suggest(call: Callable[..., Any], name: str, choices: Any) -> Any:
    """`Trial.suggest_categorical` from another process; returns one of `choices` itself.

    Args:
        call: Makes a call of the trial's in the driver.
        name: The parameter.
        choices: As the user gave them. If all are of the types that Optuna recommends, the call
            is made with them as they are.

    Raises:
        TrialError: A choice can't be pickled, or is not equal to a copy of itself.
        Exception: Whatever Optuna raises.
    """
    own = tuple(choices) if isinstance(choices, Collection) else ()
    if all(map(is_primitive, own)):
        return call("suggest_categorical", name, choices)
    packed = tuple(one if is_primitive(one) else _packed(name, one) for one in own)
    answer = call("suggest_categorical", name, packed)
    return own[answer.index] if isinstance(answer, Chosen) else answer


def _packed(name: str, choice: Any) -> PackedChoice:
    advice = "suggest a name instead, and take the object from a dict by it."
    try:
        packed = pack(choice)
        is_equal = bool(unpack(packed) == choice)
    except Exception as error:
        raise TrialError(
            f"A choice of {name!r} is {choice!r}, but can't be pickled, and so not be sent to the "
            f"study ({type(error).__name__}: {error}): {advice}"
        ) from error
    if not is_equal:
        raise TrialError(
            f"A choice of {name!r} is {choice!r}, but must be equal to a copy of itself, as each "
            f"process has its own: {advice}"
        )
    return PackedChoice(packed=packed)


def with_objects(args: tuple[Any, ...]) -> bool:
    """Whether these are arguments that `suggest` made for choices some of which are objects."""
    choices = args[1] if len(args) == 2 and isinstance(args[1], tuple) else ()
    return any(isinstance(choice, PackedChoice) for choice in choices)


def choose(
    study: optuna.Study, trial: optuna.Trial, name: str, packed: tuple[Any, ...]
) -> Chosen | Any:
    """Carry out `suggest`.

    Raises:
        Exception: Whatever Optuna raises.
    """
    choices = [unpack(one.packed) if isinstance(one, PackedChoice) else one for one in packed]
    answer = trial.suggest_categorical(name, choices)
    if is_primitive(answer):
        return answer
    now = compat.frozen(study, trial)
    return Chosen(index=int(now.distributions[name].to_internal_repr(now.params[name])))
