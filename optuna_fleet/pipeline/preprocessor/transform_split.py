"""A data set split by its own transform: copied, with a part of the transform in its place.

What that part gives never reaches the data set's own code, which gets a stand-in to put into the
sample. So a data set that looks at the result (a label from it, a copy of it) is noticed whichever
sample it does so for, and not taken apart.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from optuna_fleet.pipeline.preprocessor import transforms
from optuna_fleet.pipeline.preprocessor.attributes import Attributes
from optuna_fleet.pipeline.preprocessor.transforms import Step
from optuna_fleet.pipeline.spec import Cut, Path


class AnotherWayError(RuntimeError):
    """A sample does not go through the transform as the one did that splitting was tried on."""


class NoSplitError(Exception):
    """The data set does not use its transform in a way that can be taken apart."""


def candidates(
    dataset: Any,
    steps: tuple[Step, ...],
    attributes: Attributes,
    finish: Callable[[Any], Any] | None,
    index: int,
) -> Iterator[TransformSplit]:
    """Yields the ways to split a data set, the best first.

    Args:
        dataset: The data set.
        steps: Its transform's, as ``transforms.steps_of`` gives them.
        attributes: Theirs, before any sample was read.
        finish: What comes after its own end.
        index: The sample by which to find where the transform's result goes.
    """
    random_steps = (i for i, step in enumerate(steps) if not transforms.is_deterministic(step))
    first_random = next(random_steps, None)
    smallest = None
    if first_random is not None:
        smallest = _smallest_cut(steps[:first_random], _inputs(dataset, index))
    for end in dict.fromkeys((_tail(steps), len(steps))):
        begin = end if smallest is None else smallest
        prefix = _Watched(transforms.Steps(steps[:begin]))
        place, _ = prefix.taken(_with_transform(dataset, prefix)[index])
        cut = Cut(
            begin=begin, end=end, num_steps=len(steps), place=place, restless=attributes.restless
        )
        yield TransformSplit(dataset, steps, attributes, finish, cut)


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
    is_usual: bool


class _Watched:
    """Stands where the transform was, and remembers what it was given and what it would give."""

    def __init__(self, steps: transforms.Steps, attributes: Attributes | None = None) -> None:
        self._steps = steps
        self._attributes = attributes
        self._calls: list[_Call] = []

    def __call__(self, *inputs: Any) -> Any:
        is_usual = self._attributes is None or self._attributes.hold()
        output = self._steps(*inputs)
        stand_in: Any = _StandIn()
        if len(inputs) > 1:
            stand_in = tuple(_StandIn() for _ in output)
        self._calls.append(_Call(inputs, output, stand_in, is_usual))
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
        if not calls[0].is_usual:
            raise NoSplitError("changes attributes of its steps")
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


class TransformSplit:
    """A ``SplitDataset`` (see there) whose parts are pieces of the data set's transform.

    Args:
        dataset: The data set.
        steps: Its transform's.
        attributes: Theirs, before any sample was read: a sample for which they are others is
            made whole.
        finish: What comes after its own end.
        cut: Where to cut.
    """

    def __init__(
        self,
        dataset: Any,
        steps: tuple[Step, ...],
        attributes: Attributes,
        finish: Callable[[Any], Any] | None,
        cut: Cut,
    ) -> None:
        if len(steps) != cut.num_steps:
            raise RuntimeError(
                f"A transform has {len(steps)} steps here, but {cut.num_steps} where it was "
                "decided how to take it apart: SharedPipeline(..., split=False) leaves it whole."
            )
        self.cut = cut
        self._attributes = attributes
        self._watched = _Watched(transforms.Steps(steps[: cut.begin]), attributes)
        self._source = _with_transform(dataset, self._watched)
        self._middle = transforms.Steps(steps[cut.begin : cut.end])
        self._tail = transforms.Steps(steps[cut.end :])
        self._finish = finish
        # Code that is not known may look at anything, and write into it.
        self._faithful = not all(map(transforms.is_known, self._middle.steps))

    @property
    def has_augment(self) -> bool:  # noqa: D102
        return bool(self._middle.steps)

    @property
    def has_finish(self) -> bool:  # noqa: D102
        return bool(self._tail.steps) or self._finish is not None

    def prepared(self, index: int) -> Any:  # noqa: D102
        from optuna_fleet.pipeline.preprocessor import storable

        sample = self._sample(index)
        return storable.pack(sample, faithful=self._faithful) if self.has_augment else sample

    def augmented(self, prepared: Any) -> Any:  # noqa: D102
        from optuna_fleet.pipeline.preprocessor import storable

        if not self._attributes.hold():
            raise AnotherWayError("Attributes of the transform's steps have been changed.")
        if not self.has_augment:
            return prepared
        return _at(self.cut.place, storable.unpack(prepared, copy=self._faithful), self._middle)

    def finished(self, sample_or_batch: Any) -> Any:  # noqa: D102
        return self.finisher()(sample_or_batch)

    def finisher(self) -> Finisher:  # noqa: D102
        return Finisher(place=self.cut.place, tail=self._tail, finish=self._finish)

    def whole(self, dataset: Any, index: int, seed: Callable[[], None]) -> Any:  # noqa: D102
        seed()
        sample = dataset[index]
        return sample if self._finish is None else self._finish(sample)

    def _sample(self, index: int) -> Any:
        try:
            sample = self._source[index]
        except Exception as error:
            # Perhaps for want of what the transform gives: if not, the whole will raise it too.
            self._watched.forget()
            raise _another_way(index, f"raises {type(error).__name__}") from error
        try:
            place, sample = self._watched.taken(sample)
        except NoSplitError as error:
            raise _another_way(index, f"{error}") from error
        if place != self.cut.place:
            raise _another_way(index, f"has its image at {place} instead of {self.cut.place}")
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


def below(dataset: Any) -> Iterator[Any]:
    """Yields the data set and those it is made of."""
    yield dataset
    for part in _inner(dataset) or ():
        yield from below(part)


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
    data = sys.modules.get("torch.utils.data")
    if data is None:
        return None  # not loaded: no data set is of these classes
    if type(dataset) is data.Subset:
        return [dataset.dataset]
    return list(dataset.datasets) if type(dataset) is data.ConcatDataset else None
