"""Optuna's own methods of the trial that an objective gets in a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optuna

from optuna_fleet.exceptions import TrialError
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.trainer.remote import Remote
from optuna_fleet.trainer.session import Session
from optuna_fleet.wire.packing import is_primitive, pack, plain, unpack

_SET_BY_OPTUNA = {
    "relative_search_space",
    "_relative_params",
    "_fixed_params",
    "_cached_frozen_trial",
}


def _there(name: str) -> Any:
    """What the trial has in the driver."""

    def read(self: RemoteTrial) -> Any:
        return self._session.read("trial", name)

    return property(read, doc=f"See `optuna.Trial.{name}`.")


class RemoteTrial(optuna.Trial):
    """An `optuna.Trial` whose every method is carried out on the real study, in the driver."""

    def __init__(self, session: Session) -> None:
        # optuna.Trial.__init__ would ask the storage and the sampler, which are in the driver.
        self._session = session
        self._trial_id = session.run.trial_id
        self._chosen: dict[str, Any] = {}
        self.study: Any = Remote(lambda: session, "study")
        self.storage: Any = Remote(lambda: session, "storage")

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """See `optuna.Trial.suggest_float`."""
        return self._session.call("trial", "suggest_float", name, low, high, step=step, log=log)  # type: ignore[no-any-return]

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """See `optuna.Trial.suggest_int`."""
        return self._session.call("trial", "suggest_int", name, low, high, step=step, log=log)  # type: ignore[no-any-return]

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """See `optuna.Trial.suggest_categorical`; returns one of `choices` itself."""
        own = tuple(choices)
        for choice in own:
            _check_choice(name, choice)
        value = self._session.call("trial", "suggest_categorical", name, own)
        if not is_primitive(value):  # but a copy
            value = self._chosen[name] = next(choice for choice in own if choice == value)
        return value

    def report(self, value: float, step: int) -> None:
        """See `optuna.Trial.report`; does not wait until the value is stored.

        Should that fail, because the value is not the same on all ranks of the trial, say, the
        error is raised by the next call that has an answer, or else it is the objective's end.
        """
        self._add_report(value, step)

    def _add_report(self, value: float, step: int) -> bool:
        """Report a value; return whether it is the best so far."""
        num_objectives = 2 if self._session.run.maximize is None else 1
        value, step = compat.checked_report(plain(value), step, num_objectives=num_objectives)
        self._session.report(value, step)
        return self._session.reports.add(value, step)

    def should_prune(self) -> bool:
        """See `optuna.Trial.should_prune`; every rank gets the same answer."""
        return self._session.should_prune()

    def set_user_attr(self, key: str, value: Any) -> None:
        """See `optuna.Trial.set_user_attr`; rank 0's value counts."""
        self._session.tell("trial", "set_user_attr", key, value)

    def set_constraint(self, key: str, value: float) -> None:
        """See `optuna.Trial.set_constraint`; the same value on all ranks, as in `report`."""
        self._session.call("trial", "set_constraint", key, value)

    @property
    def params(self) -> dict[str, Any]:
        """See `optuna.Trial.params`."""
        params: dict[str, Any] = self._session.read("trial", "params")
        # What comes from the driver is a copy.
        return params | self._chosen

    distributions: Any = _there("distributions")
    user_attrs: Any = _there("user_attrs")
    constraints: Any = _there("constraints")
    relative_params: Any = _there("relative_params")
    datetime_start: Any = _there("datetime_start")

    def __getattr__(self, name: str) -> Any:
        """What `optuna.Trial.__init__` would have set, as it is over there."""
        if name not in _SET_BY_OPTUNA:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._session.read("trial", name)

    @property
    def number(self) -> int:
        """See `optuna.Trial.number`."""
        return self._session.run.number


def _check_choice(name: str, choice: Any) -> None:
    """A choice that is an object: each process has its own, and to Optuna they must be equal."""
    if is_primitive(choice):
        return
    try:
        problem = "" if unpack(pack(choice)) == choice else "must be equal to a copy of itself"
    except Exception as error:
        problem = f"can't be pickled ({type(error).__name__}: {error})"
    if problem:
        raise TrialError(
            f"A choice of {name!r} is {choice!r}, but {problem}, as each process has its own: "
            "suggest a name instead, and take the object from a dict by it."
        )
