"""Notes, in a rehearsal, all that a result can depend on."""

from __future__ import annotations

import contextlib
import dis
import hashlib
import inspect
import math
import traceback
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from optuna_fleet.preflight.rehearsals import Rehearsed, Sketch, Value
from optuna_fleet.preflight.verdict import BEGIN, END, Key
from optuna_fleet.trainer.heartbeat import PACKAGE, is_users

_MOST_STEPS = 4  # of a mini-epoch, whose gradients are kept
_MOST_NUMBERS = 1024
_MOST_ITEMS = 50
_DEPTH = 5
_LEAVES = (Tensor, np.ndarray, np.generic, bool, int, float, complex, str, type(None))
_MODULES_OWN = frozenset(vars(nn.Module())) - {"training"}
_NOT_LOOKED_INTO = (  # what only shows or carries things
    *("optuna", "logging", "threading", "queue", "torch.utils", "torch._", "builtins"),
    *("tqdm", "rich", "tensorboard", "wandb", "mlflow", "neptune", "comet", "clearml", "aim"),
    *("lightning", "pytorch_lightning"),  # whose Trainer goes along with what is prepared
)
_OURS = "optuna_fleet.integrations"
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_PREPARED = "prepared"  # as a kind: that of each part

Leaves = Iterator[tuple[str, str, Any]]


class Recorder:
    """Notes what optimizers, and ends of mini-epochs, find."""

    def __init__(self, notes: Rehearsed) -> None:
        self._notes = notes
        self._words: dict[int, str] = {}  # of what was prepared, and its parameters
        register_optimizer_step_post_hook(self._after_step)

    def begin_epoch(self, objects: Sequence[Any], loop: int, epoch: int) -> None:
        """A mini-epoch begins; perhaps once more, to go on in its midst."""
        if self._notes.place != (loop, epoch):
            self._notes.place, self._notes.step = (loop, epoch), 0
            self._notes.num_epochs += 1
        self._name(objects)
        if epoch == 0:
            self._note_variables(set(map(id, objects)), BEGIN)

    def end_epoch(
        self, objects: Sequence[Any], state: Mapping[str, Any], totals: Mapping[str, Any]
    ) -> None:
        """A mini-epoch is over: note what there is."""
        self._name(objects)
        for thing in objects:
            self._note(_PREPARED, self._words[id(thing)], thing)
        for kind, content in (("trial.state", state), ("total", totals)):
            for key, value in content.items():
                self._note(kind, key, value)
        kept = (value for value in state.values() if not isinstance(value, _LEAVES[3:]))
        self._note_variables({*map(id, objects), id(state), *map(id, kept)}, END)

    def reported(self, value: float, step: int) -> None:
        """A value was reported."""
        self._note("reported value", f"of step {step}", value)

    def _name(self, objects: Sequence[Any]) -> None:
        words = {id(value): name for name, value in _variables()}
        self._words = {}
        for place, thing in enumerate(objects):
            name = words.get(id(thing), f"{type(thing).__name__} ({place})")
            self._words[id(thing)] = name
            if isinstance(thing, nn.Module):
                for own, parameter in thing.named_parameters():
                    self._words.setdefault(id(parameter), f"{name}.{own}")

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._notes.num_steps += 1
        self._notes.step += 1
        if self._notes.step > _MOST_STEPS or isinstance(optimizer, LBFGS):  # of its last try
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for place, parameter in enumerate(parameters):
            default = f"{type(optimizer).__name__}, parameter {place}"
            name = self._words.get(id(parameter), default)
            self._note("gradient", name, parameter.grad, self._notes.step)

    def _note_variables(self, known: set[int], moment: int) -> None:
        for name, value in _variables():
            if id(value) not in known:
                self._note("variable", name, value, moment, known)

    def _note(
        self, kind: str, name: str, value: Any, moment: int = END, known: set[int] | None = None
    ) -> None:
        for *what, leaf in self._leaves(kind, f"{name}", value, set(known or ()), 0):
            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                self._notes.record[Key(*self._notes.place, moment, *what)] = _kept(leaf)

    def _leaves(self, kind: str, name: str, value: Any, met: set[int], depth: int) -> Leaves:
        """Yield the numbers, texts and tensors in a value, by how the user would write them."""
        if isinstance(value, _LEAVES):
            if not isinstance(value, str) or " " not in value:  # a sentence is for people
                yield kind, name, value
        elif id(value) not in met and depth < _DEPTH:
            met.add(id(value))
            for own, part, item in self._parts(kind, name, value, met):
                yield from self._leaves(
                    own if kind == _PREPARED else kind, part, item, met, depth + 1
                )

    def _parts(self, kind: str, name: str, value: Any, met: set[int]) -> Leaves:
        if isinstance(value, nn.Module):
            yield from (("parameter", f"{name}.{n}", own) for n, own in value.named_parameters())
            yield from (("buffer", f"{name}.{n}", own) for n, own in value.named_buffers())
            yield from _attributes(name, value, met)
        elif isinstance(value, Optimizer):
            yield from self._parts_of_optimizer(name, value)
        elif isinstance(value, list | tuple | deque | set | frozenset | Mapping):
            yield kind, f"len({name})", len(value)
            for key, item in _items(value):
                yield kind, f"{name}[{key!r}]", item
        elif kind == _PREPARED and type(value).__module__.startswith(_OURS):
            return  # of theirs that of rank 0 counts
        elif kind == _PREPARED:
            with contextlib.suppress(Exception):
                yield "state of the object", name, value.state_dict()
        elif _is_looked_into(value):
            yield from ((kind, f"{name}.{key}", item) for key, item in [*vars(value).items()])

    def _parts_of_optimizer(self, name: str, optimizer: Optimizer) -> Leaves:
        for number, group in enumerate(optimizer.param_groups):
            of = f"{name} group {number}" if number else name
            yield "learning rate", of, group.get("lr")
            for key, value in group.items():
                if key not in ("params", "lr"):
                    yield "optimizer state", f"{of}.{key}", value
        for parameter, state in [*optimizer.state.items()]:
            for key, value in state.items() if isinstance(state, Mapping) else ():
                of = self._words.get(id(parameter), "?")
                yield "optimizer state", f"{name}.{key} of {of}", value


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        items = [*value.items()][:_MOST_ITEMS]
        return [(key, item) for key, item in items if not isinstance(key, Tensor)]
    return [] if isinstance(value, set | frozenset) else [*enumerate([*value][-_MOST_ITEMS:])]


def _attributes(name: str, module: nn.Module, met: set[int]) -> Leaves:
    """Yield what a module has beside parameters and buffers."""
    for path, part in module.named_modules():
        met.add(id(part))
        for key, value in [*vars(part).items()]:
            if key not in _MODULES_OWN:
                yield "variable", ".".join(filter(None, (name, path, key))), value


def _is_looked_into(value: Any) -> bool:
    plain = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.Generator)
    is_known = type(value).__module__.startswith(_NOT_LOOKED_INTO) or isinstance(value, plain)
    return hasattr(value, "__dict__") and not is_known


def _variables() -> Iterator[tuple[str, Any]]:
    """Yield what the functions of the user's have that lead here, from the outermost inwards."""
    for frame in _users_frames():
        names, known = frame.f_code.co_names, frame.f_globals
        yield from ((name, known[name]) for name in names if name in known)
        yield from dict(frame.f_locals).items()


@torch.no_grad()
def _kept(value: Any) -> Value:
    """A text, or numbers in few, which tell others from them."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, Tensor):
        value = torch.from_numpy(np.array(value))
    tensor = value.detach().to_dense().cpu()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    numbers = tensor.to(torch.float64).flatten().numpy()
    digest = hashlib.blake2b(f"{value.dtype}{tuple(value.shape)}".encode(), digest_size=16)
    digest.update(numbers.tobytes())
    largest = float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))
    return Sketch(digest.digest(), tuple(value.shape), _few(numbers), largest)


def _few(numbers: Any) -> Any:
    """Sums of parts, with random signs: what differs by sums of zero still differs."""
    size = numbers.size
    if size <= _MOST_NUMBERS:
        return numbers.copy()
    each = math.ceil(size / _MOST_NUMBERS)
    signs = np.random.Generator(np.random.PCG64(size)).integers(0, 2, size, dtype=np.int8) * 2 - 1
    return np.add.reduceat(numbers * signs, np.arange(0, size, each)) / math.sqrt(each)


# -- frames of the user's -------------------------------------------------------------------------


def _users_frames() -> list[types.FrameType]:
    """Return the objective's, and those of the functions of the user's in it, outermost first."""
    found: list[types.FrameType] = []
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        path = frame.f_code.co_filename
        if is_users(path) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            found.append(frame)
        elif found and path.startswith(PACKAGE):
            break
    return found[::-1]


def is_last_loop() -> bool:
    """Whether none can follow, by the names in what is left to do; called at a loop's end.

    Then the objective is left, as what follows would be done for nothing: a model saved, say.
    """
    sought = {"epochs", "steps"}
    for frame in reversed(_users_frames()):
        here, code = frame.f_lasti, list(dis.get_instructions(frame.f_code))
        jumps = [one.argval for one in code if one.offset > here and one.opcode in _JUMPS]
        begin = min([here + 1, *jumps])  # of an outer loop, whose end jumps there
        if any(one.argval in sought for one in code if here != one.offset >= begin):
            return False
        sought.add(frame.f_code.co_name)
    return True
