"""A data set taken apart at its first random step: what comes before it is kept for the sweep.

``prepared`` is the same in every epoch and is stored; ``augmented`` is drawn anew; ``finished``
changes element types and scales, of one sample or of a whole batch at once. The three together
give what ``dataset[index]`` gives, bit for bit: `decide` tries it on one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.chunks.structure import map_leaves
from optuna_fleet.pipeline.preprocessor import transform_split
from optuna_fleet.pipeline.preprocessor.order import watched
from optuna_fleet.pipeline.preprocessor.transforms import Steps, leaves_input
from optuna_fleet.pipeline.spec import Cut

Function = Callable[[Any], Any]
Seed = Callable[[], None]
Begin = Callable[[int], None]
"""Sets all that a sample may depend on but itself, as in an epoch."""

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

    prepare: Function | None = None
    augment: Function | None = None
    finish: Function | None = None

    @property
    def in_parts(self) -> bool:
        """Whether the user says what is random."""
        return self.prepare is not None or self.augment is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDataset:
    """A data set in three parts. Equal in every process that has the same data set.

    Attributes:
        prepared: Returns the beginning of the sample of an index, the same in every epoch.
        augment: The random rest; None where nothing is random.
        finish: The elementwise end; None for none. Without the data set: it may be sent elsewhere.
        stages: What the user gave.
        copies: ``augment``, or a ``finish`` of the user's, may write into what is stored.
        cut: Where the data set's own transform was taken apart; None where the user said how.
    """

    prepared: Callable[[int], Any]
    augment: Function | None
    finish: Function | None
    stages: Stages
    copies: bool
    cut: Cut | None = None

    def augmented(self, prepared: Any) -> Any:
        """Returns the sample, drawn from the generators as they are.

        If it ``copies``, ``prepared`` may be another one afterwards.
        """
        return called(self.augment, prepared)

    def finished(self, sample_or_batch: Any) -> Any:
        """Returns the end of what ``augmented`` gave, or of a batch of it (``default_collate``).

        With a ``collate_fn`` of the user's, finish the samples before they are collated.
        """
        return called(self.finish, sample_or_batch)

    def whole(self, dataset: Any, index: int, seed: Seed) -> Any:
        """Returns the sample as it is without splitting, after ``seed()``."""
        seed()
        sample = dataset[index]
        if self.stages.in_parts:
            sample = called(self.stages.prepare, sample)
            seed()
            sample = called(self.stages.augment, sample)
        return called(self.stages.finish, sample)


def called(function: Function | None, value: Any) -> Any:
    """Returns what a function makes of a value; the value itself without one."""
    return value if function is None else function(value)


def may_split(dataset: Any, stages: Stages, *, by_itself: bool | None) -> bool:
    """Returns whether there is anything to try, without reading a sample.

    Its own transform may be taken apart ``by_itself``; of None: if it is of torchvision's.
    """
    if stages.in_parts or by_itself is False:
        return stages.in_parts
    is_known = by_itself or transform_split.is_known(dataset)
    return is_known and transform_split.steps_in(dataset) is not None


def decide(
    name: str,
    dataset: Any,
    stages: Stages,
    *,
    num_samples: int,
    begin: Callable[..., None],
) -> SplitDataset | None:
    """Returns how to take a data set apart: tried on its first sample that does not raise.

    It is to be asked once for all processes, which rebuild the split by ``rebuilt``. What raises
    may be of the moment (a file server), and is told of when the sample is wanted. The data set is
    a copy that nobody reads: what it opens stays open. ``begin`` takes an epoch and a ``place``,
    the index.

    Raises:
        FleetConfigError: What the user gave does not do what it must.
    """
    for index in range(min(num_samples, MAX_TRIES)):
        try:
            found = split(dataset, stages, index=index, begin=partial(begin, place=index))
        except (Exception, SystemExit):
            continue
        if found is None and stages.in_parts:
            raise FleetConfigError(
                f"What `prepare` gives for sample {index} of data set {name!r} is not the "
                "same each time, or is changed in place by `augment`, or can't be stored. "
                "Leave all that is random to `augment`, which must work on copies."
            )
        return found
    return rebuilt(dataset, stages, None)


def split(dataset: Any, stages: Stages, *, index: int, begin: Begin) -> SplitDataset | None:
    """Takes a data set apart, by its own ``transform`` or as the user says; tried on a sample.

    Returns:
        None if there is no place to split, or the parts do not give what the data set gives.

    Raises:
        Exception: What ``dataset[index]`` raises, and the user's stages.
        OSError: Likewise when it is read again: it says nothing of the split.
    """
    found: list[SplitDataset | None]
    if stages.in_parts:
        found = [rebuilt(dataset, stages, None)]
    else:
        begin(0)
        dataset[index]  # its errors are not hidden
        try:
            cuts = list(transform_split.cuts(dataset, index))
        except Exception as error:
            _raise_if_of_the_moment(error)
            return None
        found = [rebuilt(dataset, stages, cut) for cut in cuts]
    return next((each for each in found if each and agrees(each, dataset, index, begin)), None)


def rebuilt(dataset: Any, stages: Stages, cut: Cut | None) -> SplitDataset | None:
    """Returns the split that was decided on, without reading a sample.

    Raises:
        RuntimeError: The data set has another transform than where this was decided.
    """
    if stages.in_parts:
        return SplitDataset(
            prepared=lambda index: called(stages.prepare, dataset[index]),
            augment=stages.augment,
            finish=stages.finish,
            stages=stages,
            copies=True,
        )
    if cut is None:
        return None
    steps = transform_split.steps_in(dataset) or ()
    if len(steps) != cut.num_steps:
        raise RuntimeError(
            f"A transform has {len(steps)} steps here, but {cut.num_steps} where it was "
            "decided how to take it apart: SharedPipeline(..., split=False) leaves it whole."
        )
    middle, end = steps[cut.begin : cut.end], steps[cut.end :]
    at_place = partial(partial, transform_split.applied, cut.place)
    finish: list[Function] = [at_place(Steps(end))] if end else []
    finish += [stages.finish] if stages.finish is not None else []
    return SplitDataset(
        prepared=transform_split.Beginning(dataset, steps[: cut.begin], cut.place),
        augment=at_place(Steps(middle)) if middle else None,
        finish=Steps(tuple(finish)) if finish else None,
        stages=stages,
        # Code that is not known may write into its input.
        copies=stages.finish is not None or not all(map(leaves_input, middle)),
        cut=cut,
    )


def agrees(split: SplitDataset, dataset: Any, index: int, begin: Begin) -> bool:
    """Returns whether a split gives what the data set gives, for one sample.

    Bit for bit, by way of the store, alone and as a batch; and whether ``prepared`` is the same
    in another epoch, and draws nothing from the generators. Leaves them changed.

    Raises:
        Exception: What ``dataset[index]`` raises, and the user's stages.
        OSError: Likewise when it is read again: it says nothing of the split.
    """
    wanted = split.whole(dataset, index, partial(begin, 0))
    try:
        return _agrees(split, index, begin, wanted)
    except Exception as error:
        _raise_if_of_the_moment(error)
        return False


def _agrees(split: SplitDataset, index: int, begin: Begin, wanted: Any) -> bool:
    from optuna_fleet.pipeline.preprocessor.comparing import same

    prepared = _drawing_nothing(split, index, partial(begin, 0))
    again = _drawing_nothing(split, index, partial(begin, 1))
    if split.augment is not None:
        prepared, again = through_store(prepared), through_store(again)
    if not same(prepared, again):
        return False
    begin(0)
    augmented = split.augmented(through_store(prepared) if split.copies else prepared)
    if not same(split.finished(augmented), wanted):
        return False
    # Once more: what is stored must not have been changed on the way.
    if not same(prepared, again):
        return False
    return split.finish is None or _agrees_as_batch(split, augmented, wanted)


def _agrees_as_batch(split: SplitDataset, augmented: Any, wanted: Any) -> bool:
    from optuna_fleet.pipeline.preprocessor.comparing import same

    try:
        batch, wanted_batch = _batch_of_two(augmented), _batch_of_two(wanted)
    except Exception:
        return True  # without a collate_fn of the user's there is no batch to finish
    # default_collate made lists of tuples, of which the user's finish may make tuples again.
    return same(_listed(split.finished(batch)), _listed(wanted_batch))


def _batch_of_two(sample: Any) -> Any:
    from torch.utils.data import default_collate

    from optuna_fleet.pipeline.chunks.columns import without_images

    return default_collate([map_leaves(sample, without_images)] * 2)


def through_store(prepared: Any) -> Any:
    """Returns what was prepared as it comes out of the decoded store: a copy."""
    from optuna_fleet.pipeline.preprocessor import decoded_samples

    record = b"".join(decoded_samples.pack(prepared))
    return decoded_samples.unpack(memoryview(record), copy=True)


def _listed(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _listed(item) for key, item in batch.items()}
    return list(map(_listed, batch)) if type(batch) in (tuple, list) else batch


def _drawing_nothing(split: SplitDataset, index: int, seed: Seed) -> Any:
    prepared, drew = watched(partial(split.prepared, index), seed)
    if drew:
        raise transform_split.AnotherWayError(
            "random numbers were drawn before the first random step"
        )
    return prepared


def _raise_if_of_the_moment(error: BaseException) -> None:
    """Raises what may not be raised when it is tried again, or what has led to this."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (OSError, MemoryError)):
            raise cause
        cause = cause.__cause__ or cause.__context__
