"""Samples as the canonical order names them: which index, seeded how, and what if one raises."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.columns import without_images
from optuna_fleet.pipeline.decoded_samples import DecodedSamples, pack, unpack
from optuna_fleet.pipeline.messages import MAX_TEXT, ChunkError
from optuna_fleet.pipeline.order import permutation, seed_sample
from optuna_fleet.pipeline.source import Source
from optuna_fleet.pipeline.spec import ChunkKey, DatasetSpec, PipelineSpec
from optuna_fleet.pipeline.splitting import SplitDataset, agrees, split
from optuna_fleet.pipeline.structure import map_leaves
from optuna_fleet.pipeline.transform_split import AnotherWayError

MAX_SUBSTITUTES = 16
"""Where samples that raise are skipped: after this many in a row something else is wrong."""

WORTH = 2.0
"""The decoded store is used where preparing takes this many times as long as loading."""

_OURS = str(Path(__file__).parent)


class SampleError(Exception):
    """Something of the user's raised, in the making of a sample or of what it needs."""

    def __init__(self, error: ChunkError, *, of_sample: bool) -> None:
        self.error = error
        self.of_sample = of_sample


class Samples:
    """Makes samples; for one preprocessor.

    Args:
        load: Returns the data sets; called when the first sample is wanted.
        spec: Their description.
        decoded: The decoded store, if there is one.
        force_decoded: Use it even where it does not pay.

    Attributes:
        skipped: Indices that raised since ``begin``, where these are skipped.
        complaint: What the first of them raised.
        num_loaded: Samples since ``begin`` whose beginning came from the decoded store.
    """

    def __init__(
        self,
        load: Callable[[], Source],
        spec: PipelineSpec,
        decoded: DecodedSamples | None = None,
        *,
        force_decoded: bool = False,
    ) -> None:
        self._load = load
        self._spec = spec
        self._decoded = decoded
        self._force_decoded = force_decoded
        self._source: Source | None = None
        self._splits: dict[str, SplitDataset | None] = {}
        self._order = lru_cache(maxsize=4)(permutation)
        self.begin()

    def begin(self) -> None:
        """Begins to count for another chunk."""
        self.skipped: list[int] = []
        self.complaint: ChunkError | None = None
        self.num_loaded = 0

    def sample(self, key: ChunkKey, position: int, *, use_store: bool = False) -> Any:
        """Returns the sample at this position of the order of the chunk's epoch.

        Args:
            key: Tells the data set and the epoch.
            position: From 0.
            use_store: Take the beginning from the decoded store, or put it there.

        Raises:
            SampleError: It raised, or as many samples in a row as may be skipped.
        """
        spec = self._spec.dataset(key.name)
        first = self._index(spec, key.epoch, position)
        num_attempts = 1 if self._spec.on_error == "raise" else MAX_SUBSTITUTES
        for attempt in range(num_attempts):
            index = (first + attempt) % spec.num_samples
            try:
                return self._reported(spec, key.epoch, index, use_store=use_store)
            except SampleError as failure:
                if attempt + 1 == num_attempts or not failure.of_sample:
                    raise
                self.skipped.append(index)
                self.complaint = self.complaint or failure.error
        raise AssertionError

    def prepared_bytes(self, key: ChunkKey) -> int | None:
        """Returns the size of a sample in the decoded store; None if it is not to be used."""
        spec = self._spec.dataset(key.name)
        if not spec.shuffled or self._decoded is None or not self._splittable(spec.name):
            return None
        index = self._index(spec, key.epoch, 0)
        try:
            if (found := self._split(spec.name)) is None:
                return None
            prepare_s, prepared = _timed(lambda: found.prepared(index))
            packed = b"".join(pack(prepared))
            load_s, _ = _timed(lambda: unpack(memoryview(packed)))
        except Exception:
            return None  # it is reported when the sample is wanted
        worth = self._force_decoded or prepare_s > WORTH * load_s
        return len(packed) if worth else None

    def _index(self, spec: DatasetSpec, epoch: int, position: int) -> int:
        if not spec.shuffled:
            return position
        return int(self._order(self._spec.seed, spec.name, epoch, spec.num_samples)[position])

    def _reported(self, spec: DatasetSpec, epoch: int, index: int, *, use_store: bool) -> Any:
        if self._source is None:
            with reported("Unpickling the data sets in a preprocessor", of_sample=False):
                self._source = self._load()
        with reported(f"Sample {index} of data set {spec.name!r}", of_sample=True):
            sample = self._make(spec.name, epoch, index, use_store=use_store)
            return sample if spec.collate is not None else map_leaves(sample, without_images)

    def _make(self, name: str, epoch: int, index: int, *, use_store: bool) -> Any:
        source = self._sources()
        dataset, stages = source.datasets[name], source.stages[name]
        deferred = self._spec.dataset(name).finish is not None
        seed = partial(seed_sample, self._spec.seed, name, epoch, index)
        needed = use_store or deferred or stages.in_parts
        found = self._split(name) if needed else None
        if found is None:
            seed()
            sample = dataset[index]
            return sample if deferred or stages.finish is None else stages.finish(sample)
        if not use_store and not deferred:
            return found.whole(dataset, index, seed)
        seed()
        try:
            prepared = self._prepared(found, name, index, use_store=use_store)
        except AnotherWayError:
            if deferred:
                raise
            return found.whole(dataset, index, seed)
        seed()
        augmented = found.augmented(prepared)
        return augmented if deferred else found.finished(augmented)

    def _prepared(self, found: SplitDataset, name: str, index: int, *, use_store: bool) -> Any:
        if not use_store:
            return found.prepared(index)
        assert self._decoded is not None
        loaded = self._decoded.get(name, index)
        if loaded is not None:
            self.num_loaded += 1
            return loaded[0]
        prepared = found.prepared(index)
        self._decoded.put(index, pack(prepared))
        return prepared

    def _split(self, name: str) -> SplitDataset | None:
        if name not in self._splits:
            source = self._sources()
            seed = partial(seed_sample, self._spec.seed, name, 0, 0)
            dataset, stages = source.datasets[name], source.stages[name]
            found = split(dataset, stages, index=0, seed=seed)
            if stages.in_parts and found and not agrees(found, dataset, 0, seed):
                raise FleetConfigError(
                    f"What `prepare` gives for sample 0 of data set {name!r} is not the same each "
                    "time, or is changed in place by `augment`, or can't be stored. Leave all "
                    "that is random to `augment`, which must work on copies."
                )
            self._splits[name] = found
        return self._splits[name]

    def _sources(self) -> Source:
        if self._source is None:
            self._source = self._load()
        return self._source

    def _splittable(self, name: str) -> bool:
        return self._spec.split or self._sources().stages[name].in_parts

    def finisher(self, name: str) -> Callable[[Any], Any] | None:
        """Returns the elementwise end of a data set's samples, if it has one."""
        found = self._split(name) if self._splittable(name) else None
        if found is None:
            return self._sources().stages[name].finish
        return found.finisher() if found.has_finish else None


@contextmanager
def reported(what: str, *, of_sample: bool = False) -> Iterator[None]:
    """An exception within becomes a `SampleError`, which can be sent."""
    try:
        yield
    except Exception as error:
        summary = f"{what} raised {type(error).__name__}: {error}"
        lines = traceback.format_exception(type(error), error, _theirs(error.__traceback__))
        raise SampleError(
            ChunkError(summary=summary[:MAX_TEXT], traceback="".join(lines)[-MAX_TEXT:]),
            of_sample=of_sample,
        ) from error


def _theirs(frames: TracebackType | None) -> TracebackType | None:
    """Without our own frames at the top: the reader looks for the line in the data set."""
    first = frames
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        frames = frames.tb_next
    return frames or first


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """The shorter of two times in seconds, and the result."""
    times = []
    for _ in range(2):
        began = time.perf_counter()
        result = action()
        times.append(time.perf_counter() - began)
    return min(times), result
