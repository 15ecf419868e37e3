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

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.preprocessor.attributes import Attributes
from optuna_fleet.pipeline.preprocessor.transform_split import (
    NoSplitError,
    TransformSplit,
    below,
    candidates,
    transform_of,
)
from optuna_fleet.pipeline.preprocessor.transforms import Step, steps_of
from optuna_fleet.pipeline.spec import Cut

Seed = Callable[[], None]

MAX_TRIES = 16
"""Samples that splitting is tried on, where one after another raises."""


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
        cut: Where its own transform was taken apart; None where the user said how.
        has_augment: Whether anything is random. If not, ``prepared`` gives what the data set
            gives (but for ``finished``), to be treated as ``dataset[index]`` always is, and
            ``augmented`` leaves it as it is. Otherwise ``prepared`` gives a form of its own that
            chunks keep without loss, and only ``augmented`` understands it.
        has_finish: Whether ``finished`` does anything.
    """

    @property
    def cut(self) -> Cut | None: ...  # noqa: D102

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


def may_split(dataset: Any, stages: Stages, *, by_itself: bool) -> bool:
    """Returns whether there is anything to try, without reading a sample.

    Args:
        dataset: The data set.
        stages: What the user gave for it.
        by_itself: Its own transform may be taken apart.
    """
    return stages.in_parts or (by_itself and _own_steps(dataset) is not None)


def decide(
    name: str, dataset: Any, stages: Stages, *, num_samples: int, seed: Callable[[int], None]
) -> SplitDataset | None:
    """Returns how to take a data set apart: tried on its first sample that does not raise.

    It is to be asked once for all processes, which rebuild the split by ``rebuilt``. What raises
    may be of the moment (a file server), and is told of when the sample is wanted.

    Args:
        name: The name of the data set.
        dataset: A copy of it that nobody reads: what it opens stays open.
        stages: What the user gave for it.
        num_samples: Its length.
        seed: Seeds for the sample of this index.

    Raises:
        FleetConfigError: What the user gave does not do what it must.
    """
    for index in range(min(num_samples, MAX_TRIES)):
        try:
            found = split(dataset, stages, index=index, seed=partial(seed, index))
            usable = found is None or agrees(found, dataset, index, partial(seed, index))
        except (Exception, SystemExit):
            continue
        if not usable and stages.in_parts:
            raise FleetConfigError(
                f"What `prepare` gives for sample {index} of data set {name!r} is not the "
                "same each time, or is changed in place by `augment`, or can't be stored. "
                "Leave all that is random to `augment`, which must work on copies."
            )
        return found if usable else None
    return _StagedSplit(dataset=dataset, stages=stages) if stages.in_parts else None


def rebuilt(dataset: Any, stages: Stages, cut: Cut | None) -> SplitDataset | None:
    """Returns the split that was decided on, without reading a sample."""
    if stages.in_parts:
        return _StagedSplit(dataset=dataset, stages=stages)
    if cut is None:
        return None
    steps = _own_steps(dataset) or ()
    return TransformSplit(dataset, steps, Attributes(steps, cut.restless), stages.finish, cut)


def _own_steps(dataset: Any) -> tuple[Step, ...] | None:
    return steps_of(transform_of(dataset))


def split(dataset: Any, stages: Stages, *, index: int, seed: Seed) -> SplitDataset | None:
    """Takes a data set apart, by its own ``transform`` or as the user says.

    Args:
        dataset: Has an attribute ``transform`` (or ``transforms``) made of torchvision's; also
            below ``Subset`` and ``ConcatDataset``.
        stages: With ``prepare`` or ``augment`` these are taken, and not tried: ask ``agrees``.
        index: The sample it is tried on.
        seed: Seeds torch, NumPy and ``random`` for that sample.

    Returns:
        None if there is no place to split: ``dataset[index]`` is then called whole in every
        epoch, and the caller applies ``stages.finish``.

    Raises:
        Exception: What ``dataset[index]`` raises.
        OSError: Likewise when it is read again: it says nothing of the transform.
    """
    if stages.in_parts:
        return _StagedSplit(dataset=dataset, stages=stages)
    steps = _own_steps(dataset)
    if steps is None:
        return None
    attributes = Attributes(steps)
    if any(map(attributes.include, below(dataset))):
        return None  # it is copied, and its steps would know the original
    # First of all: a data set that keeps its results must not keep those of half a transform.
    seed()
    dataset[index]
    before = attributes.now()
    dataset[index]  # drawn otherwise: only what the steps set themselves is another now
    try:
        attributes.ignore_changed(before)
        found = list(candidates(dataset, steps, attributes, stages.finish, index))
    except Exception as error:
        _raise_if_of_the_moment(error)
        return None
    return next((split for split in found if agrees(split, dataset, index, seed)), None)


def _raise_if_of_the_moment(error: BaseException) -> None:
    """Raises what may not be raised when it is tried again, or what has led to this."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (OSError, MemoryError)):
            raise cause
        cause = cause.__cause__ or cause.__context__


def agrees(split: SplitDataset, dataset: Any, index: int, seed: Seed) -> bool:
    """Returns whether a split gives what the data set gives, for one sample.

    Bit for bit, by way of a chunk, alone and as a batch; and whether ``prepared`` is the same
    under another state of the generators, and draws nothing from them. Leaves them changed.

    Raises:
        Exception: What ``dataset[index]`` raises, and the user's stages.
        OSError: Likewise when it is read again: it says nothing of the split.
    """
    wanted = split.whole(dataset, index, seed)
    try:
        return _agrees(split, index, seed, wanted)
    except Exception as error:
        _raise_if_of_the_moment(error)
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

    cut = None

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
