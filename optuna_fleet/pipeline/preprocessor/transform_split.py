"""A data set split by its own transform: copied, with a part of the transform in its place.

What that part gives never reaches the data set's own code, which gets a stand-in to put into the
sample. So a data set that looks at the result (a label from it, a copy of it) is noticed whichever
sample it does so for, and not taken apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from optuna_fleet.pipeline.preprocessor import transforms
from optuna_fleet.pipeline.preprocessor.transforms import Step

Path = tuple[Any, ...]
"""Indices and keys that lead to one part of a sample."""


class AnotherWayError(RuntimeError):
    """A sample does not go through the transform as the one did that splitting was tried on."""


class NoSplitError(Exception):
    """The data set does not use its transform in a way that can be taken apart."""


def candidates(
    dataset: Any, steps: tuple[Step, ...], finish: Callable[[Any], Any] | None, index: int
) -> Iterator[TransformSplit]:
    """Yields the ways to split a data set, the best first.

    Args:
        dataset: The data set.
        steps: Its transform's, as ``transforms.steps_of`` gives them.
        finish: What comes after its own end.
        index: The sample by which to find where the transform's result goes.
    """
    random_steps = (i for i, step in enumerate(steps) if not transforms.is_deterministic(step))
    first_random = next(random_steps, None)
    cut = None
    if first_random is not None:
        cut = _smallest_cut(steps[:first_random], _inputs(dataset, index))
    for end in dict.fromkeys((_tail(steps), len(steps))):
        begin = end if cut is None else cut
        watched = _Watched(transforms.Steps(steps[:begin]))
        source = _with_transform(dataset, watched)
        yield TransformSplit(
            source=source,
            watched=watched,
            middle=transforms.Steps(steps[begin:end]),
            tail=transforms.Steps(steps[end:]),
            finish=finish,
            place=watched.taken(source[index])[0],
        )


def _tail(steps: tuple[Step, ...]) -> int:
    """Where the elementwise steps begin, after which there are no others."""
    start = len(steps)
    while start and transforms.is_elementwise(steps[start - 1]):
        start -= 1
    return start


def _inputs(dataset: Any, index: int) -> tuple[Any, ...]:
    """What the data set gives to its transform."""
    watched = _Watched(transforms.Steps(()))
    _with_transform(dataset, watched)[index]
    return watched.last_call().inputs


def _smallest_cut(prefix: tuple[Step, ...], inputs: tuple[Any, ...]) -> int:
    """The latest of the cuts whose result takes the fewest bytes."""
    from optuna_fleet.pipeline.preprocessor.storable import nbytes

    sizes = [nbytes(transforms.Steps(prefix[:cut])(*inputs)) for cut in range(len(prefix) + 1)]
    return max(cut for cut, size in enumerate(sizes) if size == min(sizes))


_STAR: Path = ("*",)
"""The transform was given several values, and what it returned is the sample."""


class _StandIn:
    """Can be put into a sample; anything else raises, even to ask for its type."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        raise AnotherWayError("A sample's own code looks at what the transform gave")

    def _looked_at(self, *_: Any) -> Any:
        raise AnotherWayError("A sample's own code looks at what the transform gave")

    __bool__ = __eq__ = __hash__ = __len__ = __iter__ = __getitem__ = _looked_at
    __repr__ = __str__ = __float__ = __int__ = __index__ = __contains__ = _looked_at
    __copy__ = __deepcopy__ = __reduce_ex__ = _looked_at


@dataclass(frozen=True, slots=True)
class _Call:
    inputs: tuple[Any, ...]
    output: Any
    stand_in: Any  # one, or a tuple of as many as there are outputs


class _Watched:
    """Stands where the transform was, and remembers what it was given and what it would give."""

    def __init__(self, steps: transforms.Steps) -> None:
        self._steps = steps
        self._calls: list[_Call] = []

    def __call__(self, *inputs: Any) -> Any:
        output = self._steps(*inputs)
        stand_in: Any = _StandIn()
        if len(inputs) > 1:
            stand_in = tuple(_StandIn() for _ in output)
        self._calls.append(_Call(inputs, output, stand_in))
        return stand_in

    def forget(self) -> None:
        """Forgets its calls."""
        self._calls = []

    def last_call(self) -> _Call:
        """Returns what it was given and gave, if it was called once; and forgets it."""
        calls = self._calls
        self.forget()
        if len(calls) != 1:
            raise NoSplitError(f"called it {len(calls)} times")
        return calls[0]

    def taken(self, sample: Any) -> tuple[Path, Any]:
        """Returns where in the sample its result went, and the sample with the result there."""
        call = self.last_call()
        place = _place(sample, call)
        return place, _at(place, sample, lambda *_: call.output)


def _place(sample: Any, call: _Call) -> Path:
    places = list(_places(sample, call.stand_in))
    is_joint = len(call.inputs) > 1
    if is_joint and not places and issubclass(type(sample), (tuple, list)):
        parts = zip(sample, call.stand_in, strict=False)
        if len(sample) == len(call.stand_in) and all(part is given for part, given in parts):
            return _STAR
    if len(places) != 1:
        raise NoSplitError(f"has its result at {len(places)} places")
    return _STAR if is_joint and places == [()] else places[0]


def _places(node: Any, wanted: Any, path: Path = ()) -> Iterator[Path]:
    if node is wanted:
        yield path
    elif issubclass(type(node), (tuple, list)):
        for number, item in enumerate(node):
            yield from _places(item, wanted, (*path, number))
    elif type(node) is dict:
        for key, item in node.items():
            yield from _places(item, wanted, (*path, key))


def _at(path: Path, node: Any, function: Step) -> Any:
    """Returns the sample or batch with ``function`` applied at one place of it."""
    if path is _STAR:
        return _like(node, function(*node))
    if not path:
        return function(node)
    key, *rest = path
    if isinstance(node, dict):
        return {**node, key: _at(tuple(rest), node[key], function)}
    items = list(node)
    items[key] = _at(tuple(rest), items[key], function)
    return _like(node, items)


def _like(node: Any, items: Any) -> Any:
    """The items in a container as ``node`` is one: ``default_collate`` makes lists of tuples."""
    return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finisher:
    """The end of a transform, without the data set: trainers on accelerators get it alone."""

    place: Path
    tail: transforms.Steps
    finish: Callable[[Any], Any] | None

    def __call__(self, sample_or_batch: Any) -> Any:
        """Returns the finished sample or batch."""
        if self.tail.steps:
            sample_or_batch = _at(self.place, sample_or_batch, self.tail)
        return sample_or_batch if self.finish is None else self.finish(sample_or_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformSplit:
    """A ``SplitDataset`` (see there) whose parts are pieces of the data set's transform."""

    source: Any
    watched: _Watched
    middle: transforms.Steps
    tail: transforms.Steps
    finish: Callable[[Any], Any] | None
    place: Path
    faithful: bool = field(init=False)

    def __post_init__(self) -> None:
        known = all(map(transforms.is_known, self.middle.steps))
        object.__setattr__(self, "faithful", not known)

    @property
    def has_augment(self) -> bool:  # noqa: D102
        return bool(self.middle.steps)

    @property
    def has_finish(self) -> bool:  # noqa: D102
        return bool(self.tail.steps) or self.finish is not None

    def prepared(self, index: int) -> Any:  # noqa: D102
        from optuna_fleet.pipeline.preprocessor import storable

        sample = self._sample(index)
        return storable.pack(sample, faithful=self.faithful) if self.has_augment else sample

    def augmented(self, prepared: Any) -> Any:  # noqa: D102
        from optuna_fleet.pipeline.preprocessor import storable

        if not self.has_augment:
            return prepared
        return _at(self.place, storable.unpack(prepared, copy=self.faithful), self.middle)

    def finished(self, sample_or_batch: Any) -> Any:  # noqa: D102
        return self.finisher()(sample_or_batch)

    def finisher(self) -> Finisher:  # noqa: D102
        return Finisher(place=self.place, tail=self.tail, finish=self.finish)

    def whole(self, dataset: Any, index: int, seed: Callable[[], None]) -> Any:  # noqa: D102
        seed()
        sample = dataset[index]
        return sample if self.finish is None else self.finish(sample)

    def _sample(self, index: int) -> Any:
        try:
            sample = self.source[index]
        except Exception as error:
            # Perhaps for want of what the transform gives: if not, the whole will raise it too.
            self.watched.forget()
            raise _another_way(index, f"raises {type(error).__name__}") from error
        try:
            place, sample = self.watched.taken(sample)
        except NoSplitError as error:
            raise _another_way(index, f"{error}") from error
        if place != self.place:
            raise _another_way(index, f"has its image at {place} instead of {self.place}")
        return sample


def _another_way(index: int, how: str) -> AnotherWayError:
    return AnotherWayError(
        f"Sample {index} goes another way through the data set than the first one: it {how}. "
        "SharedPipeline(..., split=False) takes no transform apart."
    )


# Which data sets are copied, and how, so that they call another transform.


def transform_of(dataset: Any) -> Any:
    """The one transform of a data set; None if it has none, or several."""
    inner = _inner(dataset)
    if inner is not None:
        found = [transform_of(part) for part in inner]
        return found[0] if found and all(part is found[0] for part in found) else None
    transform = getattr(dataset, "transform", None)
    if transform is not None:
        return transform
    joint: Any = getattr(dataset, "transforms", None)
    return joint.transform if transforms.is_standard(joint) else joint


def _with_transform(dataset: Any, transform: Step) -> Any:
    """A shallow copy of the data set that calls ``transform`` in place of its own."""
    copied = copy.copy(dataset)
    inner = _inner(dataset)
    if inner is not None:
        replaced = [_with_transform(part, transform) for part in inner]
        if hasattr(dataset, "datasets"):
            copied.datasets = replaced
        else:
            (copied.dataset,) = replaced
        return copied
    joint: Any = getattr(dataset, "transforms", None)
    if getattr(dataset, "transform", None) is not None:
        copied.transform = transform
    if transforms.is_standard(joint):
        copied.transforms = copy.copy(joint)
        copied.transforms.transform = transform
    elif getattr(dataset, "transform", None) is None:
        copied.transforms = transform
    return copied


def _inner(dataset: Any) -> list[Any] | None:
    from torch.utils.data import ConcatDataset, Subset

    if type(dataset) is Subset:
        return [dataset.dataset]
    return list(dataset.datasets) if type(dataset) is ConcatDataset else None
