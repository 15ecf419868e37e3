"""Samples as the canonical order names them: which index, seeded how, and what if one raises."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from optuna_fleet.pipeline.pipeline_messages import MAX_TEXT, ChunkError
from optuna_fleet.pipeline.preprocessor.decoded import DecodedStore
from optuna_fleet.pipeline.preprocessor.iterable import Stream
from optuna_fleet.pipeline.preprocessor.order import Surroundings, epoch_order
from optuna_fleet.pipeline.preprocessor.stages import comes_again
from optuna_fleet.pipeline.spec import TOGETHER, ChunkKey, DatasetSpec, PipelineSpec, Source

MAX_SUBSTITUTES = 16
"""Where samples that raise are skipped: after this many in a row something else is wrong."""

_BLOCK = 1 << 20
"""Positions of an order that are looked up at once: it is drawn again for the next ones."""

_MOST_BLOCKS = 8
"""Of so many this process knows the positions: one for each epoch that is being made, usually."""


class SampleError(Exception):
    """Something of the user's raised, in the making of a sample or of what it needs."""

    def __init__(self, error: ChunkError) -> None:
        self.error = error


@dataclass(slots=True)
class _Group:
    """Samples that were read together, by position; None where that raised."""

    at: tuple[int, int]
    samples: dict[int, Any] | None

    def is_over(self, position: int) -> bool:
        return self.samples is not None and position not in self.samples


class Samples:
    """Makes samples; for one preprocessor.

    ``load`` returns the data sets, when the first sample is wanted.

    Attributes:
        skipped: Indices that raised since ``begin``, where these are skipped.
        complaint: What the first of them raised.
        num_loaded: Samples since ``begin`` whose beginning came from the decoded store.
        at_work: Called as samples are made.
    """

    at_work: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self,
        load: Callable[[], Source],
        spec: PipelineSpec,
        decoded: DecodedStore | None = None,
    ) -> None:
        self._load = load
        self._spec = spec
        self._decoded = decoded
        self._specs = {each.name: each for each in spec.datasets}
        self._source: Source | None = None
        self._streams: dict[str, Stream] = {}
        self._around: Surroundings | None = None
        self._blocks: dict[tuple[str, int, int], Any] = {}  # by data set, epoch, begin
        self._groups: dict[str, _Group] = {}  # by data set: what was read together last
        self.begin()

    def begin(self) -> None:
        """Begins another chunk."""
        self.skipped: list[int] = []
        self.complaint: ChunkError | None = None
        self.num_loaded = 0

    def several(self, key: ChunkKey, positions: range) -> list[Any]:
        """Returns the samples at these positions."""
        found = []
        for position in positions:
            found.append(self.sample(key, position))
            self.at_work()
        return found

    def sample(self, key: ChunkKey, position: int, *, use_store: bool = True) -> Any:
        """Returns the sample at this position of the order of the chunk's epoch.

        Unless it may not ``use_store``, the beginning is taken from the decoded store, or put
        there, where the data set is kept.

        Raises:
            SampleError: It raised, or as many samples in a row as may be skipped.
        """
        spec, source = self._specs[key.name], self._sources()  # its errors are none of the sample
        may_skip = self._spec.on_error == "skip" and not spec.shards
        num_tries = MAX_SUBSTITUTES if may_skip else 1
        for left in reversed(range(num_tries)):
            (place,) = self._places(spec, key.epoch, range(position, position + 1))
            try:
                return self._made(spec, source, key.epoch, position, place, use_store)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a cancellation, a panic in Rust: that ends no process
                among = ", or one that is read with it," if spec.batched else ""
                what = f"Sample {place % spec.length} of data set {spec.name!r}{among}"
                failure = _error(what, error)
                if not left:
                    raise failure from error
                self.skipped.append(place % spec.length)
                self.complaint = self.complaint or failure.error
            position = (position + 1) % spec.num_samples
        raise AssertionError

    def rows(self, key: ChunkKey, positions: range) -> list[torch.Tensor] | None:
        """Returns the samples at these positions as rows of tensors.

        None unless they are those of a ``TensorDataset`` or a ``Subset`` of one, as they are: that
        draws nothing, and a sample alone takes ten times as long.
        """
        spec, source = self._specs[key.name], self._sources()
        stages = source.stages[spec.name]
        is_finished_here = stages.finish is not None and spec.finish is None
        if spec.collate is not None or stages.in_parts or is_finished_here:
            return None
        places = self._places(spec, key.epoch, positions)
        try:
            return _rows(source.datasets[spec.name], [place % spec.length for place in places])
        except Exception:
            return None  # one by one, to see whose fault it is

    def lent(self) -> AbstractContextManager[None]:
        """Samples made within leave the process as it was: it is the user's."""
        self._sources()
        assert self._around is not None
        return self._around.lent()

    def is_repeatable(self, key: ChunkKey, first: Any) -> bool:
        """Returns whether the first sample of an epoch is the same when it is made again."""
        num_skipped = len(self.skipped)
        found = comes_again(first, lambda: self.sample(key, 0, use_store=False))
        del self.skipped[num_skipped:]
        return found

    def _places(self, spec: DatasetSpec, epoch: int, positions: range) -> list[int]:
        """The numbers of samples in the order of an epoch, see `epoch_order`."""
        if not spec.has_order:
            return [*positions]
        start, found = positions.start, list[int]()
        for begin in range(start - start % _BLOCK, positions.stop, _BLOCK):
            if (spec.name, epoch, begin) not in self._blocks:
                self._draw(spec, epoch, begin)
            block = self._blocks[spec.name, epoch, begin]
            found += block[max(start - begin, 0) : positions.stop - begin].tolist()
        return found

    def _draw(self, spec: DatasetSpec, epoch: int, begin: int) -> None:
        with reported(f"Drawing the order of an epoch of data set {spec.name!r}"):
            order = epoch_order(self._sources(), spec, self._spec.seed, epoch)
        self._blocks[spec.name, epoch, begin] = order[begin : begin + _BLOCK].copy()
        if len(self._blocks) > _MOST_BLOCKS:
            del self._blocks[next(iter(self._blocks))]

    def _made(
        self,
        spec: DatasetSpec,
        source: Source,
        epoch: int,
        position: int,
        place: int,
        use_store: bool,
    ) -> Any:
        assert self._around is not None
        stages, index = source.stages[spec.name], place % spec.length
        seed = partial(self._around.begin, spec.name, epoch, place)
        store = self._decoded if use_store and spec.kept else None
        if store is not None and (loaded := store.get(spec.name, index)):
            self.num_loaded += 1
            (sample,) = loaded
        else:
            found = self._read(spec, source, epoch, position)
            if not found or stages.prepare is not None:
                seed()
            sample = found[0] if found else source.datasets[spec.name][index]
            if stages.prepare is not None:
                sample = stages.prepare(sample)
            if store is not None:
                store.put(spec.name, index, sample)
        if stages.augment is not None:
            seed()
            sample = stages.augment(sample)
        if stages.finish is None or spec.finish is not None:
            return sample
        return stages.finish(sample)

    def _read(self, spec: DatasetSpec, source: Source, epoch: int, position: int) -> list[Any]:
        """Returns the sample at a position in a list where it is not read alone; else nothing."""
        if spec.shards:
            return [self._streams[spec.name].sample(epoch, position)]
        if not spec.batched:
            return []
        start = position - position % TOGETHER
        group = self._groups.get(spec.name)
        # Each is given once: whoever has it may write into it.
        if group is None or group.at != (epoch, start) or group.is_over(position):
            self._groups.pop(spec.name, None)
            samples = self._read_together(spec, source.datasets[spec.name], epoch, start)
            group = self._groups[spec.name] = _Group((epoch, start), samples)
        return [] if group.samples is None else [group.samples.pop(position)]

    def _read_together(
        self, spec: DatasetSpec, dataset: Any, epoch: int, start: int
    ) -> dict[int, Any] | None:
        """Returns by their positions the samples that are read at once, from ``start`` on.

        None if that raises where what raises is skipped: one by one it is seen which. Which they
        are depends on the order of the epoch alone, and they are seeded as the first of them: so
        what they draw, and what they are padded to, is the same whatever the chunks.
        """
        assert self._around is not None
        places = self._places(spec, epoch, range(start, min(start + TOGETHER, spec.num_samples)))
        self._around.begin(spec.name, epoch, places[0])
        try:
            samples = list(dataset.__getitems__([place % spec.length for place in places]))
        except Exception:
            if self._spec.on_error == "skip":
                return None
            raise
        if len(samples) != len(places):
            raise ValueError(f"__getitems__ gave {len(samples)} samples for {len(places)} indices")
        return dict(enumerate(samples, start))

    def _sources(self) -> Source:
        if self._source is None:
            with reported("Unpickling the data sets in a preprocessor"):
                source = self._load()
            self._around = Surroundings(source, self._spec)
            self._streams = {
                each.name: Stream(
                    source.datasets[each.name],
                    name=each.name,
                    num_shards=each.shards,
                    seed=self._spec.seed,
                    num_samples=each.num_samples,
                    at_work=lambda: self.at_work(),
                )
                for each in self._spec.datasets
                if each.shards
            }
            self._source = source
        return self._source


@contextmanager
def reported(what: str) -> Iterator[None]:
    """An exception within becomes a `SampleError`, which can be sent."""
    try:
        yield
    except (KeyboardInterrupt, SampleError):
        raise
    except BaseException as error:
        raise _error(what, error) from error


def _rows(dataset: Any, indices: list[int]) -> list[torch.Tensor] | None:
    # Exact classes: a subclass may do what it likes.
    if type(dataset) is Subset:
        return _rows(dataset.dataset, [dataset.indices[index] for index in indices])
    if type(dataset) is not TensorDataset:
        return None
    if not all(type(each) is torch.Tensor for each in dataset.tensors):
        return None
    return [each[indices] for each in dataset.tensors]


def _error(what: str, error: BaseException) -> SampleError:
    # Not by str(error), which may raise too.
    said = "".join(traceback.format_exception_only(error)).strip()
    summary, lines = f"{what} raised {said}", traceback.format_exception(error)
    return SampleError(
        ChunkError(summary=summary[:MAX_TEXT], traceback="".join(lines)[-MAX_TEXT:])
    )
