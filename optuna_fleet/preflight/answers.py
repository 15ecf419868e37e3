"""What an objective hears in a rehearsal, where there is no driver and no study."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from optuna_fleet.events import EpochDecision, MoveRefused, WidthLimited
from optuna_fleet.preflight.records import Order
from optuna_fleet.sampler_bridge.choices import Chosen, PackedChoice
from optuna_fleet.trainer.session import Session
from optuna_fleet.wire.calls import AfterEpoch, EndEpoch, RankCall
from optuna_fleet.wire.messages import CheckpointFailed, RunTrial
from optuna_fleet.wire.packing import is_primitive


class UnfitError(Exception):
    """It can't be checked: says why."""


@dataclass(slots=True)
class Heard:
    """What the runs of a rehearsal have told their driver."""

    refused: str = ""
    limited: str = ""


class RehearsedSession(Session):
    """Answers by itself: what is suggested was decided before, and nothing goes anywhere."""

    def __init__(self, run: RunTrial, order: Order, params: dict[str, Any], heard: Heard) -> None:
        super().__init__(None, run)
        self._order = order
        self._params = params
        self._heard = heard
        self._distributions: dict[str, BaseDistribution] = {}
        self._user_attrs: dict[str, Any] = {}
        self.moves_next = False

    def call(self, target: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """See `Session`."""
        self.check()
        if target == "trial" and name in _DISTRIBUTIONS:
            value = self._suggested(args[0], _DISTRIBUTIONS[name](*args[1:], **kwargs))
            if is_primitive(value):
                self.parameters[args[0]] = value
            return value
        if target == "trial" and name in ("set_user_attr", "set_system_attr", "set_constraint"):
            self._user_attrs |= {args[0]: args[1]} if name == "set_user_attr" else {}
            return None
        return self._unknown(target, name)

    def read(self, target: str, name: str) -> Any:
        """See `Session`."""
        if target == "study" and name in self._order.study:
            return self._order.study[name]
        own = {
            "params": self.parameters,
            "distributions": self._distributions,
            "user_attrs": self._user_attrs,
            "system_attrs": {},
            "datetime_start": None,
        }
        return own[name] if target == "trial" and name in own else self._unknown(target, name)

    def tell(self, target: str, name: str, *args: Any, **kwargs: Any) -> None:
        """See `Session`."""
        self.call(target, name, *args, **kwargs)

    def _unknown(self, target: str, name: str) -> NoReturn:
        raise UnfitError(f"the objective asks the {target} for `{name}`, which has no answer here")

    def _suggested(self, name: str, distribution: BaseDistribution) -> Any:
        self._distributions[name] = distribution
        choices = getattr(distribution, "choices", ())
        if name not in self._params:
            if self._order.params is not None:
                raise UnfitError(f"no value was given for the parameter {name!r}")
            self._params[name] = _drawn(name, distribution, self._order.seed)
        value = self._params[name]
        for index, choice in enumerate(choices):
            if isinstance(choice, PackedChoice) and value == index:
                return Chosen(index=index)
        return value

    def ask(self, kind: type[RankCall], **fields: Any) -> Any:
        """See `Session`."""
        self.check()
        if kind is EndEpoch:
            decision = EpochDecision.YIELD if self._order.moves else EpochDecision.GO
            return AfterEpoch(decision, stays=True)
        return self._unknown("driver", kind.__name__)

    def report(self, value: float, step: int) -> None:
        """See `Session`."""
        self.check()

    def should_prune(self) -> bool:
        """See `Session`."""
        self.check()
        return False

    def send(self, message: Any) -> None:
        """See `Session`."""
        match message:
            case MoveRefused():
                self._heard.refused = self._heard.refused or "it refuses to be moved"
            case CheckpointFailed():
                self._heard.refused = self._heard.refused or message.problem
            case WidthLimited():
                self._heard.limited = f"on more than {message.max_devices}"

    def send_aside(self, message: Any) -> None:
        """See `Session`."""
        self.send(message)


_DISTRIBUTIONS: dict[str, Callable[..., BaseDistribution]] = {
    "suggest_float": FloatDistribution,
    "suggest_int": IntDistribution,
    "suggest_categorical": CategoricalDistribution,
}


def _drawn(name: str, distribution: BaseDistribution, seed: int) -> Any:
    """A value drawn at random; of choices that are objects the position."""
    rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    match distribution:
        case CategoricalDistribution(choices=choices):
            index = int(rng.integers(len(choices)))
            return index if isinstance(choices[index], PackedChoice) else choices[index]
        case FloatDistribution() | IntDistribution():
            low, high, step = distribution.low, distribution.high, distribution.step
            if distribution.log:
                value = float(np.exp(rng.uniform(np.log(low), np.log(high))))
            else:
                value = float(rng.uniform(low, high))
            if step:
                value = low + round((value - low) / step) * step
            value = min(max(value, low), high)
            return round(value) if isinstance(distribution, IntDistribution) else value
    raise UnfitError(f"the distribution of the parameter {name!r} is unknown")
