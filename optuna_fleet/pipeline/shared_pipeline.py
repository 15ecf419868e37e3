"""What the user gives: data sets by name, to be preprocessed once for all trials."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from optuna_fleet.arguments import check_choice, check_number, path
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline import data_options, limits
from optuna_fleet.pipeline.exchange import scheme_of
from optuna_fleet.pipeline.preprocessor import payload
from optuna_fleet.pipeline.preprocessor import stages as staging
from optuna_fleet.pipeline.preprocessor.payload import (
    Payload,
    PipelineSetup,
    packed_part,
    unpicklable,
)
from optuna_fleet.pipeline.spec import DatasetSpec, OnError, PipelineSpec, Source, Stages

if TYPE_CHECKING:
    from optuna_fleet.pipeline.pipeline_messages import PipelineStats
    from optuna_fleet.pipeline.reader.client import InlineClient
    from optuna_fleet.pipeline.standalone import PipelineHandle, Session

Collate = Callable[[list[Any]], Any]
Stage = Callable[[Any], Any]


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
            order of the data set, that is preprocessed once per sweep. It must be given where a
            name says neither that nor "val", "test" or "eval".
        sampler: Says which samples an epoch has, and in which order: a ``Sampler`` of torch's, or
            another iterable of indices with a ``len()``, for the shuffled data set, or one per
            name. Its epoch e is the same for all trials. It runs seeded, with ``set_epoch(e)``
            called if it has that. A sample that comes several times is augmented anew each time.
        prepare: The deterministic beginning of the preprocessing of ``dataset[index]``, whose
            results are kept in the *decoded store*: one callable for all data sets, or one per
            name. Before anything starts it is tried on one sample, which must come again.
        augment: The random rest; one callable (for the shuffled data sets), or one per name. With
            it ``dataset[index]`` must give the same in every epoch.
        finish: The deterministic, elementwise end, such as a change of type or scale; it must give
            the same for a sample and for a batch. One callable for all data sets, or one per name.
        batched: Names of the data sets that are read many samples at once, by their
            ``__getitems__(indices)``, as those of Hugging Face have it; True for all. It must give
            for each index what ``dataset[index]`` gives.
        shards: In how many parts a stream is read, of which samples are taken in turn: to it, that
            many workers of a DataLoader. What comes in which order depends on their number.
        on_error: "raise" tells the trials that wait for a sample that raised, with index and
            traceback; "skip" lets the next sample take its place and counts.
        exchange: Which nodes of a fleet preprocess for the others (Pittman et al., SC18): none
            ("local"), all ("all-shared"), the first p ("multi-broadcast:p") or half of them
            ("multi-broadcast"); or the first p, of which the last gives to all others
            ("single-broadcast:p"), by default one.
        num_preprocessors: Most processes that preprocess, per node. If not given there are as many
            as trials need, within what their cores allow: measured, and adapted while they run.
        memory_bytes: Bytes per node for preprocessed data, in memory; by default a quarter of what
            is available. The pipeline never takes more; batches that trials keep are their own.
            Where there is a ``prepare`` or ``augment``, a third of it is for the decoded store.
        spill_dir: A folder on a local disk for a file that takes the place of the memory, where
            that is short: ``memory_bytes`` is its size, half of what is free there by default.
        **datasets: Map-style data sets (``len(dataset)`` and ``dataset[index]``), or streams
            (``torch.utils.data.IterableDataset``), by name. An epoch of a stream is one pass. One
            without a ``len()`` is read once, before anything starts, to count its samples.

    Raises:
        FleetConfigError: An argument can't work.

    Example:
        ``SharedPipeline(train=train_dataset, val=val_dataset)``
    """

    _session: Session | None = None
    _num_alone: int | None = None

    def __init__(
        self,
        *unnamed: Any,
        seed: int = 0,
        collate_fn: Collate | Mapping[str, Collate] | None = None,
        prepare: Stage | Mapping[str, Stage] | None = None,
        augment: Stage | Mapping[str, Stage] | None = None,
        finish: Stage | Mapping[str, Stage] | None = None,
        batched: bool | Collection[str] = False,
        shards: int = 8,
        on_error: OnError = "raise",
        exchange: str = "all-shared",
        shuffled: Collection[str] | None = None,
        sampler: Iterable[int] | Mapping[str, Iterable[int]] | None = None,
        num_preprocessors: int | None = None,
        memory_bytes: int | None = None,
        spill_dir: str | PathLike[str] | None = None,
        **datasets: Any,
    ) -> None:
        if unnamed or not datasets:
            raise FleetConfigError(
                "A SharedPipeline needs at least one data set, by name: "
                f"SharedPipeline(train=dataset). It was given {len(unnamed)} without a name."
            )
        lengths = {
            name: data_options.length_of(name, dataset, datasets, _options())
            for name, dataset in datasets.items()
        }
        check_number("shards", shards, least=1, most=10_000, whole=True)
        check_number("seed", seed, whole=True)
        check_choice("on_error", on_error, ("raise", "skip"))
        scheme_of(exchange)  # checks it
        named_shuffled = data_options.shuffled_among(shuffled, datasets)
        named_batched = data_options.batched_among(batched, datasets)
        samplers = data_options.sampler_by_name(sampler, datasets, named_shuffled)
        drawn = {name: data_options.num_drawn(name, each) for name, each in samplers.items()}
        by_name = data_options.by_name
        self._collates = by_name("collate_fn", collate_fn, datasets, datasets)
        parts = {
            "prepare": by_name("prepare", prepare, datasets, datasets),
            "augment": by_name("augment", augment, datasets, named_shuffled),
            "finish": by_name("finish", finish, datasets, datasets),
        }
        stages = {
            name: Stages(**{what: functions.get(name) for what, functions in parts.items()})
            for name in datasets
        }
        self._source = Source(datasets=datasets, stages=stages, samplers=samplers)
        described = (
            DatasetSpec(
                name=name,
                num_samples=drawn.get(name, length),
                length=length,
                shards=operator.index(shards) if data_options.is_stream(datasets[name]) else 0,
                sampled=name in samplers,
                shuffled=name in named_shuffled,
                batched=name in named_batched,
                kept=stages[name].in_parts and name in named_shuffled,
            )
            for name, length in lengths.items()
        )
        self.seed = operator.index(seed)
        self._spec = PipelineSpec(seed=self.seed, datasets=tuple(described), on_error=on_error)
        self.num_preprocessors = _whole("num_preprocessors", num_preprocessors, most=10_000)
        self.exchange = exchange
        self._memory_bytes = _whole("memory_bytes", memory_bytes)
        self._spill_dir = None if spill_dir is None else str(path("spill_dir", spill_dir))

    @classmethod
    def from_dataloader(cls, **given: Any) -> SharedPipeline:
        """Returns a pipeline of the data sets of DataLoaders, with their samplers and collating.

        One with ``shuffle=True`` is for training. Batch sizes and ``drop_last`` are for
        ``trial.batches``; order and augmentation come from ``seed``, not from their generators.

        Args:
            **given: DataLoaders by name, and options of a `SharedPipeline`.

        Raises:
            FleetConfigError: Something is neither, or a loader does what can't be shared.

        Example:
            ``SharedPipeline.from_dataloader(train=train_loader, val=val_loader)``
        """
        return cls(**data_options.of_loaders(given, _options()))

    def packed(self) -> PipelineSetup:
        """Returns the data sets packed for those who serve them, all from the same bytes.

        Raises:
            FleetConfigError: This machine does not have what was asked for, something can't be
                pickled, or does not do what it must.
        """
        limits.budget(self._memory_bytes, self._spill_dir)
        packed, spec = self.payload(), self.spec()
        staging.check(self._source, spec, packed.load)
        return PipelineSetup(
            payload=packed,
            spec=spec,
            finishes={
                # With a collate_fn, samples must be finished before they are collated.
                each.name: packed_part("finish", each.name, self._source.stages[each.name].finish)
                for each in spec.datasets
                if each.collate is None
            },
            memory_bytes=self._memory_bytes,
            spill_dir=self._spill_dir,
            num_preprocessors=self.num_preprocessors or 0,
            num_alone=self._num_alone,
        )

    def unshared(self, num_preprocessors: int) -> SharedPipeline:
        """Returns the same data, which so many preprocessors make for each trial alone."""
        alone = copy.copy(self)
        alone._num_alone, alone.exchange = num_preprocessors, "local"
        return alone

    def spec(self) -> PipelineSpec:
        """Returns the description of the data sets, as far as no sample has to be read for it."""
        counted = tuple(map(self._counted, self._spec.datasets))
        self._spec = replace(self._spec, datasets=counted)  # so that each is counted once
        datasets = (
            replace(
                each,
                kept=each.kept and not each.shards and self._num_alone is None,
                collate=packed_part("collate_fn", each.name, self._collates.get(each.name)),
            )
            for each in counted
        )
        return replace(self._spec, datasets=tuple(datasets))

    def _counted(self, dataset: DatasetSpec) -> DatasetSpec:
        """A stream that does not tell its length is read for it."""
        if dataset.length:
            return dataset
        from optuna_fleet.pipeline.preprocessor.iterable import Stream
        from optuna_fleet.pipeline.preprocessor.order import own_randomness

        name, shards = dataset.name, dataset.shards
        packed_part("stream", name, stream := self._source.datasets[name])
        with own_randomness():
            length = Stream(stream, name=name, num_shards=shards, seed=self.seed).count()
        data_options.check_length(name, length)
        return replace(dataset, num_samples=length, length=length)

    def inline(self) -> InlineClient:
        """Returns a client that preprocesses in this process (imports torch)."""
        from optuna_fleet.pipeline.reader.client import InlineClient

        source = replace(self._source, generators=payload.generators_in(self._source))
        spec = self.spec()
        staging.check(source, spec, lambda: source)
        return InlineClient(spec, source, self._collates)

    def payload(self) -> Payload:
        """Returns the data sets in a file, for the preprocessors."""
        source = self._source
        try:
            return Payload.written(functools.partial(payload.pack, source))
        except Exception as error:
            stages = {
                f"{what}[{name!r}]": getattr(each, what)
                for what in ("prepare", "augment", "finish")
                for name, each in source.stages.items()
                if getattr(each, what) is not None
            }
            drawing = {f"sampler[{name!r}]": each for name, each in source.samplers.items()}
            wholes = {**source.datasets, **stages, **drawing}
            raise unpicklable("data sets of the SharedPipeline", wholes, error) from error

    # Alone, without an executor

    def __enter__(self) -> SharedPipeline:
        """Starts the processes that preprocess; the end of the ``with`` block ends them."""
        from optuna_fleet.pipeline.standalone import Session

        if self._session is not None:
            raise FleetConfigError(
                "This SharedPipeline runs already: one `with` block at a time. All read it by "
                "`pipeline.handle()`; two pipelines are two objects."
            )
        self._session = Session(self)
        return self

    def __exit__(self, *_: object) -> None:
        session, self._session = self._running("__exit__"), None
        session.close()

    def handle(self) -> PipelineHandle:
        """Returns what any process needs to read: ``with handle.connect() as reader: ...``."""
        return self._running("handle").handle

    def stats(self) -> PipelineStats:
        """Returns what the running pipeline has done so far."""
        return self._running("stats").handle.stats()

    def _running(self, method: str) -> Session:
        if self._session is None:
            raise FleetConfigError(
                f"SharedPipeline.{method}() was called, but the pipeline does not run here: call "
                "it inside `with pipeline:`. In a process that you started, use what "
                "`pipeline.handle()` gave in the first one; in an Optuna objective, use "
                "`trial.batches`."
            )
        return self._session

    def __getstate__(self) -> dict[str, Any]:
        """A copy does not run."""
        return {name: value for name, value in vars(self).items() if name != "_session"}


def _options() -> list[str]:
    parameters = inspect.signature(SharedPipeline).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


def _whole(
    argument: str, value: int | None, *, least: int = 1, most: float | None = None
) -> int | None:
    check_number(argument, value, least=least, most=most, whole=True, optional=value is None)
    return value if value is None else operator.index(value)
