"""The data itself, as preprocessors get it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Function = Callable[[Any], Any]

Generator = Any
"""A ``random.Random``, NumPy's ``Generator`` or ``RandomState``, or torch's ``Generator``.

Those that data sets hold (``self.rng = np.random.default_rng()``) are seeded for each sample too,
or they would give other augmentation in each process.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What the user gave for one data set.

    Attributes:
        prepare: Deterministic, on ``dataset[index]``; what it gives is kept.
        augment: Random, on what ``prepare`` gave (on ``dataset[index]`` without it, which must
            then be the same at every call). Draws from the generators as they are.
        finish: Deterministic and elementwise, on the whole sample, or on the whole collated
            batch: both must give the same.
    """

    prepare: Function | None = None
    augment: Function | None = None
    finish: Function | None = None

    @property
    def in_parts(self) -> bool:
        """Whether the user says what is the same in every epoch."""
        return self.prepare is not None or self.augment is not None

    def prepared(self, dataset: Any, index: int) -> Any:
        """Returns the beginning of a sample: if it is `in_parts`, the same in every epoch."""
        return called(self.prepare, dataset[index])


def called(function: Function | None, value: Any) -> Any:
    """Returns what a function makes of a value; the value itself without one."""
    return value if function is None else function(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The user's data sets by name, and the stages that were given for them.

    Attributes:
        datasets: By name.
        stages: Likewise.
        samplers: Likewise, where the user gave one.
        generators: Random generators that any of these hold, once they have been looked for.
    """

    datasets: Mapping[str, Any]
    stages: Mapping[str, Stages]
    samplers: Mapping[str, Any] = field(default_factory=dict)
    generators: Sequence[Generator] = ()
