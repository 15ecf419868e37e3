"""The state of a model in stages, as that of the whole: checkpoints have it whatever the stages.

Any number of stages can go on with it, as can one device, and who loads the best model. Names stay
those of the whole, whatever part of the model a parameter is in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import count
from typing import Any

import torch
from torch import nn

from optuna_fleet.exceptions import FleetConfigError

Gather = Callable[[Callable[[], dict[str, Any]]], list[dict[str, Any]]]


def part_of(model: nn.Sequential, first: int, end: int) -> nn.Sequential:
    """Layers `first` up to, without, `end`, as they are in `model`."""
    layers = list(model._modules.items())[first:end]  # `named_children` gives repeated ones once
    return nn.Sequential(OrderedDict((name, layer) for name, layer in layers if layer is not None))


def parameters_of(part: nn.Module) -> Mapping[str, nn.Parameter]:
    """Parameters that are trained."""
    return {name: p for name, p in part.named_parameters() if p.requires_grad}


class HeldModel:
    """What this rank has of a model and its optimizer: all of it until it keeps a part.

    Attributes:
        settle: Called before the state is looked at.
    """

    def __init__(self, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self._part: nn.Module | None = None
        self._is_copy = False
        self._names = list(model.state_dict())
        self._first = _first_names(model)
        self._groups: list[list[str]] = []  # names of parameters, which are numbered in order
        self._numbers: dict[int, int] = {}  # of those that are held
        self._gather: Gather = lambda _: []
        self._others: list[dict[str, Any]] = []
        self.settle: Callable[[], object] = lambda: None

    def keep(self, part: nn.Module, gather: Gather, *, is_copy: bool) -> None:
        """Keep this part only; the rest of the model has no memory from now on.

        Args:
            part: Some of the layers.
            gather: What the others give, on rank 0.
            is_copy: Another rank, that of the first virtual worker, gives it as well.
        """
        self._part, self._gather, self._is_copy = part, gather, is_copy
        self._take_groups()
        for parameter in [p for p in self.optimizer.state if id(p) not in self._numbers]:
            del self.optimizer.state[parameter]
        kept = {id(module) for module in part.modules()}
        for layer in self.model:
            if id(layer) not in kept:
                _put_elsewhere(layer)

    def heed_groups(self) -> None:
        """Look at what the optimizer was given since the last time, if anything."""
        if len(self._groups) < len(self.optimizer.param_groups):
            self._take_groups()

    def _take_groups(self) -> None:
        """Note what the optimizer was given, perhaps just now, and leave it what is held."""
        names = {id(p): name for name, p in self.model.named_parameters(remove_duplicate=False)}
        for group in self.optimizer.param_groups[len(self._groups) :]:
            numbers = count(sum(map(len, self._groups)))
            check_owned(group["params"], names)
            self._groups.append([names[id(p)] for p in group["params"]])
            self._numbers |= zip(map(id, group["params"]), numbers, strict=False)
        held = {id(parameter) for parameter in (self._part or self.model).parameters()}
        self._numbers = {key: number for key, number in self._numbers.items() if key in held}
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in held]

    def gather(self) -> None:
        """Have on rank 0 what the others hold; all must call it."""
        self.settle()
        if self._part is not None:
            self._others = self._gather(dict if self._is_copy else self._own)

    def release(self) -> None:
        """Forget what the others hold."""
        self._others = []

    def _own(self) -> dict[str, Any]:
        self._take_groups()
        state = {self._numbers[id(p)]: s for p, s in self.optimizer.state.items()}
        own = (self._part or self.model).state_dict().items()
        once = {name: tensor for name, tensor in own if self._first.get(name, name) == name}
        return {"model": once, "optimizer": state}

    def model_state(self) -> dict[str, Any]:
        """The whole model's."""
        if self._part is None:
            return self.model.state_dict()
        parts = [own["model"] for own in (self._own(), *self._others) if own]
        found = {name: tensor for part in parts for name, tensor in part.items()}
        return OrderedDict((n, found[self._first.get(n, n)]) for n in self._names)

    def load_model(self, state: dict[str, Any]) -> None:
        """Take of the whole model's what is held."""
        if self._part is None:
            self.model.load_state_dict(state)
            return
        names = self._part.state_dict()
        self._part.load_state_dict({name: state[name] for name in names})

    def optimizer_state(self) -> dict[str, Any]:
        """The whole optimizer's, as one of the whole model would have it, with its names."""
        parts = [own["optimizer"] for own in (self._own(), *self._others) if own]
        state, numbers = self.optimizer.state_dict(), count()
        return {
            **state,
            "state": {number: state for part in parts for number, state in sorted(part.items())},
            "param_groups": [
                {**group, "params": [next(numbers) for _ in names]}
                for group, names in zip(state["param_groups"], self._groups, strict=True)
            ],
            "names": self._groups,
        }

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Take of the whole optimizer's what is held; it may have been given groups since."""
        state = dict(state)
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for names in state.pop("names")[len(self.optimizer.param_groups) :]:
            self.optimizer.add_param_group({"params": [parameters[name] for name in names]})
        self._take_groups()
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        place = {self._numbers[id(parameter)]: place for place, parameter in enumerate(held)}
        self.optimizer.load_state_dict(
            {
                **state,
                "state": {place[n]: s for n, s in state["state"].items() if n in place},
                "param_groups": [
                    {**group, "params": [place[n] for n in group["params"] if n in place]}
                    for group in state["param_groups"]
                ],
            }
        )


def check_owned(parameters: Iterable[nn.Parameter], own: Container[int]) -> None:
    """Refuse to train parameters of which it is not known where they are.

    Raises:
        FleetConfigError: There are such: their identities are not among the model's.
    """
    if others := sum(id(parameter) not in own for parameter in parameters):
        raise FleetConfigError(
            f"The optimizer has {others} parameters that are not the model's: make them part of "
            "one of its layers."
        )


# Of a tensor, whatever is in it; a property is got by `__get__`.
_OF_NO_VALUES = {
    *("__get__", "__set__", "__len__", "__repr__", "requires_grad_", "is_floating_point"),
    *("numel", "nelement", "element_size", "size", "dim", "stride", "is_complex"),
}
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class _Elsewhere(nn.Parameter):
    """A parameter of a layer that other ranks have: torch would pass over it without a word."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name not in _OF_NO_VALUES or function == _DATA:
            raise FleetConfigError(
                f"`{name}` was called with a parameter of a layer that is on another rank: in a "
                "pipeline each rank has its own stage's alone (of others `is_meta` is true), so "
                "averages, norms and penalties over the whole model can't be made by hand."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def _put_elsewhere(layer: nn.Module) -> None:
    """Free its memory."""
    for module in layer.to("meta").modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _Elsewhere(parameter, parameter.requires_grad)


def _first_names(model: nn.Module) -> dict[str, str]:
    """Of parameters that have several names, the first one by each."""
    firsts = {id(parameter): name for name, parameter in model.named_parameters()}
    names = model.named_parameters(remove_duplicate=False)
    return {name: firsts[id(p)] for name, p in names if firsts[id(p)] != name}


class WholeModel:
    """The model among what a trial has prepared."""

    def __init__(self, holding: HeldModel) -> None:
        self.state_dict = holding.model_state
        self.load_state_dict = holding.load_model


class WholeOptimizer:
    """The optimizer among what a trial has prepared."""

    def __init__(self, holding: HeldModel) -> None:
        self._optimizer = holding.optimizer
        self.state_dict = holding.optimizer_state
        self.load_state_dict = holding.load_optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As an optimizer has them."""
        return self._optimizer.param_groups
