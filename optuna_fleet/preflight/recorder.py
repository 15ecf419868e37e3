"""Notes, in a rehearsal, all that a result can depend on."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import traceback
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from optuna_fleet.preflight.records import BEGIN, END, Key, Record, Sketch, Value
from optuna_fleet.trainer.frames import users_frames, variables_of

_MOST_STEPS = 4  # of a mini-epoch, whose gradients are kept
_MOST_NUMBERS = 1024
_MOST_ITEMS = 50
_DEPTH = 4
_SCALARS = (bool, int, float, complex, str, type(None))
_MODULES_OWN = frozenset(vars(nn.Module())) - {"training"}
_NOT_LOOKED_INTO = ("optuna", "logging", "threading", "torch.utils.data", "torch._", "builtins")

Named = Iterator[tuple[str, Any]]


@dataclass(slots=True)
class Notes:
    """What one rank notes, and how far it is; goes on over moves.

    Attributes:
        record: What there was.
        params: Suggested so far.
        user_attrs: Set so far.
        sizes: Of the batches that were read.
        num_steps: Of optimizers, in all.
        num_epochs: Mini-epochs begun.
        num_passes: Over batches.
        num_moves: How often it was moved.
        place: Loop and mini-epoch.
        step: The optimizers', in that.
        moved_within: The mini-epoch in whose midst it was last to be moved.
        refused: Why it could not be moved.
        is_rough: There are numbers of less precision than float32.
    """

    record: Record = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    user_attrs: dict[str, Any] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)
    num_steps: int = 0
    num_epochs: int = 0
    num_passes: int = 0
    num_moves: int = 0
    place: tuple[int, int] = (0, 0)
    step: int = 0
    moved_within: tuple[int, int] = (0, 0)
    refused: str = ""
    is_rough: bool = False


class Recorder:
    """Notes what optimizers, and ends of mini-epochs, find."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._objects: Sequence[Any] = ()
        self._names: dict[int, str] = {}
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def begin_epoch(self, objects: Sequence[Any], loop: int, epoch: int) -> None:
        """A mini-epoch begins; perhaps once more, to go on in its midst."""
        if self._notes.place != (loop, epoch):
            self._notes.place, self._notes.step = (loop, epoch), 0
            self._notes.num_epochs += 1
        self._name(objects)
        if epoch == 0:
            self._note_variables({id(thing) for thing in objects}, moment=BEGIN)

    def _name(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        words = {id(value): name for name, value in _variables()}
        self._names = {
            id(thing): words.get(id(thing), f"{type(thing).__name__} ({i})")
            for i, thing in enumerate(objects)
        }

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._notes.num_steps += 1
        self._notes.step += 1
        if not _has_closure(args, kwargs):
            self._note_gradients(optimizer)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs) and not isinstance(optimizer, torch.optim.LBFGS):
            self._note_gradients(optimizer)

    def _note_gradients(self, optimizer: Any) -> None:
        if self._notes.step > _MOST_STEPS:
            return
        names = self._parameters()
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    default = f"{type(optimizer).__name__}.param_groups[{number}][{place}]"
                    name = names.get(id(parameter), default)
                    self._note("gradient", name, parameter.grad, self._notes.step)

    def _parameters(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for thing in self._objects:
            if isinstance(thing, nn.Module):
                for name, parameter in thing.named_parameters():
                    found.setdefault(id(parameter), f"{self._names[id(thing)]}.{name}")
        return found

    def end_epoch(
        self, objects: Sequence[Any], state: Mapping[str, Any], totals: Mapping[str, Any]
    ) -> None:
        """A mini-epoch is over: note what there is."""
        self._name(objects)
        names = self._parameters()
        for thing in objects:
            for kind, name, value in _prepared(thing, self._names[id(thing)], names):
                self._note(kind, name, value)
        for kind, content in (("trial.state", state), ("total", totals)):
            for key, value in content.items():
                for name, leaf in _flattened(f"{key}", value, 0, set()):
                    self._note(kind, name, leaf)
        known = {id(thing) for thing in objects} | {id(state)}
        kept = {id(value) for value in state.values() if not isinstance(value, _SCALARS)}
        self._note_variables(known | kept)

    def _note_variables(self, known: set[int], moment: int = END) -> None:
        for root, value in _variables():
            if id(value) not in known:
                for name, leaf in _flattened(root, value, 0, set(known)):
                    self._note("variable", name, leaf, moment)

    def reported(self, value: float, step: int) -> None:
        """A value was reported."""
        self._note("reported value", f"of step {step}", value)

    def _note(self, kind: str, name: str, value: Any, moment: int = END) -> None:
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
            self._notes.record[Key(*self._notes.place, moment, kind, name)] = _kept(value)
            if kind == "gradient" and value.dtype in (torch.float16, torch.bfloat16):
                self._notes.is_rough = True


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether a step computes gradients by itself."""
    return any(map(callable, (*args[1:], *kwargs.values())))


def _kept(value: Any) -> Value:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        value = value.item()
    return sketched(value) if isinstance(value, Tensor) else value


@torch.no_grad()
def sketched(tensor: Tensor) -> Sketch:
    """A tensor in few numbers, which tell another one from it."""
    tensor = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    tensor = tensor.cpu().resolve_conj().contiguous()
    flat = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor.reshape(-1)
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    digest.update(flat.view(torch.uint8).numpy().tobytes())
    numbers = flat.to(torch.float64).numpy()
    finite = numbers[np.isfinite(numbers)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    if numbers.size > _MOST_NUMBERS:
        numbers = _projected(numbers)
    return Sketch(digest.digest(), tuple(tensor.shape), numbers.copy(), largest)


def _projected(numbers: Any) -> Any:
    """Sums of parts, with random signs: what differs by sums of zero still differs."""
    each = math.ceil(numbers.size / _MOST_NUMBERS)
    signed = np.zeros(each * _MOST_NUMBERS)
    signed[: numbers.size] = numbers * _signs(numbers.size)
    return signed.reshape(_MOST_NUMBERS, each).sum(1) / math.sqrt(each)


@cache
def _signs(size: int) -> Any:
    drawn = np.random.Generator(np.random.PCG64(size)).integers(0, 2, size, dtype=np.int8)
    return drawn * 2 - 1


def _prepared(
    thing: Any, root: str, parameters: Mapping[int, str]
) -> Iterator[tuple[str, str, Any]]:
    if isinstance(thing, nn.Module):
        yield from (("parameter", f"{root}.{n}", value) for n, value in thing.named_parameters())
        yield from (("buffer", f"{root}.{name}", value) for name, value in thing.named_buffers())
        yield from (("variable", name, value) for name, value in _attributes(thing, root, set()))
    elif isinstance(thing, torch.optim.Optimizer):
        for number, group in enumerate(thing.param_groups):
            for key, value in group.items():
                if key != "params" and isinstance(value, (*_SCALARS, Tensor)):
                    kind = "learning rate" if key == "lr" else "optimizer state"
                    name = root if key == "lr" else f"{root}.{key}"
                    yield kind, f"{name}{f' group {number}' if number else ''}", value
        for parameter, own in list(thing.state.items()):
            named = parameters.get(id(parameter), "?")
            for name, value in _flattened("", own, 0, set()):
                yield "optimizer state", f"{root}{name} of {named}", value
    else:
        with contextlib.suppress(Exception):
            for name, value in _flattened(root, thing.state_dict(), 0, set()):
                yield "state of the object", name, value


def _variables() -> Named:
    """Yield what the functions of the user's have that lead here, from the outermost inwards."""
    for frame in users_frames(f for f, _ in traceback.walk_stack(inspect.currentframe())):
        yield from variables_of(frame).items()


def _flattened(name: str, value: Any, depth: int, met: set[int]) -> Named:
    """Yield the numbers, texts and tensors in a value, by how the user would write them."""
    if isinstance(value, str):
        if " " not in value:  # a sentence is for people
            yield name, value
    elif isinstance(value, (*_SCALARS, Tensor, np.generic)):
        yield name, value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            yield name, value
    elif id(value) not in met and depth < _DEPTH:
        met.add(id(value))
        yield from _parts(name, value, depth + 1, met)


def _parts(name: str, value: Any, depth: int, met: set[int]) -> Named:
    if isinstance(value, list | tuple | deque | set | frozenset):
        yield f"len({name})", len(value)
        items = list(value)[-_MOST_ITEMS:] if not isinstance(value, set | frozenset) else ()
        for place, item in enumerate(items):
            yield from _flattened(f"{name}[{place}]", item, depth, met)
    elif isinstance(value, Mapping):
        yield f"len({name})", len(value)
        for key, item in list(value.items())[:_MOST_ITEMS]:
            if not isinstance(key, Tensor):
                yield from _flattened(f"{name}[{key!r}]", item, depth, met)
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{n}", tensor) for n, tensor in value.named_parameters())
        yield from ((f"{name}.{n}", tensor) for n, tensor in value.named_buffers())
        yield from _attributes(value, name, met)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _flattened(name, value.state_dict(), depth, met)
    elif _is_looked_into(value):
        for key, item in list(vars(value).items()):
            yield from _flattened(f"{name}.{key}", item, depth, met)


def _attributes(module: nn.Module, root: str, met: set[int]) -> Named:
    """Yield what a module has beside parameters and buffers."""
    for path, part in module.named_modules():
        met.add(id(part))
        for key, value in list(vars(part).items()):
            if key not in _MODULES_OWN:
                name = ".".join(filter(None, (root, path, key)))
                yield from _flattened(name, value, 2, met)


def _is_looked_into(value: Any) -> bool:
    kind = type(value)
    plain = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.Generator)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, plain)
        and not kind.__module__.startswith(_NOT_LOOKED_INTO)
    )
