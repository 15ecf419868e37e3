"""What a data set finds around it when a sample is made: of (seed, name, epoch, sample) only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from optuna_fleet.pipeline.preprocessor.order import own_randomness, seed_order, seed_sample
from optuna_fleet.pipeline.preprocessor.source import Source
from optuna_fleet.pipeline.spec import PipelineSpec


class Surroundings:
    """Seeds, ``set_epoch`` and ``get_worker_info()``, as under a DataLoader with one worker.

    One, whatever the number of preprocessors: which of them makes a sample is of the moment.
    """

    def __init__(self, source: Source, spec: PipelineSpec) -> None:
        self._source = source
        self._seed = spec.seed
        self._told = {
            name: [each for each in _within(dataset) if hasattr(each, "set_epoch")]
            for name, dataset in source.datasets.items()
        }
        self._epochs: dict[int, int] = {}  # by id of what was told of it

    def begin(self, name: str, epoch: int, place: int) -> None:
        """Sets all of them for a sample, which is made next.

        Raises:
            Exception: What the data set's ``set_epoch`` raises.
        """
        from torch.utils.data._utils import worker

        generators = self._source.generators
        for each in self._told[name]:
            if self._epochs.get(id(each)) != epoch:  # several names may have it in them
                seed_order(self._seed, "", epoch, generators)
                self._epochs.pop(id(each), None)
                each.set_epoch(epoch)
                self._epochs[id(each)] = epoch
        seed = seed_sample(self._seed, name, epoch, place, generators)
        dataset = self._source.datasets[name]
        worker._worker_info = worker.WorkerInfo(id=0, num_workers=1, seed=seed, dataset=dataset)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """What `begin` sets within is as it was before, outside: in a process of the user's."""
        self._epochs.clear()  # he may have called set_epoch himself
        with own_randomness():
            yield


def _within(dataset: Any) -> Iterator[Any]:
    """The data set, and those it is made of by torch's classes."""
    from torch.utils.data import ConcatDataset, Subset

    yield dataset
    if type(dataset) is Subset:
        yield from _within(dataset.dataset)
    elif type(dataset) is ConcatDataset:
        for each in dataset.datasets:
            yield from _within(each)
