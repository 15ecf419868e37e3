"""Choices that are objects: each process has its own, and Optuna must see the same ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution

from optuna_fleet.exceptions import TrialError
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.wire.packing import fingerprint, is_primitive, pack, unpack

# By parameter and position, the object last sent from this process and the bytes it was.
_sent: dict[tuple[str, int], tuple[Any, bytes]] = {}


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
        TrialError: A choice can't be pickled.
        Exception: Whatever Optuna raises.
    """
    own = tuple(choices) if isinstance(choices, Collection) else ()
    if all(map(is_primitive, own)):
        return call("suggest_categorical", name, choices)
    packed = tuple(
        choice if is_primitive(choice) else _packed_once(name, position, choice)
        for position, choice in enumerate(own)
    )
    answer = call("suggest_categorical", name, packed)
    return own[answer.index] if isinstance(answer, Chosen) else answer


def _packed_once(name: str, position: int, choice: Any) -> PackedChoice:
    """The same bytes for the same object, whatever has become of it since it was first sent.

    It may count its uses, say; to Optuna, which compares objects, it is the same for ever.
    """
    known, packed = _sent.get((name, position), (None, b""))
    if known is not choice:
        try:
            packed = pack(choice)
        except Exception as error:
            raise TrialError(
                f"A choice of {name!r} is {choice!r}, but can't be pickled, and so not be sent to "
                f"the study ({type(error).__name__}: {error}): suggest a name instead, and take "
                "the object from a dict by it."
            ) from error
        _sent[name, position] = choice, packed
    return PackedChoice(packed=packed)


def with_objects(args: tuple[Any, ...]) -> bool:
    """Whether these are arguments that `suggest` made for choices some of which are objects."""
    choices = args[1] if len(args) == 2 and isinstance(args[1], tuple) else ()
    return any(isinstance(choice, PackedChoice) for choice in choices)


def choose(
    study: optuna.Study, trial: optuna.Trial, name: str, packed: tuple[Any, ...]
) -> Chosen | Any:
    """Carry out `suggest`: with the objects that the study, or its user, has for these copies.

    Raises:
        Exception: Whatever Optuna raises.
    """
    known, given = _known(study, name), compat.given_values(study, trial, name)
    choices = [
        _the_same(unpack(choice.packed), [*known[position : position + 1], *given])
        if isinstance(choice, PackedChoice)
        else choice
        for position, choice in enumerate(packed)
    ]
    compat.refix(trial, name, lambda value: _the_same(value, choices))
    answer = trial.suggest_categorical(name, choices)
    index = compat.internal_value(study, trial, name)
    return Chosen(index=int(index)) if isinstance(packed[int(index)], PackedChoice) else answer


def _known(study: optuna.Study, name: str) -> tuple[Any, ...]:
    """The choices of a parameter as the study has them from an earlier trial, or call."""
    for trial in compat.trials_of(study):
        distribution = trial.distributions.get(name)
        if isinstance(distribution, CategoricalDistribution):
            return distribution.choices
    return ()


def _the_same(value: Any, candidates: Iterable[Any]) -> Any:
    """The one among objects that `value` is a copy of, or `value`."""
    if is_primitive(value):
        return value
    alike = [candidate for candidate in candidates if type(candidate) is type(value)]
    if not alike or any(candidate is value for candidate in alike):
        return value
    mark = fingerprint(value)
    originals = (candidate for candidate in alike if mark and fingerprint(candidate) == mark)
    return next(originals, value)
