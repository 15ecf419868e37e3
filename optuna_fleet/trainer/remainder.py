"""What a trial's objects have beside their ``state_dict``, and would lose in a move.

Which parameters are frozen, groups of parameters that an optimizer was given in a later epoch, and
gradients that have been accumulated but not stepped with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from optuna_fleet.trainer.parallel import hook_gradient


class Gradients:
    """Whether gradients are waiting for a step: since the last one of all optimizers.

    Args:
        objects: What was prepared so far; grows while the objective runs.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        self._stepped: set[int] = set()
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def close(self) -> None:
        """Look no more."""
        self._handle.remove()

    def watch(self, module: torch.nn.Module) -> None:
        """Note when this module gets gradients."""
        for parameter in module.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                hook_gradient(parameter, self._arrived)

    @property
    def are_pending(self) -> bool:
        """Whether they must be kept."""
        optimizers = {id(o) for o in self._objects if isinstance(o, torch.optim.Optimizer)}
        return not optimizers <= self._stepped

    def _arrived(self, _: torch.Tensor) -> None:
        self._stepped.clear()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))


def remainder_of(objects: Sequence[Any], *, with_gradients: bool) -> list[dict[str, Any]]:
    """What the state of each object leaves out, as `restore_remainder` takes it."""
    names = _names(objects)
    return [_of_one(thing, names, with_gradients) for thing in objects]


def _of_one(thing: Any, names: dict[int, tuple[int, str]], with_gradients: bool) -> dict[str, Any]:
    if isinstance(thing, torch.nn.Module):
        named = list(_parameters(thing))
        gradients = {name: p.grad for name, p in named if with_gradients and p.grad is not None}
        frozen = [name for name, p in named if not p.requires_grad]
        return {"frozen": frozen, "gradients": gradients}
    if isinstance(thing, torch.optim.Optimizer):
        groups = [[names.get(id(p)) for p in group["params"]] for group in thing.param_groups]
        return {"groups": groups}
    return {}


def add_groups(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], objects: Sequence[Any]
) -> None:
    """Give an optimizer the groups of parameters that it had and that are not there yet."""
    parameters = dict(_by_place(objects))
    for group in saved.get("groups", [])[len(optimizer.param_groups) :]:
        if all(place is not None and tuple(place) in parameters for place in group):
            optimizer.add_param_group({"params": [parameters[tuple(place)] for place in group]})


def restore_remainder(thing: Any, saved: dict[str, Any]) -> None:
    """Give a module what its state has left out."""
    if not isinstance(thing, torch.nn.Module) or "frozen" not in saved:
        return
    frozen, gradients = set(saved["frozen"]), saved["gradients"]
    for name, parameter in _parameters(thing):
        if parameter.requires_grad is (name in frozen):
            parameter.requires_grad_(name not in frozen)
        if name in gradients:
            parameter.grad = gradients[name].to(parameter.device)


def restore_into(state: dict[str, Any], saved: dict[str, Any]) -> None:
    """Make a ``trial.state`` what it was; its lists, dicts and sets stay the same objects.

    The objective may hold one that it got from the state before its loop, and may have added to it
    what an earlier loop, which was not run again, had added.
    """
    for key, value in saved.items():
        held: Any = state.get(key)
        if type(held) is not type(value) or not isinstance(value, (list, dict, set)):
            state[key] = value
            continue
        held.clear()
        (held.extend if isinstance(held, list) else held.update)(value)


def _names(objects: Sequence[Any]) -> dict[int, tuple[int, str]]:
    return {id(parameter): place for place, parameter in _by_place(objects)}


def _by_place(objects: Sequence[Any]) -> list[tuple[tuple[int, str], torch.nn.Parameter]]:
    return [
        ((position, name), parameter)
        for position, thing in enumerate(objects)
        if isinstance(thing, torch.nn.Module)
        for name, parameter in _parameters(thing)
    ]


def _parameters(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Without what ``torch.compile`` adds to their names."""
    return [(name.replace("_orig_mod.", ""), p) for name, p in module.named_parameters()]
