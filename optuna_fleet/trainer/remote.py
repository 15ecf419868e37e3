"""What stands in a trainer for the trial, the study and the storage, which are in the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optuna

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.session import Session
from optuna_fleet.wire.calls import ShouldPrune
from optuna_fleet.wire.packing import is_primitive, pack, unpack


class Remote:
    """Stands for the driver's study or storage: methods and attributes are those over there.

    It asks through the session of the run under way, whichever that is.
    """

    def __init__(self, session: Callable[[], Session], target: str) -> None:
        vars(self).update(_session=session, _target=target)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Some functions of Optuna ask whether what they are given is a study."""
        return _KINDS[self._target]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"`{name}` can't be set in an objective, as the {self._target} is in another process: "
            "set it before `optimize` or in a callback."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TrialError(
            f"The {self._target} can't be pickled or copied in an objective, as it is in another "
            "process: do so in a callback."
        )

    def __getattr__(self, name: str) -> Any:
        if self._target == "study" and name == "_storage":
            return Remote(self._session, "storage")
        if callable(getattr(_WITH_METHODS[self._target], name, None)):
            return lambda *args, **kwargs: self._session().call(
                self._target, name, *args, **kwargs
            )
        if name.startswith("__"):
            raise AttributeError(name)
        return self._session().read(self._target, name)


_KINDS = {"study": optuna.Study, "storage": optuna.storages.BaseStorage}
_WITH_METHODS = {
    "study": optuna.Study,
    "storage": optuna.storages.RDBStorage,  # it has heartbeats too
}
_SET_BY_OPTUNA = (
    "relative_search_space",
    "_relative_params",
    "_fixed_params",
    "_cached_frozen_trial",
)


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
        if is_primitive(value):
            self._session.choices[name] = repr(value)
            return value
        # But a copy; its position says the same in all processes, which its repr may not.
        position = own.index(value)
        self._session.choices[name] = f"choice {position}"
        self._chosen[name] = own[position]
        return own[position]

    def should_prune(self) -> bool:
        """See `optuna.Trial.should_prune`; every rank gets the same answer."""
        last_step = self._session.reports.last_step
        return self._session.ask(ShouldPrune, last_step=last_step)  # type: ignore[no-any-return]

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
