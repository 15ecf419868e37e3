"""How a pipeline is to train, and on how many devices: what `FleetTrial.pipeline` is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from optuna_fleet.arguments import check_choice, check_number
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.run_parts import Bounds, Parts
from optuna_fleet.virtual_workers.layouts import LAYOUTS
from optuna_fleet.virtual_workers.measuring import blocks_of
from optuna_fleet.virtual_workers.whole import check_owned

_PARTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """See `FleetTrial.pipeline`.

    Raises:
        FleetConfigError: They are of another kind than there, or contradict each other.
    """

    in_flight: int | None
    clock_distance: int | None
    virtual_workers: int | None
    layout: str | None
    max_grad_norm: float | None
    memory_bytes: float | None
    min_devices: int | None
    max_devices: int | None

    def __post_init__(self) -> None:
        check_number("in_flight", self.in_flight, least=1, whole=True, optional=True)
        check_number("clock_distance", self.clock_distance, least=0, whole=True, optional=True)
        check_number("virtual_workers", self.virtual_workers, least=1, whole=True, optional=True)
        check_choice("layout", self.layout, LAYOUTS, optional=True)
        check_number("max_grad_norm", self.max_grad_norm, above=0, optional=True)
        check_number("memory_bytes", self.memory_bytes, above=0, optional=True)
        if self.max_grad_norm is not None and not self.is_flushed:
            raise FleetConfigError(
                "`max_grad_norm` is given with `clock_distance`, but the norm of all gradients is "
                "only known when the pipeline is flushed: leave one of them out."
            )
        self._check_workers()

    def _check_workers(self) -> None:
        several = self.virtual_workers or 1
        if self.layout is not None and self.clock_distance is None:
            raise FleetConfigError(
                f"`layout` is {self.layout!r}, but is for virtual workers without flushes: "
                "say with `clock_distance` how many waves they may be apart."
            )
        if self.layout in ("NP", "HD") and self.virtual_workers is not None:
            raise FleetConfigError(
                f"`virtual_workers` is {several}, but in the layout {self.layout!r} their number "
                "follows from the nodes: leave one of them out."
            )

    @property
    def is_flushed(self) -> bool:
        """Whether all gradients of a batch are there before the next one begins."""
        return self.clock_distance is None

    @property
    def num_parts(self) -> int:
        """Parts of a batch, with flushes: the same on any devices, as BatchNorm sees parts."""
        return self.in_flight or _PARTS

    @property
    def most_in_flight(self) -> int | None:
        """Minibatches in flight; None for as many as there is memory for, and as help."""
        return self.num_parts if self.is_flushed else self.in_flight


def checked_options(
    model: Any, optimizer: Any, given: Mapping[str, Any], parts: Parts
) -> PipelineOptions:
    """The options `given`, for a trial that is bound to the devices that it can use with them.

    Raises:
        FleetConfigError: The model can't be cut, or the optimizer can't train it so.
    """
    _check(model, optimizer)
    options = PipelineOptions(**given)
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    if options.virtual_workers != 1 and any(e.max_norm or e.sparse for e in embeddings):
        if not options.is_flushed and any(e.max_norm for e in embeddings):
            raise FleetConfigError(
                "The model has an embedding with `max_norm`, which writes to its weights when it "
                "is called: those of several virtual workers would come apart. Leave out "
                "`clock_distance`, and it trains in stages."
            )
        options = replace(options, virtual_workers=1, layout=None)
    session, run = parts.session, parts.run
    num_blocks = len(blocks_of(model, may_part_ties=options.is_flushed))
    bounds = Bounds.checked(options.min_devices, options.max_devices, run=run, spans_types=True)
    workers = options.virtual_workers
    if options.is_flushed:  # each has a part of a batch at least
        workers = min(workers or options.num_parts, options.num_parts)
    usable = run.num_of_all_types if workers is None else workers * num_blocks
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
    parts.widths.bounds = replace(bounds, max_devices=most)
    return replace(options, max_devices=min(most, run.num_of_all_types))


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
