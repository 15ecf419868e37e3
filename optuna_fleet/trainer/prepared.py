"""What an objective has given to `FleetTrial.prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.checkpoints.resuming import Resuming
from optuna_fleet.trainer.checkpoints.states import begin_with
from optuna_fleet.trainer.gradients import batchnorm, module_hooks
from optuna_fleet.trainer.gradients.gradient_sync import (
    attach,
    check_initialised,
    check_same,
    make_data_parallel,
)
from optuna_fleet.trainer.parts import Parts

_TAKES = (
    "modules, optimizers, schedulers and other objects with `state_dict` and `load_state_dict`"
)


_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


class Prepared:
    """Objects that train on one device, or data-parallel on several.

    Attributes:
        modules: Those of the objects that are modules.
    """

    def __init__(self, parts: Parts) -> None:
        self.modules: list[torch.nn.Module] = []
        self._parts = parts
        self._single: list[torch.nn.Module] = []  # of which no gradient is reduced

    def add(
        self,
        objects: Sequence[Any],
        resuming: Resuming | None,
        *,
        is_alone: bool,
        is_checked: bool,
    ) -> None:
        """Take more of them.

        Raises:
            FleetConfigError: One has no state that can be saved, or is lazy, or a wrapper that
                trains data parallel itself, or there is none.
        """
        if not objects:
            raise FleetConfigError(f"trial.prepare() was given nothing, but takes {_TAKES}.")
        for thing in objects:  # before any optimizer's state is made to follow them
            if isinstance(thing, torch.nn.Module):
                thing.to(self._parts.device)
        for thing in objects:
            self._check(thing)
            position = len(self._parts.objects)
            self._parts.objects.append(thing)
            if resuming is not None:
                resuming.prepared(thing, position)
            elif isinstance(thing, torch.optim.Optimizer) and thing.state:
                thing.load_state_dict(thing.state_dict())  # moves it to where the parameters are
            if isinstance(thing, torch.nn.Module):
                self._add_module(thing, is_alone=is_alone, is_checked=is_checked)

    def _check(self, thing: Any) -> None:
        has_state = hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
        if isinstance(thing, type) or not has_state:
            kind = f"class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
            hint = ""
            if isinstance(thing, (list, tuple, dict)):
                hint = ": each by itself, as in trial.prepare(model, optimizer)"
            elif isinstance(thing, torch.utils.data.DataLoader):
                hint = "; batches come from trial.batches(name, batch_size=...)"
            raise FleetConfigError(
                f"trial.prepare() was given a `{kind}`, but takes {_TAKES}{hint}."
            )
        if isinstance(thing, torch.nn.Module):
            check_initialised(thing)
        parts = thing.modules() if isinstance(thing, torch.nn.Module) else ()
        wrapper = next((part for part in parts if isinstance(part, _WRAPPERS)), None)
        if wrapper is not None:
            raise FleetConfigError(
                f"trial.prepare() was given a `{type(wrapper).__name__}`, but trains modules data "
                "parallel by itself: leave the wrapper out, and give the module inside it."
            )

    def _add_module(self, module: torch.nn.Module, *, is_alone: bool, is_checked: bool) -> None:
        self.modules.append(module)
        self._parts.steps.watch(module)
        if is_checked:
            module_hooks.watch(module.modules())
        if is_alone:
            self._single.append(module)
            batchnorm.begin_alone()
        else:
            make_data_parallel(module, self._parts.shares)
        begin_with(module)

    def check_alike(self) -> None:
        """All ranks have prepared the same.

        Raises:
            TrialError: They have not.
        """
        for module in self.modules:
            check_same(module)

    def attach_all(self) -> None:
        """Reduce the gradients of those that were prepared on one device."""
        for module in self._single:
            attach(module, self._parts.shares)
        self._single.clear()
