"""Copies of modules, to be called once more with some of the samples."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optuna_fleet.trainer.checkpoints.states import uncompiled
from optuna_fleet.trainer.splitting.errors import CannotFollowError


def twin_of(module: torch.nn.Module, *, shares_weights: bool) -> torch.nn.Module:
    """A copy, in eval mode and not compiled, that does not tell anybody what it does.

    Raises:
        CannotFollowError: It would call the original.
    """
    memo: dict[int, Any] = {}
    if shares_weights:
        memo = {
            id(own): torch.nn.Parameter(own.detach(), requires_grad=own.requires_grad)
            for own in module.parameters()
        }
    with uncompiled(module) as own:
        twin: torch.nn.Module = copy.deepcopy(own, memo).eval()
    for part in twin.modules():
        if "forward" in vars(part) and getattr(part.forward, "__self__", None) is not part:
            raise CannotFollowError("forward")
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            hooks.clear()
    return twin


class WeightsUnchanged(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, what would write to parameters of a module raises CannotFollowError."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared = {own.untyped_storage().data_ptr() for own in module.parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments if func._schema.is_mutable else []
        given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
        written = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
        for leaf in pytree.tree_leaves(written):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in self._shared:
                raise CannotFollowError("weights")
        return func(*args, **kwargs)
