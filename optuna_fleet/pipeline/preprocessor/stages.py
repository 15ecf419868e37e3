"""What the user says of a data set's preprocessing: what is always the same, random, elementwise.

What is always the same is kept for all epochs; it is tried once, where the data sets come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.preprocessor.order import Surroundings, check_samplers, watched
from optuna_fleet.pipeline.preprocessor.source import Source, Stages, called
from optuna_fleet.pipeline.spec import PipelineSpec

MAX_TRIES = 16
"""Samples that are tried, where one after another raises."""


def check(source: Source, spec: PipelineSpec, load: Callable[[], Source]) -> None:
    """Tries samplers and stages, on data sets that nobody reads: what they open stays open.

    What raises may be of the moment (a file server): it is told of when it is wanted.

    Raises:
        FleetConfigError: What the user gave does not do what it must.
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
    from optuna_fleet.pipeline.chunks.chunk_view import copied
    from optuna_fleet.pipeline.preprocessor.comparing import same

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

    from optuna_fleet.pipeline.chunks.chunk_view import copied
    from optuna_fleet.pipeline.preprocessor.comparing import same

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
