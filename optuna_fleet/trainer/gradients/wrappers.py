"""Wrappers that train data parallel by themselves: gradients would be averaged twice."""

from __future__ import annotations

import weakref

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.gradients.reducer import Reducer

_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


class Wrappers:
    """Refuses them around what is prepared, whichever comes first.

    Torch tells of each module that becomes a part of another one.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._wrapped = weakref.WeakKeyDictionary[torch.nn.Module, str]()
        self._handle = register_module_module_registration_hook(self._registered)

    def close(self) -> None:
        """Hear of no more modules."""
        self._handle.remove()

    def _registered(self, module: torch.nn.Module, _: str, part: torch.nn.Module | None) -> None:
        if isinstance(module, _WRAPPERS) and part is not None:
            self._wrapped[part] = type(module).__name__
            if self._reducer.knows(part):
                raise _refusal(type(module).__name__)

    def check(self, module: torch.nn.Module) -> None:
        """Check what is to be prepared.

        Raises:
            FleetConfigError: It is a wrapper, or has one in it, or is in one.
        """
        inside = next((part for part in module.modules() if isinstance(part, _WRAPPERS)), None)
        if inside is not None:
            raise _refusal(type(inside).__name__)
        own = {id(param) for param in module.parameters()}
        for part, wrapper in self._wrapped.items():
            if any(id(param) in own for param in part.parameters()):
                raise _refusal(wrapper)


def _refusal(wrapper: str) -> FleetConfigError:
    return FleetConfigError(
        f"trial.prepare() was given what is in a `{wrapper}`, but trains modules data parallel by "
        "itself: leave the wrapper out, and prepare and call the module inside it."
    )
