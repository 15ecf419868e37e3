"""What an objective hears in a rehearsal, where there is no driver and no study."""

from __future__ import annotations

from typing import Any, NoReturn

import optuna
from optuna.samplers import RandomSampler

from optuna_fleet.events import EpochDecision, MoveRefused
from optuna_fleet.preflight.notes import Order, Rehearsed
from optuna_fleet.trainer.session import Session
from optuna_fleet.wire.calls import AfterEpoch, EndEpoch, RankCall, Report, ShouldPrune
from optuna_fleet.wire.messages import CheckpointFailed, RunTrial
from optuna_fleet.wire.packing import is_primitive


class UnfitError(Exception):
    """It can't be checked: says why."""


class RehearsedSession(Session):
    """Asks a trial in this process' memory instead of the driver; nothing goes anywhere."""

    def __init__(self, run: RunTrial, order: Order, notes: Rehearsed) -> None:
        super().__init__(None, run)
        self._order = order
        self._notes = notes
        directions = order.study["directions"]
        study = optuna.create_study(sampler=RandomSampler(order.seed), directions=directions)
        known = {**(order.params or {}), **notes.params}
        study.enqueue_trial(known, user_attrs=notes.user_attrs)
        self._trial = study.ask()

    def call(self, target: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """See `Session`."""
        self.check()
        if target != "trial":
            self._unknown(target, name)
        if name.startswith("suggest_"):
            return self._suggested(name, *args, **kwargs)
        answer = getattr(self._trial, name)(*args, **kwargs)
        self._notes.user_attrs = self._trial.user_attrs
        return answer

    def _suggested(self, kind: str, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._order.params is not None and name not in self._order.params:
            raise UnfitError(f"no value was given for the parameter {name!r}")
        if not is_primitive(given := (self._order.params or {}).get(name)):
            return given
        objects = {}  # of the choices, by their position
        if kind == "suggest_categorical":
            objects = {i: c for i, c in enumerate(args[0]) if not is_primitive(c)}
            args = ([i if i in objects else choice for i, choice in enumerate(args[0])],)
        value = getattr(self._trial, kind)(name, *args, **kwargs)
        self._notes.params[name] = value
        if type(value) is int and value in objects:
            return objects[value]
        if is_primitive(value):
            self.parameters[name] = value
        return value

    def read(self, target: str, name: str) -> Any:
        """See `Session`."""
        if target == "study" and name in self._order.study:
            return self._order.study[name]
        return getattr(self._trial, name) if target == "trial" else self._unknown(target, name)

    def tell(self, target: str, name: str, *args: Any, **kwargs: Any) -> None:
        """See `Session`."""
        self.call(target, name, *args, **kwargs)

    def _unknown(self, target: str, name: str) -> NoReturn:
        raise UnfitError(f"the objective asks the {target} for `{name}`, which has no answer here")

    def ask(self, kind: type[RankCall], **fields: Any) -> Any:
        """See `Session`."""
        self.check()
        if kind is EndEpoch:
            decision = EpochDecision.YIELD if self._order.moves else EpochDecision.GO
            return AfterEpoch(decision, stays=True)
        return False if kind in (ShouldPrune, Report) else self._unknown("driver", kind.__name__)

    def send(self, message: Any) -> None:
        """See `Session`."""
        match message:
            case MoveRefused():
                self._notes.refused = self._notes.refused or "it refuses to be moved"
            case CheckpointFailed():
                self._notes.refused = self._notes.refused or message.problem
