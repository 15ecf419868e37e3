"""What a fleet objective finds without a fleet: Optuna's trial, DataLoaders, one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optuna
from torch.utils.data import DataLoader


class PlainTrial:
    """Runs an objective written for `FleetTrial` on nothing but PyTorch and Optuna.

    Args:
        trial: Optuna's trial, or None if nothing is suggested.
        loaders: A DataLoader for each data set.
        num_epochs: Epochs to train, whatever the objective asks for.
    """

    def __init__(
        self, trial: optuna.Trial | None, loaders: dict[str, DataLoader[Any]], num_epochs: int
    ) -> None:
        self._trial = trial
        self._loaders = loaders
        self._num_epochs = num_epochs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trial, name)

    def prepare(self, *objects: Any) -> Any:
        """The objects as they are."""
        return objects if len(objects) > 1 else objects[0]

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """As many epochs as this trial is to have."""
        return iter(range(self._num_epochs))

    def batches(self, name: str, batch_size: int) -> DataLoader[Any]:
        """The DataLoader of that name."""
        assert self._loaders[name].batch_size == batch_size
        return self._loaders[name]

    def sum(self, value: Any) -> Any:
        """The value: there is one rank."""
        return value

    def report(self, value: float, step: int) -> None:
        """Report to Optuna's trial, if there is one."""
        if self._trial is not None:
            self._trial.report(value, step)

    def should_prune(self) -> bool:
        """Never: how long to train is given."""
        return False


def loader(dataset: Any, batch_size: int, *, shuffle: bool, num_workers: int) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
