"""A data set's own transform in the parts that a `SharedPipeline` takes; the user says where."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from optuna_fleet.arguments import check_number
from optuna_fleet.exceptions import FleetConfigError

Step = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class OnImage:
    """Applies steps to the first item of a sample, or of a batch."""

    steps: tuple[Step, ...]

    def __call__(self, sample: Any) -> Any:
        """Returns the sample with another image."""
        image, *others = sample
        for step in self.steps:
            image = step(image)
        return type(sample)([image, *others])


class Parts(NamedTuple):
    """The parts of a data set; see `take_apart`."""

    dataset: Any
    augment: OnImage | None
    finish: OnImage | None


def take_apart(dataset: Any, *, augment: int, finish: int | None = None) -> Parts:
    """Takes a data set apart whose ``transform`` is a ``Compose`` of torchvision's, v1 or v2.

    Its samples must be tuples or lists that begin with what the transform gave, and its code must
    do no more with that. The data set that was given stays as it is.

    Args:
        dataset: ``ImageFolder``, ``CIFAR10``, or one of your own that has a ``transform``.
        augment: Number of the first step that is random, from 0: what is before it is done once.
        finish: Number of the first step from which on all are elementwise (types, scales), so
            that they work on a batch too. By default there are none.

    Returns:
        The data set with the first steps only, and for ``SharedPipeline`` the ``augment`` and the
        ``finish`` to go with it; None where there are no such steps.

    Raises:
        FleetConfigError: There is no such transform, or no such steps.

    Example:
        ``train, augment, finish = take_apart(train, augment=1, finish=3)`` and then
        ``SharedPipeline(train=train, val=val, augment=augment, finish={"train": finish})``
    """
    transform = getattr(dataset, "transform", None)
    steps = getattr(transform, "transforms", None)
    if not isinstance(steps, (list, tuple)):
        raise FleetConfigError(
            f"take_apart() needs a data set whose `transform` is a Compose, but that of "
            f"{type(dataset).__name__} is {transform!r:.60}. Give SharedPipeline(prepare=..., "
            "augment=..., finish=...) functions of samples."
        )
    compose: Any = type(transform)
    end = len(steps) if finish is None else finish
    check_number("augment", augment, least=0, most=len(steps), whole=True)
    check_number("finish", end, least=augment, most=len(steps), whole=True)
    copied = copy.copy(dataset)
    copied.transform = compose(list(steps[:augment])) if augment else _as_it_is
    joint = getattr(dataset, "transforms", None)
    if getattr(joint, "transform", None) is transform:  # what some of torchvision's call
        copied.transforms = copy.copy(joint)
        copied.transforms.transform = copied.transform
    return Parts(copied, _on_image(steps[augment:end]), _on_image(steps[end:]))


def _as_it_is(image: Any) -> Any:
    return image


def _on_image(steps: Any) -> OnImage | None:
    return OnImage(tuple(steps)) if steps else None
