"""What stands in a trainer for the study and the storage, which are in the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optuna

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.session import Session


class Remote:
    """Stands for the driver's study or storage: methods and attributes are those over there.

    Args:
        session: Returns the session to ask through: that of the run under way.
        target: "study" or "storage".
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
        if any(callable(getattr(kind, name, None)) for kind in _WITH_METHODS[self._target]):
            return lambda *args, **kwargs: self._session().call(
                self._target, name, *args, **kwargs
            )
        if name.startswith("__"):
            raise AttributeError(name)
        return self._session().read(self._target, name)


_KINDS = {"study": optuna.Study, "storage": optuna.storages.BaseStorage}
_WITH_METHODS = {
    "study": (optuna.Study,),
    "storage": (optuna.storages.RDBStorage,),  # it has heartbeats too
}
