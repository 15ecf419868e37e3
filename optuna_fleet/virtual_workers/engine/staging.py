"""Makes the pipeline of a trial: what `FleetTrial.pipeline` does on this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.data.shard_loader import ShardLoader
from optuna_fleet.trainer.parts import Parts
from optuna_fleet.trainer.widths import Bounds
from optuna_fleet.virtual_workers.engine.agreement import writes_weights
from optuna_fleet.virtual_workers.engine.blocks import blocks_of
from optuna_fleet.virtual_workers.engine.pipeline import Pipeline
from optuna_fleet.virtual_workers.engine.pipeline_options import PipelineOptions
from optuna_fleet.virtual_workers.engine.whole import check_owned


def make_pipeline(
    model: Any,
    optimizer: Any,
    loss: Callable[[Any, Any], Any],
    given: Mapping[str, Any],
    parts: Parts,
    loader: ShardLoader,
) -> Pipeline:
    """Make it, as the options `given` say; `loader` tells which devices the trial can use.

    Raises:
        FleetConfigError: The model can't be cut, or the optimizer can't train it so.
    """
    _check(model, optimizer)
    options = PipelineOptions(**given)
    if options.most_workers != 1 and writes_weights(model):
        raise FleetConfigError(
            "The model has an embedding with `max_norm`, which writes to its weights when it is "
            "called: those of several virtual workers would come apart. Leave out "
            "`virtual_workers` and `clock_distance`, and it trains in stages."
        )
    session, run = parts.session, parts.run
    num_blocks = len(blocks_of(model, may_part_ties=options.is_flushed))
    bounds = Bounds.checked(options.min_devices, options.max_devices, run=run, spans_types=True)
    workers = options.most_workers
    usable = run.num_of_all_types if workers is None else workers * num_blocks
    if options.may_replicate:
        usable = max(usable, options.num_parts)
    most = min(bounds.max_devices or usable, usable)
    if bounds.min_devices > most:
        raise FleetConfigError(
            f"`min_devices` is {bounds.min_devices}, but the model can be cut into {num_blocks} "
            "stages at most: it must not be more, for each virtual worker."
        )
    if num_blocks == usable == 1 < run.num_of_all_types:
        session.remark(
            ["pipeline of one stage"],
            "The model of trial.pipeline() can't be cut, so it trains on one device: it has one "
            "layer, or its first and its last one share a module, or without flushes a parameter.",
        )
    parts.widths.bound(replace(bounds, max_devices=most))
    loader.give_whole_batches(is_whole=True)
    options = replace(options, max_devices=min(most, run.num_of_all_types))
    return Pipeline(model, optimizer, loss, options, parts, loader.need)


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Sequential) or not len(model):
        raise FleetConfigError(
            f"trial.pipeline() was given a `{type(model).__name__}` as the model, but takes a "
            "torch.nn.Sequential of its layers, in their order: cuts are between these. What one "
            "layer returns is what the next one gets; tuples and dicts carry what skips some."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise FleetConfigError(
            f"trial.pipeline() was given a `{type(optimizer).__name__}` as the optimizer, but "
            "takes a torch.optim.Optimizer of the model's parameters."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise FleetConfigError(
            "The optimizer is LBFGS, which looks at all gradients of a model at once, but each "
            "stage has some of them: take one that treats parameters one by one."
        )
    own = {id(parameter) for parameter in model.parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    check_owned(trained, own)
