"""Watches the steps of all optimizers: do they train what was prepared, are gradients waiting?"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from optuna_fleet.trainer.gradients.reducer import Reducer


class Steps:
    """Looks at each optimizer of this process: at its first step, and after each.

    Args:
        objects: What was prepared so far; grows while the objective runs.
        warn: Given a sentence for the user on what trains but was not prepared: nothing else
            would tell, and the trial would go wrong.
        reducer: Counts backward passes.

    Attributes:
        optimizers: Those that have trained.
    """

    def __init__(
        self, objects: Sequence[Any], warn: Callable[[str], None], reducer: Reducer
    ) -> None:
        self._objects = objects
        self._warn = warn
        self._reducer = reducer
        self.optimizers = weakref.WeakSet[torch.optim.Optimizer]()
        self._stepped: dict[int, int] = {}  # after how many backward passes, by optimizer
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """Look no more; the hooks would keep the trial's memory."""
        for handle in self._handles:
            handle.remove()

    @property
    def are_pending(self) -> bool:
        """Whether gradients are waiting for a step of some optimizer, and must be kept."""
        optimizers = [id(o) for o in self._objects if isinstance(o, torch.optim.Optimizer)]
        return any(self._stepped.get(o) != self._reducer.num_passes for o in optimizers)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped[id(optimizer)] = self._reducer.num_passes

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer not in self.optimizers:
            self.optimizers.add(optimizer)
            self._check_prepared(optimizer)

    def _check_prepared(self, optimizer: torch.optim.Optimizer) -> None:
        modules = [thing for thing in self._objects if isinstance(thing, torch.nn.Module)]
        if not modules:  # it trains by itself, on one device
            return
        name = type(optimizer).__name__
        if not any(thing is optimizer or _saves(thing, optimizer) for thing in self._objects):
            self._warn(
                f"The objective trains with an optimizer ({name}) that was not given to "
                "trial.prepare(): its state (momentum, steps) is lost when the trial moves or "
                "resumes. Prepare it together with the model."
            )
        known = {id(parameter) for module in modules for parameter in module.parameters()}
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        number = sum(id(parameter) not in known for parameter in trained)
        if number:
            self._warn(
                f"The objective trains {number} parameters ({name}) of no module that was given "
                "to trial.prepare(): they are not checkpointed, and on several devices each would "
                "train them on its part of the batches only. Make them part of a module and "
                "prepare it."
            )


def _saves(thing: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has the optimizer in it, and its state in its own: Lookahead does, for one.

    A scheduler has it without.
    """
    has_it = any(part is optimizer for part in getattr(thing, "__dict__", {}).values())
    return has_it and _has_groups(thing.state_dict())


def _has_groups(state: Any) -> bool:
    return isinstance(state, dict) and (
        "param_groups" in state or any(map(_has_groups, state.values()))
    )
