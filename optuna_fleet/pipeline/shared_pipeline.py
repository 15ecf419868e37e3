"""What the user gives: data sets by name, to be preprocessed once for all trials."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

import cloudpickle

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.spec import DatasetSpec, PipelineSpec

if TYPE_CHECKING:
    from optuna_fleet.pipeline.inline import InlineClient

Collate = Callable[[list[Any]], Any]


class SharedPipeline:
    """Data sets that all trials of a sweep read, each sample preprocessed once for all of them.

    The content and the order of an epoch depend only on (seed, name, epoch, index): every trial
    sees the same data, at its own batch size.

    Args:
        seed: Seed of orders and of augmentation; torch, NumPy and ``random`` are seeded from it
            before each ``dataset[index]``.
        collate_fn: Makes a batch from a list of samples, as for a DataLoader; one for all data
            sets, or one per name. It runs in the trainers.
        shuffled: Names of the data sets that get a new order and new augmentation in every epoch;
            by default those whose name starts with "train". All others have one epoch, in the
            order of the data set, that is preprocessed once per sweep.
        num_preprocessors: Processes that preprocess, per node; chosen from the number of cores if
            not given.
        memory_bytes: Memory per node for preprocessed data; a quarter of what is available if not
            given.
        **datasets: Map-style data sets (``len(dataset)`` and ``dataset[index]``) by name.

    Raises:
        FleetConfigError: An argument can't work.

    Example:
        ``SharedPipeline(train=train_dataset, val=val_dataset)``
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        collate_fn: Collate | Mapping[str, Collate] | None = None,
        shuffled: Collection[str] | None = None,
        num_preprocessors: int | None = None,
        memory_bytes: int | None = None,
        **datasets: Any,
    ) -> None:
        if not datasets:
            raise FleetConfigError(
                "A SharedPipeline needs at least one data set: SharedPipeline(train=dataset)."
            )
        self._datasets = datasets
        self._collates = _collates(collate_fn, datasets)
        self._shuffled = _shuffled(shuffled, datasets)
        self._lengths = {name: _length(name, dataset) for name, dataset in datasets.items()}
        self.seed = _positive("seed", seed, minimum=None)
        self.num_preprocessors = _optional("num_preprocessors", num_preprocessors)
        self.memory_bytes = _optional("memory_bytes", memory_bytes)

    def spec(self) -> PipelineSpec:
        """Returns the description that trainers get."""
        return PipelineSpec(
            seed=self.seed,
            datasets=tuple(
                DatasetSpec(
                    name=name,
                    num_samples=length,
                    shuffled=name in self._shuffled,
                    collate=_packed(f"collate_fn of data set {name!r}", self._collates.get(name)),
                )
                for name, length in self._lengths.items()
            ),
        )

    def inline(self) -> InlineClient:
        """Returns a client that preprocesses in this process (imports torch)."""
        from optuna_fleet.pipeline.inline import InlineClient

        return InlineClient(self.spec(), self._datasets, self._collates)

    def payload(self) -> bytes:
        """Returns the data sets as cloudpickle bytes, for the preprocessors."""
        packed = _packed("data sets of the SharedPipeline", self._datasets)
        assert packed is not None
        return packed


def _length(name: str, dataset: Any) -> int:
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise FleetConfigError(
            f"Data set {name!r} is of type {type(dataset).__name__}, but a SharedPipeline needs a "
            "map-style data set, with len(dataset) and dataset[index]: all trials share one order "
            "of its samples, and an iterable can't be read by index."
        )
    length = len(dataset)
    if not length:
        raise FleetConfigError(
            f"Data set {name!r} is empty, but must have at least one sample. "
            "Check the path or the filter it was built with."
        )
    return int(length)


def _collates(given: Collate | Mapping[str, Collate] | None, names: Collection[str]) -> Any:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        given = dict.fromkeys(names, given)
    _check_names("collate_fn", given, names)
    for name, collate in given.items():
        if not callable(collate):
            raise FleetConfigError(
                f"The collate_fn of data set {name!r} is {collate!r}, but must be callable: it "
                "makes a batch from a list of samples."
            )
    return dict(given)


def _shuffled(given: Collection[str] | None, names: Collection[str]) -> frozenset[str]:
    if given is None:
        return frozenset(name for name in names if name.startswith("train"))
    if isinstance(given, str):
        given = [given]
    _check_names("shuffled", given, names)
    return frozenset(given)


def _check_names(argument: str, given: Collection[str], names: Collection[str]) -> None:
    for name in given:
        if name not in names:
            known = ", ".join(map(repr, names))
            raise FleetConfigError(
                f"`{argument}` names {name!r}, but the SharedPipeline's data sets are {known}."
            )


def _optional(argument: str, value: int | None) -> int | None:
    return None if value is None else _positive(argument, value, minimum=1)


def _positive(argument: str, value: Any, *, minimum: int | None) -> int:
    wanted = "an int" if minimum is None else f"an int >= {minimum}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise FleetConfigError(f"The value of `{argument}` is {value!r}, but must be {wanted}.")
    number = int(value.__index__())
    if minimum is not None and number < minimum:
        raise FleetConfigError(f"The value of `{argument}` is {value!r}, but must be {wanted}.")
    return number


def _packed(what: str, value: Any) -> bytes | None:
    if value is None:
        return None
    try:
        return cast(bytes, cloudpickle.dumps(value))
    except Exception as error:
        raise FleetConfigError(
            f"The {what} can't be pickled ({type(error).__name__}: {error}). Preprocessors are "
            "other processes: open files, locks and connections lazily, in __getitem__."
        ) from error
