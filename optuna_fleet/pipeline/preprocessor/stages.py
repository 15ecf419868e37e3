"""Whether samples come again, and stages do what they must: tried before anything relies on it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.preprocessor.order import Surroundings, check_samplers, watched
from optuna_fleet.pipeline.spec import PipelineSpec, Source, Stages, called

MAX_TRIES = 16
"""Samples that are tried, where one after another raises."""


def check(source: Source, spec: PipelineSpec, load: Callable[[], Source]) -> None:
    """Tries samplers and stages, on data sets that nobody reads: what they open stays open.

    What raises may be of the moment (a file server): it is told of when it is wanted.
    """
    kept = [each for each in spec.datasets if not each.shards]  # nothing of a stream is
    in_parts = [each for each in kept if source.stages[each.name].in_parts]
    if not (in_parts or source.samplers):
        return
    source = load()
    check_samplers(source, spec)
    around = Surroundings(source, spec)
    for each in in_parts:
        dataset, stages = source.datasets[each.name], source.stages[each.name]
        for index in range(min(each.length, MAX_TRIES)):
            begin = partial(around.begin, each.name, place=index)
            prepare = partial(stages.prepared, dataset, index)
            with around.lent():
                try:
                    tried = [
                        watched(prepare, partial(begin, epoch), source.generators)
                        for epoch in range(2)
                    ]
                    begin(0)
                    problem = _problem(stages, tried, collates=each.collate is None)
                except (Exception, SystemExit):
                    continue
            if problem:
                raise FleetConfigError(f"For sample {index} of data set {each.name!r} {problem}")
            break


def _problem(stages: Stages, tried: Sequence[tuple[Any, bool]], *, collates: bool) -> str | None:
    """What the stages do that they must not; None for nothing.

    ``tried`` is what was prepared in two epochs, and whether random numbers were drawn for it.
    """
    from optuna_fleet.pipeline.chunks.layout import copied

    what = "`prepare` gives" if stages.prepare else "dataset[index], without a `prepare`,"
    (prepared, drew), (again, _) = tried
    if drew:
        return f"{what} draws random numbers. Leave all that is random to `augment`."
    try:
        prepared, again = copied(prepared), copied(again)
    except Exception as error:
        return f"{what} can't be kept for later epochs: {type(error).__name__}: {error}"
    if not same(prepared, again):
        return (
            f"{what} is not the same each time, but it is kept for all epochs. Leave all that is "
            "random, and what changes with the epoch, to `augment`."
        )
    sample = called(stages.augment, prepared)
    if collates and not _is_elementwise(stages.finish, sample):
        return (
            "`finish` does not give the same for a batch as for its samples, one by one. Leave "
            "what is not elementwise to `augment`."
        )
    return None


def _is_elementwise(finish: Callable[[Any], Any] | None, sample: Any) -> bool:
    from torch.utils.data import default_collate

    from optuna_fleet.pipeline.chunks.layout import copied

    if finish is None:
        return True
    try:
        batch, wanted = (
            default_collate([copied(sample)] * 2),
            default_collate([finish(sample)] * 2),
        )
    except Exception:
        return True  # without a collate_fn of the user's there is no batch to finish
    # default_collate made lists of tuples, of which finish may make tuples again.
    return same(_listed(finish(batch)), _listed(wanted))


def _listed(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _listed(item) for key, item in batch.items()}
    return list(map(_listed, batch)) if type(batch) in (tuple, list) else batch


def same(left: Any, right: Any) -> bool:
    """Whether two samples are of the same structure, types and bits.

    Objects that are no tensors, arrays or numbers must be equal by ``==``; those whose class says
    nothing of that, in what they hold.
    """
    import torch  # the script's process need not pay for it

    if type(left) is not type(right):
        return False
    if type(left) is dict:
        return [*left] == [*right] and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        looks = ("dtype", "shape", "device", "layout", "requires_grad")
        if any(getattr(left, look) != getattr(right, look) for look in looks):
            return False
        plain = (each.detach().as_subclass(torch.Tensor).contiguous() for each in (left, right))
        bits = (each.reshape(-1).view(torch.uint8) for each in plain)
        # What tv_tensors know beside their values: the format and canvas of boxes.
        return vars(left) == vars(right) and torch.equal(*bits)
    if isinstance(left, (np.ndarray, np.generic)):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        is_equal = (left == right).all() if left.dtype.hasobject else None
        return left.tobytes() == right.tobytes() if is_equal is None else bool(is_equal)
    kind: Any = type(left)
    if kind.__eq__ is object.__eq__ and getattr(left, "__dict__", None):
        return same(vars(left), vars(right))
    return bool(left == right or (left != left and right != right))


def comes_again(sample: Any, make: Callable[[], Any]) -> bool:
    """Returns whether a sample that is made again is the same, or can't be told to be another.

    They are compared as pickled, and, as pickles of the same may differ, by what is in them.
    """
    from optuna_fleet.pipeline.chunks.layout import dumps_outside

    try:
        before = copy.deepcopy(sample)  # making it again may write into it
        again = copy.deepcopy(make())  # as a set in it may come in another order then
        if dumps_outside(before) == dumps_outside(again):
            return True
        with suppress(RecursionError):  # it holds itself
            return same(before, again)
        return False
    except Exception:
        return True  # of the moment, perhaps: it says nothing of the sample
