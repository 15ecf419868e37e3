"""The data sets: as trainers know them (names, lengths, order), and as preprocessors get them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from optuna_fleet.arguments import check_that, is_a
from optuna_fleet.exceptions import FleetConfigError

MIN_CHUNKS_PER_EPOCH = 16
"""An epoch is cut into at least this many chunks, so that several preprocessors can work on it."""

MIN_CHUNK_SAMPLES = 8
"""Below this many samples a chunk is not made smaller just to have more of them."""

MAX_CHUNK_SAMPLES = 256
"""No chunk has more: whoever waits for the first of them waits for all."""

MAX_CHUNK_ROWS = 8192
"""The same for rows of tensors, which are there at once."""

TOGETHER = 32
"""Samples that are read at once where the user asks for that: most of the gain, and little memory.
A power of two, so that no chunk has a part of them unless they are large.
"""

OnError = Literal["raise", "skip"]
"""A sample that raises: tell those who wait for it, or let the next one take its place."""


class EpochKey(NamedTuple):
    """Names an epoch of a data set as it is made for all, or for one ``owner`` alone."""

    name: str
    epoch: int
    owner: int | None = None


class ChunkKey(NamedTuple):
    """Names one chunk: a contiguous range of the canonical order of an epoch of a data set."""

    name: str
    epoch: int
    chunk: int
    owner: int | None = None

    @property
    def of_epoch(self) -> EpochKey:
        """What it is a part of."""
        return EpochKey(self.name, self.epoch, self.owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """One named data set.

    Attributes:
        name: The keyword it was given under.
        num_samples: Samples of an epoch.
        length: Its length: its indices are from 0 to ``length - 1``.
        shuffled: Permuted and augmented anew in every epoch; if not: identity order, epoch 0.
        sampled: A sampler of the user's says which samples an epoch has, and in which order.
        batched: Its samples are read many at once, with ``__getitems__``.
        kept: What `prepare` gives is kept for later epochs.
        shards: Of a stream, which is read in order; 0 if it is none.
        collate: The user's ``collate_fn`` as cloudpickle bytes, or None for torch's default.
        finish: What trainers on accelerators do with each batch, as cloudpickle bytes; None where
            preprocessors finish the samples.
    """

    name: str
    num_samples: int
    length: int
    shuffled: bool
    sampled: bool = False
    batched: bool = False
    kept: bool = False
    shards: int = 0
    collate: bytes | None = None
    finish: bytes | None = None

    @property
    def has_order(self) -> bool:
        """Whether an epoch's order is another than that of the data set."""
        return (self.shuffled or self.sampled) and not self.shards

    def canonical_epoch(self, epoch: int) -> int:
        """Returns the epoch whose content is served as ``epoch``: 0 for a fixed data set."""
        return epoch if self.shuffled else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """The whole pipeline as trainers see it; small, and plain data.

    Attributes:
        seed: Seed of orders and augmentation.
        datasets: The data sets, in the order they were given.
        on_error: What becomes of a sample that raises.
    """

    seed: int
    datasets: tuple[DatasetSpec, ...]
    on_error: OnError = "raise"

    def dataset(self, name: str) -> DatasetSpec:
        """Returns the data set called ``name``.

        Raises:
            FleetConfigError: There is none; the message lists those there are.
        """
        for dataset in self.datasets:
            if isinstance(name, str) and dataset.name == name:
                return dataset
        check_that("name", name, is_a(str), "be the name of a data set of the SharedPipeline")
        names = ", ".join(repr(dataset.name) for dataset in self.datasets)
        raise FleetConfigError(
            f"There is no data set {name!r} in the SharedPipeline; it has {names}. "
            f"Pass it as SharedPipeline(..., {name}=dataset)."
        )


def choose_chunk_size(
    dataset: DatasetSpec,
    *,
    sample_bytes: int,
    chunk_bytes: int,
    are_rows: bool = False,
) -> int:
    """Returns how many samples a chunk of this data set holds; arguments as in `SampleMeasured`.

    About ``chunk_bytes`` worth of them, but few enough for an epoch to have several chunks. A
    power of two where possible: batches of usual sizes then seldom straddle two chunks. It never
    changes what a batch contains.
    """
    least = TOGETHER if dataset.batched else MIN_CHUNK_SAMPLES
    by_bytes = max(1, chunk_bytes // max(1, sample_bytes))
    by_count = max(least, dataset.num_samples // MIN_CHUNKS_PER_EPOCH)
    size = min(by_bytes, by_count, MAX_CHUNK_ROWS if are_rows else MAX_CHUNK_SAMPLES)
    return min(dataset.num_samples, 1 << (size.bit_length() - 1))


def count_chunks(num_samples: int, chunk_size: int) -> int:
    """Returns the number of chunks of an epoch."""
    return -(-num_samples // chunk_size)


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
