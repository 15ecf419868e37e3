"""Tells of what changes from epoch to epoch, or from batch to batch, but is in no checkpoint.

A trial that moves runs its objective again from the first line: such things begin anew there, and
nothing else would say so.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import (
    BuiltinMethodType,
    CellType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from optuna_fleet.trainer.parts import Parts
from optuna_fleet.trainer.unsaved.carried import Variables, carried, marks_in
from optuna_fleet.trainer.unsaved.loops import Loop, looping_frame, users_frames, variables_of

_NUM_EPOCHS = 2
_DEPTH = 6
_MANY = 1000
_NUMBERS: frozenset[type] = frozenset({bool, int, float, NoneType})
_MOST_TENSORS = 64
_CLOSED = (type, ModuleType, torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
_OPEN = (dict, list, tuple, set, MethodType, BuiltinMethodType, CellType, functools.partial)
_FOR_BATCHES = "trial.totals or trial.state, or read without movable=True"
_FOR_EPOCHS = "trial.state, or use trial.best_value and trial.should_stop(patience=...)"
_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a `class` statement


@dataclass(frozen=True, slots=True)
class _Seen:
    """What there was when an epoch began."""

    variables: Variables | None
    contents: dict[int, str]
    numbers: dict[str, Any]


class LeftBehind:
    """Looks at the first two epochs of a loop, and at the first batches of a movable one."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._objects = parts.objects if parts.run.rank == 0 else []  # others hold the same
        self._first: _Seen | None = None
        self._begun: _Seen | None = None
        self._num_epochs = 0
        self._batches: list[Variables] = []  # before each of the first ones
        self._told: set[str] = set()

    def begin_epoch(self, frame: FrameType) -> None:
        """An epoch begins; `frame` has asked for it."""
        if len(self._batches) <= _NUM_EPOCHS:  # a variable may change from epoch to epoch
            self._batches.clear()
        if self._num_epochs == _NUM_EPOCHS or not self._modules():
            return
        with contextlib.suppress(Exception):  # whatever an objective's objects are like
            loop = looping_frame(frame)
            things = self._trainable(self._things(frame))
            contents = {id(thing): _content(tensors) for thing, _, tensors in things}
            numbers = _numbers_in(self._modules())
            self._begun = _Seen(Variables.of(loop) if loop else None, contents, numbers)
            if not self._num_epochs:
                self._first = self._begun

    def end_epoch(self, frame: FrameType) -> None:
        """The epoch has ended; `frame` asks for the next one."""
        begun, self._begun = self._begun, None
        if begun is None or self._first is None:
            return
        self._num_epochs += 1
        with contextlib.suppress(Exception):
            loop, first, second = looping_frame(frame), self._first.variables, begun.variables
            if loop is not None and first is not None and second is not None:
                self._tell_of_variables(loop, first, second, "epoch", _FOR_EPOCHS)
        with contextlib.suppress(Exception):
            self._tell_of_objects(frame, self._first, begun)
        with contextlib.suppress(Exception):
            self._tell_of_numbers(self._first.numbers, begun.numbers)

    def begin_batch(self, frame: FrameType) -> None:
        """A pass that may be left in its midst begins its next batch; `frame` has asked for it."""
        if len(self._batches) > _NUM_EPOCHS or not self._modules():
            return
        with contextlib.suppress(Exception):
            loop = looping_frame(frame)
            if loop is None:
                return
            if len(self._batches) == _NUM_EPOCHS:
                others = ["what `enumerate` counts"] if Loop(loop).enumerates else []
                first, second = self._batches
                self._tell_of_variables(loop, first, second, "batch", _FOR_BATCHES, others)
            self._batches.append(Variables.of(loop))

    def _tell_of_variables(
        self,
        loop: FrameType,
        first: Variables,
        begun: Variables,
        each: str,
        keep_in: str,
        others: Sequence[str] = (),
    ) -> None:
        names = [f"`{name}`" for name in carried(loop, first, begun, marks_in(self._kept()))]
        place = _place_of(loop)
        self._tell(
            f"Local variables that change from {each} to {each} begin",
            {name: f"{name} {place}" for name in [*names, *others]},
            f" ({place}). Keep them in {keep_in}.",
        )

    def _tell_of_objects(self, frame: FrameType, first: _Seen, begun: _Seen) -> None:
        def has_changed(key: int, tensors: Mapping[str, torch.Tensor]) -> bool:
            is_old = key in first.contents and key in begun.contents
            return is_old and begun.contents[key] != _content(tensors)

        words = {thing for thing in self._kept() if type(thing) is str}
        things = self._things(frame)
        names = [name for thing, name in things if self._restarts(thing, words)]
        names += [
            name
            for thing, name, tensors in self._trainable(things)
            if not words & tensors.keys()
            and (issubclass(type(thing), AveragedModel) or has_changed(id(thing), tensors))
        ]
        self._tell(
            "What changes from epoch to epoch but was not given to trial.prepare() begins",
            {name: name for name in names},
            ". Prepare it together with the model, or keep what it holds in trial.state.",
        )

    def _tell_of_numbers(self, first: Mapping[str, Any], begun: Mapping[str, Any]) -> None:
        now, words = _numbers_in(self._modules()), {t for t in self._kept() if type(t) is str}
        names = [
            name
            for name, number in now.items()
            if name in first
            and name in begun
            and name.split("`")[1] not in words
            and number != begun[name] != first[name]  # what was set once is no matter
        ]
        self._tell(
            "Numbers in prepared modules that change from epoch to epoch begin",
            {name: name for name in names},
            ". Make them buffers (`register_buffer`), or keep them in trial.state.",
        )

    def _tell(self, what: str, keys: Mapping[str, str], end: str) -> None:
        names = [name for name, key in keys.items() if key not in self._told]
        self._told.update(keys.values())
        if names:
            self._parts.session.remark(
                [keys[name] for name in names],
                f"{what} anew when the trial moves to other devices or is resumed: "
                f"{', '.join(names)}{end}",
            )

    # -- what there is ----------------------------------------------------------------------------

    def _modules(self) -> list[torch.nn.Module]:
        return [thing for thing in self._objects if isinstance(thing, torch.nn.Module)]

    def _kept(self) -> list[Any]:
        return [thing for thing, _ in _reachable({"": self._parts.state}).values()]

    def _things(self, frame: FrameType) -> list[tuple[Any, str]]:
        """What the variables of the user's functions lead to, but for what is checkpointed."""
        variables: dict[str, Any] = {}
        for each in users_frames(frame):
            variables = variables_of(each) | variables
        theirs = [getattr(thing, "kept", ()) for thing in self._objects]  # of integrations
        kept = _reachable({"objects": [*self._objects, *theirs], "state": self._parts.state})
        found = _reachable(variables, without=_NUMBERS)
        return [
            (thing, f"`{name}` ({type(variables[name]).__name__})")
            for key, (thing, name) in found.items()
            if key not in kept
        ]

    def _restarts(self, thing: Any, words: set[Any]) -> bool:
        """Whether it is a scheduler of a prepared optimizer or a gradient scaler, and in use."""
        own = _attributes(thing)
        if issubclass(type(thing), torch.amp.GradScaler):
            return own.get("_scale") is not None and "growth_factor" not in words
        return (
            any(own.get("optimizer") is known for known in self._objects)
            and {"step", "state_dict"}
            <= {name for base in type(thing).__mro__ for name in vars(base)}
            and own.get("last_epoch") != 0
            and "last_epoch" not in words
        )

    def _trainable(
        self, things: Iterable[tuple[Any, str]]
    ) -> Iterator[tuple[Any, str, dict[str, torch.Tensor]]]:
        """Modules, and copies of a prepared module's weights, with what nobody else looks at."""
        prepared = [[*m.parameters(), *m.buffers()] for m in self._modules()]
        shapes = [_shapes(tensors) for tensors in prepared]
        shapes += [_shapes(module.parameters()) for module in self._modules()]
        shapes += [_shapes(t for t in tensors if t.requires_grad) for tensors in prepared]
        known = {tensor.data_ptr() for tensors in prepared for tensor in tensors}
        # What other optimizers train is told of already (`Steps`).
        groups = [group for o in self._parts.steps.optimizers for group in o.param_groups]
        trained = {p.data_ptr() for group in groups for p in group["params"]}
        for thing, name in things:
            tensors = _tensors(thing)
            is_module = issubclass(type(thing), torch.nn.Module)
            if not is_module and (len(tensors) < 2 or _shapes(tensors.values()) not in shapes):
                continue
            places = {key: tensor.data_ptr() for key, tensor in tensors.items()}
            own = {key: tensors[key] for key, place in places.items() if place not in known}
            if own and not trained & {places[key] for key in own}:
                yield thing, name, own


def _place_of(loop: FrameType) -> str:
    return f"in {loop.f_code.co_name}, {Path(loop.f_code.co_filename).name}:{loop.f_lineno}"


def _tensors(thing: Any) -> dict[str, torch.Tensor]:
    kind = type(thing)
    if issubclass(kind, torch.nn.Module):
        is_reset = any("reset" in vars(base) for base in kind.__mro__)  # a metric, say
        return {} if is_reset else dict([*thing.named_parameters(), *thing.named_buffers()])
    if kind in (dict, OrderedDict):
        items = dict(thing)
    elif kind in (list, tuple):
        items = dict(enumerate(thing))
    else:
        return {}
    are_tensors = all(type(item) in (torch.Tensor, torch.nn.Parameter) for item in items.values())
    return {str(key): item for key, item in items.items()} if are_tensors else {}


def _numbers_in(modules: Iterable[torch.nn.Module]) -> dict[str, Any]:
    """Those that the user's classes have in attributes, unless they save or reset these."""
    return {
        f"`{name}` ({type(part).__name__})": value
        for module in modules
        for part in module.modules()
        if not type(part).__module__.startswith(("torch.", "optuna_fleet."))
        and type(part).get_extra_state is torch.nn.Module.get_extra_state
        and not any("reset" in vars(base) for base in type(part).__mro__)
        for name, value in vars(part).items()
        if type(value) in (int, float) and not name.startswith("_")
    }


def _shapes(tensors: Iterable[torch.Tensor]) -> list[tuple[int, ...]]:
    return sorted(tuple(tensor.shape) for tensor in tensors)


def _content(tensors: Mapping[str, torch.Tensor]) -> str:
    """A number of each tensor: counters of versions do not see what is done to `tensor.data`."""
    some = islice(tensors.values(), 0, None, len(tensors) // _MOST_TENSORS + 1)
    return str([t.detach()[tuple(n // 2 for n in t.shape)].item() for t in some if t.numel()])


def _attributes(thing: Any) -> dict[str, Any]:
    """Those that an object itself has, none of which is computed."""
    try:
        return object.__getattribute__(thing, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return {}


def _reachable(
    variables: Mapping[str, Any], without: Collection[type] = ()
) -> dict[int, tuple[Any, str]]:
    """Return by `id` what `variables` lead to, and from which; none of its code is run."""
    found: dict[int, tuple[Any, str]] = {}
    level = [(value, name) for name, value in variables.items()]
    for _ in range(_DEPTH):
        fresh: dict[int, tuple[Any, str]] = {}
        for pair in level:
            if id(pair[0]) not in found:
                fresh.setdefault(id(pair[0]), pair)
        found |= fresh
        parts = ((part, name) for thing, name in fresh.values() for part in _parts(thing))
        level = list(islice((p for p in parts if type(p[0]) not in without), 10 * _MANY))
    return found


def _parts(thing: Any) -> Collection[Any]:
    kind = type(thing)
    if issubclass(kind, FunctionType):
        return thing.__closure__ or ()
    is_open = issubclass(kind, _OPEN) or kind.__flags__ & _CLASS
    if not is_open or issubclass(kind, _CLOSED) or kind.__module__.startswith("optuna"):
        return ()
    if issubclass(kind, (dict, list, tuple, set)) and len(thing) > _MANY:
        return ()
    if issubclass(kind, dict):  # of which referents may be the values only
        return [*dict.keys(thing), *dict.values(thing)]
    return gc.get_referents(thing)
