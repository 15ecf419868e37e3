"""A data set split by its own transform: copied, with a part of the transform in its place."""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Iterator
from typing import Any

from optuna_fleet.pipeline.preprocessor import transforms
from optuna_fleet.pipeline.preprocessor.transforms import Step, Steps
from optuna_fleet.pipeline.spec import Cut, Path

_STAR: Path = (...,)
"""The transform was given several values, and what it returned is the sample."""


class AnotherWayError(RuntimeError):
    """A sample does not go through the transform as a split would have it."""


def is_known(dataset: Any) -> bool:
    """Returns whether it is a data set of torchvision's, or made of such by those of torch.

    They put into the sample what their transform gives, and do nothing else with it. Exact
    classes: a subclass may do what it likes.
    """
    inner = parts_of(dataset)
    return is_torchvisions(dataset) if inner is None else all(map(is_known, inner))


def is_torchvisions(dataset: Any) -> bool:
    """Returns whether it is a data set of torchvision's own."""
    kind = type(dataset)
    is_its = str(kind.__module__).startswith("torchvision.datasets.")
    return is_its and getattr(sys.modules[kind.__module__], kind.__name__, None) is kind


def steps_in(dataset: Any) -> tuple[Step, ...] | None:
    """Returns the steps of a data set's transform; None if not all is known about them."""
    return transforms.steps_of(_transform_of(dataset))


def cuts(dataset: Any, index: int) -> Iterator[Cut]:
    """Yields the ways to split a data set, the best first.

    Where in a sample the transform's result goes is found by the sample of an index.
    """
    steps = steps_in(dataset) or ()
    random_steps = (i for i, step in enumerate(steps) if not transforms.is_deterministic(step))
    first_random = next(random_steps, None)
    watched = _Watched(())
    place = watched.place(_with_transform(dataset, watched)[index])
    smallest = None
    if first_random is not None:
        smallest = _smallest_cut(steps[:first_random], watched.inputs)
    for end in dict.fromkeys((_tail(steps), len(steps))):
        begin = end if smallest is None else smallest
        yield Cut(begin=begin, end=end, num_steps=len(steps), place=place)


class Beginning:
    """Reads samples with only the first steps of the transform, whose result is at this place."""

    def __init__(self, dataset: Any, steps: tuple[Step, ...], place: Path) -> None:
        self._place = place
        self._watched = _Watched(steps)
        self._source = _with_transform(dataset, self._watched)

    def __call__(self, index: int) -> Any:
        """Returns a sample.

        Raises:
            AnotherWayError: Its code does otherwise with what the transform gives it.
        """
        self._watched.calls = 0
        try:
            sample = self._source[index]
            place = self._watched.place(sample)
            if place != self._place:
                raise AnotherWayError(f"has its image at {place} instead of {self._place}")
        except Exception as error:
            # Perhaps for want of what the transform gives: if not, the whole will raise it too.
            how = error if type(error) is AnotherWayError else f"raises {type(error).__name__}"
            raise AnotherWayError(
                f"Sample {index} goes another way through the data set than the first one: it "
                f"{how}."
            ) from error
        return sample


def _tail(steps: tuple[Step, ...]) -> int:
    """Where the elementwise steps begin, after which there are no others."""
    start = len(steps)
    while start and transforms.is_elementwise(steps[start - 1]):
        start -= 1
    return start


def _smallest_cut(prefix: tuple[Step, ...], inputs: tuple[Any, ...]) -> int:
    """The latest of the cuts whose result takes the fewest bytes."""
    from optuna_fleet.pipeline.preprocessor.comparing import nbytes

    sizes = [nbytes(Steps(prefix[:cut])(*inputs)) for cut in range(len(prefix) + 1)]
    return max(cut for cut, size in enumerate(sizes) if size == min(sizes))


class _Watched:
    """Stands where the transform was, and remembers what it was given and what it gave last."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self._steps = Steps(steps)
        self._output: Any = None
        self.inputs: tuple[Any, ...] = ()
        self.calls = 0

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        self.inputs = inputs
        self._output = self._steps(*inputs)
        return self._output

    def place(self, sample: Any) -> Path:
        """Returns where in the sample its result is, if it was called once for it."""
        if self.calls != 1:
            raise AnotherWayError(f"called its transform {self.calls} times")
        output, is_joint = self._output, len(self.inputs) > 1
        self._output = None
        if is_joint and _same_items(sample, output):
            return _STAR
        places = list(_places(sample, output))
        if len(places) != 1:
            raise AnotherWayError(f"has its transform's result at {len(places)} places")
        return places[0]


def _same_items(one: Any, other: Any) -> bool:
    is_sequence = issubclass(type(one), (tuple, list)) and len(one) == len(other)
    return is_sequence and all(map(operator.is_, one, other))


def _places(node: Any, wanted: Any, path: Path = ()) -> Iterator[Path]:
    if node is wanted:
        yield path
    elif issubclass(type(node), (tuple, list)):
        for number, item in enumerate(node):
            yield from _places(item, wanted, (*path, number))
    elif type(node) is dict:
        for key, item in node.items():
            yield from _places(item, wanted, (*path, key))


def applied(path: Path, function: Step, node: Any) -> Any:
    """Returns a sample or batch, with a function applied at one place of it."""
    if path == _STAR:
        return _like(node, function(*node))
    if not path:
        return function(node)
    key, *rest = path
    if isinstance(node, dict):
        return {**node, key: applied(tuple(rest), function, node[key])}
    items = list(node)
    items[key] = applied(tuple(rest), function, items[key])
    return _like(node, items)


def _like(node: Any, items: Any) -> Any:
    """The items in a container as ``node`` is one: ``default_collate`` makes lists of tuples."""
    return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)


# Which data sets are copied, and how, so that they call another transform.


def _transform_of(dataset: Any) -> Any:
    """The one transform of a data set; None if it has none, or several."""
    inner = parts_of(dataset)
    if inner is not None:
        found = [_transform_of(part) for part in inner]
        return found[0] if found and all(part is found[0] for part in found) else None
    transform = getattr(dataset, "transform", None)
    if transform is not None:
        return transform
    joint: Any = getattr(dataset, "transforms", None)
    return joint.transform if transforms.is_standard(joint) else joint


def _with_transform(dataset: Any, transform: Step) -> Any:
    """A shallow copy of the data set that calls ``transform`` in place of its own."""
    copied = copy.copy(dataset)
    inner = parts_of(dataset)
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


def parts_of(dataset: Any) -> list[Any] | None:
    """Returns what torch's ``Subset`` or ``ConcatDataset`` is made of; None of other data sets."""
    data = sys.modules.get("torch.utils.data")
    if data is None:
        return None  # not loaded: no data set is of these classes
    if type(dataset) is data.Subset:
        return [dataset.dataset]
    return list(dataset.datasets) if type(dataset) is data.ConcatDataset else None
