"""Copies of what is trained, as it was before a step: to go back to, and no more.

What a step changes before its first ``optimizer.step()`` (buffers, rates, what no optimizer owns)
is copied when it begins; what only optimizers change (their parameters, momentum) right before
one does for the first time. Until then it is what it was.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

_Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Late:
    """What optimizers own, and its copies; and what they keep of each parameter."""

    live: list[Tensor]
    copies: list[Tensor]
    states: list[tuple[Optimizer, dict[Any, dict[str, Any]]]]


@dataclass(slots=True)
class ObjectCopies:
    """Of prepared objects, before one step.

    Attributes:
        buffers: Of modules, by module and name: an objective may put another tensor there.
        free: Parameters that no optimizer owns.
        trained: All parameters, whether they were frozen, and their gradients if these are kept.
        groups: Rates and the like of each optimizer's groups.
        others: States of other objects, by position.
        versions: Tell whether what optimizers own was changed without them.
        late: That, once one of them is about to step.
    """

    buffers: list[tuple[Module, str, Tensor | None]]
    free: list[tuple[Parameter, Tensor]]
    trained: list[tuple[Parameter, bool, Tensor | None]]
    groups: list[tuple[Optimizer, list[dict[str, Any]]]]
    others: dict[int, bytes]
    versions: list[_Identity]
    late: Late | None = None

    @classmethod
    def of(cls, objects: Sequence[Any], *, with_gradients: bool) -> ObjectCopies:
        """Copy what a step may change before any optimizer steps."""
        modules = [thing for thing in objects if isinstance(thing, Module)]
        optimizers = [thing for thing in objects if isinstance(thing, Optimizer)]
        owned = {id(parameter) for parameter in _owned(optimizers)}
        parameters = [parameter for module in modules for parameter in module.parameters()]
        places = [(m, n) for module in modules for m in module.modules() for n in m._buffers]
        return cls(
            buffers=[(module, name, _clone(module._buffers[name])) for module, name in places],
            free=[(p, p.detach().clone()) for p in parameters if id(p) not in owned],
            trained=[
                (p, p.requires_grad, _clone(p.grad) if with_gradients else None)
                for p in parameters
            ],
            groups=[(one, [_rates(group) for group in one.param_groups]) for one in optimizers],
            others={
                position: pickle.dumps(thing.state_dict())
                for position, thing in enumerate(objects)
                if not isinstance(thing, (Module, Optimizer))
            },
            versions=_versions(optimizers),
        )

    def is_as_it_was(self) -> bool:
        """Whether what optimizers own is unchanged, or copied."""
        optimizers = [one for one, _ in self.groups]
        return self.late is not None or _versions(optimizers) == self.versions

    @torch.no_grad()
    def copy_late(self, spare: Late | None) -> None:
        """Copy what optimizers own, into `spare` copies where these fit.

        Raises:
            TypeError: An optimizer keeps something else than numbers and tensors.
        """
        optimizers = [one for one, _ in self.groups]
        states = [
            (one, {p: dict(_checked(state)) for p, state in one.state.items()})
            for one in optimizers
        ]
        # The parameters themselves: an objective may give them other memory (`p.data = ...`).
        live: list[Tensor] = [*_owned(optimizers)]
        for _, state in states:
            live += [v for kept in state.values() for v in kept.values() if isinstance(v, Tensor)]
        copies = spare.copies if spare is not None and _fit(spare.copies, live) else None
        if copies is None:
            copies = [torch.empty_like(tensor) for tensor in live]
        if live:
            torch._foreach_copy_(copies, live)
        self.late = Late(live, copies, states)

    @torch.no_grad()
    def put_back(self) -> dict[int, Any]:
        """Make modules and optimizers what they were; return the states of other objects."""
        for module, name, buffer in self.buffers:
            module._buffers[name] = buffer
        for parameter, copy in self.free:
            parameter.copy_(copy)
        if self.late is not None:
            self._put_back_late(self.late)
        for parameter, requires_grad, gradient in self.trained:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        for optimizer, groups in self.groups:
            del optimizer.param_groups[len(groups) :]
            for group, rates in zip(optimizer.param_groups, groups, strict=True):
                group.update(rates)
        return {position: pickle.loads(state) for position, state in self.others.items()}

    def _put_back_late(self, late: Late) -> None:
        for tensor, copy in zip(late.live, late.copies, strict=True):
            tensor.copy_(copy)
        for optimizer, state in late.states:
            optimizer.state.clear()
            optimizer.state.update(state)


def _owned(optimizers: Sequence[Optimizer]) -> list[Parameter]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return list({id(p): p for group in groups for p in group["params"]}.values())


def _rates(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _cloned(value) for key, value in group.items() if key != "params"}


def _versions(optimizers: Sequence[Optimizer]) -> list[_Identity]:
    """Tell whether an objective has changed a parameter by itself."""
    return [(p.data_ptr(), p._version) for p in _owned(optimizers)]


def _checked(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if not isinstance(value, (Tensor, int, float, str, type(None))):
            raise TypeError(f"{key!r} of an optimizer's state is a {type(value).__name__}")
        yield key, value


def _fit(copies: list[Tensor], live: list[Tensor]) -> bool:
    """Whether those can be copies of these."""
    some, others = ([(t.shape, t.dtype, t.device) for t in kept] for kept in (copies, live))
    return some == others


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
