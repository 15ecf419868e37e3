"""Copies of what is trained, as it was before a step: to go back to, and no more.

What a step changes before its first ``optimizer.step()`` (buffers, rates) is copied when it
begins. Parameters, and what optimizers keep of them, are what they were until that, and are copied
right before it, if at all.
"""

from __future__ import annotations

import pickle
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Versions:
    """Of parameters: where each lies, its number of changes, its first number.

    The last shows changes by way of ``parameter.data``, which has no version.
    """

    memory: list[int]
    changes: list[int]
    firsts: Tensor

    def are(self, others: Versions) -> bool:
        """Whether nothing was changed, as far as can be told quickly."""
        is_alike = self.memory == others.memory and self.changes == others.changes
        return is_alike and torch.equal(self.firsts, others.firsts)

    def each(self) -> list[tuple[int, int, float]]:
        """One by one."""
        return list(zip(self.memory, self.changes, self.firsts.tolist(), strict=True))


class Contents:
    """What is in prepared objects: to look for it takes longer than to copy it.

    Args:
        objects: What was prepared.
        by_hand: Ids of the parameters that an objective changes by itself.
    """

    def __init__(self, objects: Sequence[Any], by_hand: Container[int]) -> None:
        self.objects = list(objects)
        modules = [thing for thing in objects if isinstance(thing, Module)]
        self.modules = [inner for module in modules for inner in module.modules()]
        self.optimizers = [thing for thing in objects if isinstance(thing, Optimizer)]
        self.parameters = _parameters(modules, self.optimizers)
        self.by_hand = [p for p in self.parameters if id(p) in by_hand]
        self.others = [p for p in self.parameters if id(p) not in by_hand]
        self._memory: list[int] = []
        self._firsts: list[Tensor] = []

    def versions(self) -> Versions:
        """Of the `others`; one that was changed has another."""
        memory = [p.data_ptr() for p in self.others]
        if memory != self._memory:
            self._firsts = [_first(p) for p in self.others]
            self._memory = memory
        firsts = torch.cat(self._firsts) if memory else torch.empty(0)
        return Versions(memory, [p._version for p in self.others], firsts)


@dataclass(frozen=True, slots=True)
class Late:
    """Parameters, what optimizers keep of each, and copies."""

    live: list[Tensor]
    copies: list[Tensor]
    states: list[tuple[Optimizer, dict[Any, dict[str, Any]]]]


@dataclass(slots=True)
class ObjectCopies:
    """Of prepared objects, before one step.

    Attributes:
        contents: What is in them.
        buffers: Of modules, by module and name: an objective may put another tensor there.
        early: Parameters that an objective changes by itself.
        trained: All parameters, whether they were frozen, and their gradients if these are kept.
        groups: Rates and the like of each optimizer's groups.
        others: States of other objects, by position.
        versions: Of parameters that are not copied early: they tell whether one was changed.
        late: Copies of these, if an optimizer was about to step.
        has_stepped: One has: what it keeps has changed. Parameters need not (a rate of 0), and
            fused optimizers change them without another version.
    """

    contents: Contents
    buffers: list[tuple[Module, str, Tensor | None]]
    early: list[tuple[Tensor, Tensor]]
    trained: list[tuple[Tensor, bool, Tensor | None]]
    groups: list[tuple[Optimizer, list[dict[str, Any]]]]
    others: dict[int, bytes]
    versions: Versions
    late: Late | None = None
    has_stepped: bool = False

    @classmethod
    @torch.no_grad()
    def of(cls, contents: Contents, *, with_gradients: bool) -> ObjectCopies:
        """Copy what a step may change before any optimizer steps."""
        return cls(
            contents=contents,
            buffers=[
                (module, name, _cloned(buffer))
                for module in contents.modules
                for name, buffer in module._buffers.items()
            ],
            early=[(p, p.clone()) for p in contents.by_hand],
            trained=[
                (p, p.requires_grad, _cloned(p.grad) if with_gradients else None)
                for p in contents.parameters
            ],
            groups=[
                (one, [_rates(group) for group in one.param_groups]) for one in contents.optimizers
            ],
            others={
                position: pickle.dumps(thing.state_dict())
                for position, thing in enumerate(contents.objects)
                if not isinstance(thing, (Module, Optimizer))
            },
            versions=contents.versions(),
        )

    def changed(self) -> set[int]:
        """Ids of the parameters that are not what they were, and of which there is no copy."""
        if self.late is not None:
            return set()
        now = self.contents.versions()
        if self.versions.are(now):
            return set()
        known = zip(self.contents.others, self.versions.each(), now.each(), strict=True)
        return {id(p) for p, then, version in known if then != version}

    @torch.no_grad()
    def copy_late(self, spare: Late | None) -> None:
        """Copy what optimizers change, into `spare` copies where these fit.

        Raises:
            TypeError: An optimizer keeps something else than numbers and tensors.
        """
        states = [
            (one, {p: dict(_checked(state)) for p, state in one.state.items()})
            for one, _ in self.groups
        ]
        # The parameters themselves: an objective may give them other memory (`p.data = ...`).
        live = list(self.contents.others)
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
        for parameter, copy in self.early:
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


def _parameters(modules: Sequence[Module], optimizers: Sequence[Optimizer]) -> list[Tensor]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    known = {id(p): p for group in groups for p in group["params"]}
    known |= {id(p): p for module in modules for p in module.parameters()}
    return list(known.values())


def _rates(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _cloned(value) for key, value in group.items() if key != "params"}


def _first(parameter: Tensor) -> Tensor:
    """Its first number, where it lies."""
    if not parameter.numel():
        return parameter.new_zeros(1)
    return parameter.detach().as_strided((1,), (1,))


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
    return value.clone() if isinstance(value, Tensor) else value
