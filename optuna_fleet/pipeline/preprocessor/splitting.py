"""A data set taken apart at its first random step: what comes before it is kept for the sweep.

``prepared`` is the same in every epoch and is stored; ``augmented`` is drawn anew; ``finished``
changes element types and scales, of one sample or of a whole batch at once. The three together
give what ``dataset[index]`` gives, bit for bit: ``split`` tries it on one sample, and ``agrees``
can be asked about others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from optuna_fleet.pipeline.preprocessor.transform_split import (
    NoSplitError,
    candidates,
    transform_of,
)
from optuna_fleet.pipeline.preprocessor.transforms import steps_of

Seed = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What the user gave explicitly for one data set.

    Attributes:
        prepare: Deterministic, on ``dataset[index]``; what it gives is stored.
        augment: Random, on what ``prepare`` gave (on ``dataset[index]`` without it, which must
            then be the same at every call).
        finish: Deterministic and elementwise, on the whole sample, or on the whole collated
            batch: both must give the same. With neither of the others, the data set is split by
            itself, and this comes after its own last step.
    """

    prepare: Callable[[Any], Any] | None = None
    augment: Callable[[Any], Any] | None = None
    finish: Callable[[Any], Any] | None = None

    @property
    def in_parts(self) -> bool:
        """Whether the user says what is random."""
        return self.prepare is not None or self.augment is not None


class SplitDataset(Protocol):
    """A data set in three parts. Equal in every process that has the same data set.

    Attributes:
        has_augment: Whether anything is random. If not, ``prepared`` gives what the data set
            gives (but for ``finished``), to be treated as ``dataset[index]`` always is, and
            ``augmented`` leaves it as it is. Otherwise ``prepared`` gives a form of its own that
            chunks keep without loss, and only ``augmented`` understands it.
        has_finish: Whether ``finished`` does anything.
    """

    @property
    def has_augment(self) -> bool: ...  # noqa: D102

    @property
    def has_finish(self) -> bool: ...  # noqa: D102

    def prepared(self, index: int) -> Any:
        """Returns what is the same in every epoch."""
        ...

    def augmented(self, prepared: Any) -> Any:
        """Returns the sample, drawn from the generators as they are; ``prepared`` stays as is."""
        ...

    def finished(self, sample_or_batch: Any) -> Any:
        """Returns the end of what ``augmented`` gave, or of a batch of it (``default_collate``).

        With a ``collate_fn`` of the user's, finish the samples before they are collated.
        """
        ...

    def finisher(self) -> Callable[[Any], Any]:
        """Returns ``finished`` without the data set, to be sent elsewhere."""
        ...

    def whole(self, dataset: Any, index: int, seed: Seed) -> Any:
        """Returns the sample as it is without splitting, after ``seed()``."""
        ...


def split(dataset: Any, stages: Stages, *, index: int, seed: Seed) -> SplitDataset | None:
    """Takes a data set apart, by its own ``transform`` or as the user says.

    Args:
        dataset: Has an attribute ``transform`` (or ``transforms``) made of torchvision's; also
            below ``Subset`` and ``ConcatDataset``.
        stages: With ``prepare`` or ``augment`` these are taken, and not tried: ask ``agrees``.
        index: The sample it is tried on. Processes that must agree try the same.
        seed: Seeds torch, NumPy and ``random`` for that sample.

    Returns:
        None if there is no place to split: ``dataset[index]`` is then called whole in every
        epoch, and the caller applies ``stages.finish``.

    Raises:
        Exception: What ``dataset[index]`` raises.
    """
    if stages.in_parts:
        return _StagedSplit(dataset=dataset, stages=stages)
    steps = steps_of(transform_of(dataset))
    if steps is None:
        return None
    # First of all: a data set that keeps its results must not keep those of half a transform.
    seed()
    dataset[index]
    try:
        found = list(candidates(dataset, steps, stages.finish, index))
    except Exception:
        return None
    return next((split for split in found if agrees(split, dataset, index, seed)), None)


def agrees(split: SplitDataset, dataset: Any, index: int, seed: Seed) -> bool:
    """Returns whether a split gives what the data set gives, for one sample.

    Bit for bit, by way of a chunk, alone and as a batch; and whether ``prepared`` is the same
    under another state of the generators, and draws nothing from them. Leaves them changed.

    Raises:
        Exception: What ``dataset[index]`` raises, and the user's stages.
    """
    wanted = split.whole(dataset, index, seed)
    try:
        return _agrees(split, index, seed, wanted)
    except Exception:
        return False


def _agrees(split: SplitDataset, index: int, seed: Seed, wanted: Any) -> bool:
    from optuna_fleet.pipeline.preprocessor import storable

    prepared = _drawing_nothing(split, index, seed, num_drawn=0)
    again = _drawing_nothing(split, index, seed, num_drawn=1)
    read: Callable[[Any], Any] = _itself
    if split.has_augment:
        read = partial(storable.unpack, copy=False)
        prepared = storable.through_chunk(prepared, pickled=False)
        again = storable.through_chunk(again, pickled=True)
    if not storable.same(read(prepared), read(again)):
        return False
    seed()
    augmented = split.augmented(prepared)
    if not storable.same(split.finished(augmented), wanted):
        return False
    # Once more: what is stored must not have been changed on the way.
    if not storable.same(read(prepared), read(again)):
        return False
    return not split.has_finish or _agrees_as_batch(split, augmented, wanted)


def _agrees_as_batch(split: SplitDataset, augmented: Any, wanted: Any) -> bool:
    from optuna_fleet.pipeline.preprocessor import storable

    try:
        batch, wanted_batch = storable.batch_of_two(augmented), storable.batch_of_two(wanted)
    except Exception:
        return True  # without a collate_fn of the user's there is no batch to finish
    # default_collate made lists of tuples, of which the user's finish may make tuples again.
    return storable.same(_listed(split.finished(batch)), _listed(wanted_batch))


def _listed(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _listed(item) for key, item in batch.items()}
    return list(map(_listed, batch)) if type(batch) in (tuple, list) else batch


def _drawing_nothing(split: SplitDataset, index: int, seed: Seed, *, num_drawn: int) -> Any:
    seed()
    _draw(num_drawn)
    before = _generators()
    prepared = split.prepared(index)
    if _generators() != before:
        raise NoSplitError("random numbers were drawn before the first random step")
    return prepared


def _draw(count: int) -> None:
    import numpy as np
    import torch

    for _ in range(count):
        torch.rand((), device="cpu")
        np.random.rand()
        random.random()


def _generators() -> tuple[Any, ...]:
    import numpy as np
    import torch

    _, keys, *rest = np.random.get_state(legacy=True)
    return (
        torch.get_rng_state().numpy().tobytes(),
        np.asarray(keys).tobytes(),
        rest,
        (random.getstate()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedSplit:
    dataset: Any
    stages: Stages

    @property
    def has_augment(self) -> bool:
        return self.stages.augment is not None

    @property
    def has_finish(self) -> bool:
        return self.stages.finish is not None

    def prepared(self, index: int) -> Any:
        from optuna_fleet.pipeline.preprocessor import storable

        sample = _called(self.stages.prepare, self.dataset[index])
        return storable.pack(sample, faithful=True) if self.has_augment else sample

    def augmented(self, prepared: Any) -> Any:
        from optuna_fleet.pipeline.preprocessor import storable

        if not self.has_augment:
            return prepared
        return _called(self.stages.augment, storable.unpack(prepared, copy=True))

    def finished(self, sample_or_batch: Any) -> Any:
        return _called(self.stages.finish, sample_or_batch)

    def finisher(self) -> Callable[[Any], Any]:
        return partial(_called, self.stages.finish)

    def whole(self, dataset: Any, index: int, seed: Seed) -> Any:
        seed()
        sample = _called(self.stages.prepare, dataset[index])
        seed()
        return _called(self.stages.finish, _called(self.stages.augment, sample))


def _itself(value: Any) -> Any:
    return value


def _called(function: Callable[[Any], Any] | None, value: Any) -> Any:
    return value if function is None else function(value)
