"""What has to be the same in all processes: decided once, where the data sets come from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from optuna_fleet.pipeline.packed import packed_part
from optuna_fleet.pipeline.preprocessor import samplers
from optuna_fleet.pipeline.preprocessor.payload import Payload
from optuna_fleet.pipeline.preprocessor.source import Source
from optuna_fleet.pipeline.preprocessor.splitting import SplitDataset, decide, may_split
from optuna_fleet.pipeline.preprocessor.surroundings import Surroundings
from optuna_fleet.pipeline.spec import DatasetSpec, PipelineSpec


def decided(
    spec: PipelineSpec,
    source: Source,
    packed: Payload,
    *,
    by_itself: bool | None,
    finish_on_device: bool,
) -> PipelineSpec:
    """Returns the description with how data sets are taken apart.

    No sample is read of ``source``, which is the user's own, but of what was ``packed`` of it.
    Whether data sets' own transforms are taken apart ``by_itself``: see `may_split`.

    Raises:
        FleetConfigError: What the user gave does not do what it must.
    """
    splits = {
        each.name
        for each in spec.datasets
        if (finish_on_device or each.shuffled or source.stages[each.name].in_parts)
        and may_split(
            source.datasets[each.name],
            source.stages[each.name],
            by_itself=False if each.batched else by_itself,
        )
    }
    if not (splits or samplers.to_check(source)):
        copied = source
    else:
        # A copy: what data sets open lazily (HDF5) must not be open in the user's own.
        copied = packed.load()
        samplers.check(copied, spec)
    datasets = []
    for each in spec.datasets:
        found = split_of(copied, spec, each) if each.name in splits else None
        each = replace(each, cut=found.cut if found is not None else None)
        # With a collate_fn, samples must be finished before they are collated.
        if finish_on_device and each.collate is None:
            end = source.stages[each.name].finish if found is None else found.finish
            each = replace(each, finish=packed_part("transform", each.name, end))
        datasets.append(each)
    return replace(spec, datasets=tuple(datasets))


def split_of(source: Source, spec: PipelineSpec, dataset: DatasetSpec) -> SplitDataset | None:
    """Returns how to take a data set apart.

    Raises:
        FleetConfigError: What the user gave does not do what it must.
    """
    around = Surroundings(source, spec)
    with around.lent():
        return decide(
            dataset.name,
            source.datasets[dataset.name],
            source.stages[dataset.name],
            num_samples=dataset.length,
            begin=partial(around.begin, dataset.name),
        )
