"""What an objective has given to `FleetTrial.prepare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from optuna_fleet.arguments import check_that, is_a
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.gradients import batchnorm
from optuna_fleet.trainer.gradients.replicas import check_same, make_same
from optuna_fleet.trainer.groups import group_size
from optuna_fleet.trainer.run_parts import Parts
from optuna_fleet.trainer.training_state import TrainingState

OPTIONS = ("min_devices", "max_devices", "kind")
"""Keywords of `FleetTrial.prepare` that are no objects."""

_TAKES = (
    "modules, optimizers, schedulers and other objects with `state_dict` and `load_state_dict`"
)
_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


class Prepared:
    """Objects that train on one device, or data-parallel on several.

    Attributes:
        modules: Those of the objects that are modules.
        kept: Has what is kept of them.
    """

    def __init__(self, parts: Parts, kept: TrainingState) -> None:
        self.modules: list[torch.nn.Module] = []
        self._parts = parts
        self.kept = kept
        self._kind: str | None = None  # as the user calls it

    def traits(self, reads: str) -> frozenset[str]:
        """Of a trial that `reads` its batches so, see `Model`; none where it is not checked."""
        if self._parts.widths.bounds.min_devices > 1 or self.kept.in_parts is not None:
            return frozenset()
        if self._kind is not None:
            return frozenset({f"of the kind {self._kind}"})
        parts = [part for module in self.modules for part in module.modules()]
        tensors = (tensor for module in self.modules for tensor in module.parameters())
        choices = self._parts.session.choices.items()
        return frozenset(
            {
                reads,
                *(f"{type(x).__module__}.{type(x).__qualname__}" for x in self.kept.objects),
                *(f"{type(part).__module__}.{type(part).__qualname__}" for part in parts),
                *(str(tensor.dtype) for tensor in tensors),
                *(f"{name}={choice}" for name, choice in choices),
            }
        )

    def add(
        self, objects: Sequence[Any], named: Mapping[str, Any], kind: str | None = None
    ) -> None:
        """Take more of them, some as the user calls them.

        Raises:
            FleetConfigError: One has no state that can be saved, or is lazy, or a wrapper that
                trains data parallel itself, or there is none.
        """
        check_that("kind", kind, is_a(str), "be a word, as 'resnet'", optional=True)
        self._kind = kind or self._kind
        called = [*("" for _ in objects), *named]
        objects = [*objects, *named.values()]
        if not objects:
            raise FleetConfigError(f"trial.prepare() was given nothing, but takes {_TAKES}.")
        for thing in objects:  # before any optimizer's state is made to follow them
            if isinstance(thing, torch.nn.Module):
                thing.to(self._parts.device)
        for thing, name in zip(objects, called, strict=True):
            self._check(thing, name)
            is_restored = self.kept.add(thing, name)
            if isinstance(thing, torch.nn.Module):
                self._add_module(thing, is_same=is_restored)

    def _check(self, thing: Any, name: str) -> None:
        has_state = hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
        if isinstance(thing, type) or not has_state:
            kind = f"class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
            what = f" as `{name}`" if name else ""
            raise FleetConfigError(
                f"trial.prepare() was given a `{kind}`{what}, but takes {_TAKES}, each by itself."
            )
        if isinstance(thing, torch.nn.Module):
            _check_initialised(thing)
            _check_unwrapped(thing)

    def _add_module(self, module: torch.nn.Module, *, is_same: bool) -> None:
        self.modules.append(module)
        if group_size() > 1:
            check_same(module)
            if not is_same:
                make_same(module)
        batchnorm.begin(self._parts.weights)
        self._parts.reducer.watch(module)


def _check_unwrapped(module: torch.nn.Module) -> None:
    """Check that a module, and no part of it, is trained data parallel already."""
    wrapper = next((part for part in module.modules() if isinstance(part, _WRAPPERS)), None)
    if wrapper is not None:
        raise FleetConfigError(
            f"trial.prepare() was given what is in a `{type(wrapper).__name__}`, but trains "
            "modules data parallel by itself: leave the wrapper out, and prepare and call the "
            "module inside it."
        )


def _check_initialised(module: torch.nn.Module) -> None:
    """Check that no tensor of a module is still to be made."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise FleetConfigError(
                f"The tensor {name!r} of {type(module).__name__} is lazy, but must be "
                f"initialised: run one batch through the model before `trial.prepare`."
            )
