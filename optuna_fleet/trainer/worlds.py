"""What the code between a model's outputs and its loss would compute on parts of the batch.

While the objective computes on the whole batch, its operations are repeated in three *worlds*: on
the whole batch again, and on each of its two parts. Tensors and numbers that depend on the batch
have a counterpart in each. Prepared modules are not repeated: their outputs are cut into the rows
of each part, as they come out of a model that treats samples one by one and whose BatchNorm is
synchronised. Worlds compute in float64, on copies: nothing of the objective's is changed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils import _pytree as pytree

from optuna_fleet.trainer.randomness import (
    are_alike,
    generators_now,
    own_randomness,
    set_generators,
)
from optuna_fleet.trainer.tracked import Tracked, conversions, in_world, plain, tracked

WORLDS = range(3)
"""The whole batch, its first part, its second part."""

Counterparts = tuple[Any, Any, Any]

_logger = logging.getLogger(__name__)

_MOST_NUMBERS = 2**25  # of an output or a model: three copies of 256 MB in float64

_PRECISIONS = ("float", "half", "bfloat16", "double")
_DRAWS = ("rand", "randn", "randint", "randperm", "bernoulli", "normal")
_ESCAPES = ("__len__", "__float__", "__int__", "__index__")
_TAKE_ESCAPED = {
    *("arange", "zeros", "ones", "full", "eye"),
    *("div", "mul", "truediv", "rtruediv", "true_divide", "rdiv", "rmul"),
}
"""Where a plain number that ``len`` or ``float`` gave is most likely what it is equal to."""


class CannotFollowError(Exception):
    """It can't be told what a part of the batch would give."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A tensor of the objective's, as leaves of the graphs of the worlds.

    Attributes:
        leaves: It in each world.
        rows: Which rows of the whole are in the two parts.
        axis: The dimension that these rows are along.
    """

    leaves: Counterparts
    rows: tuple[Tensor, Tensor]
    axis: int


class Worlds(TorchFunctionMode):
    """Follows what is computed while it is active, of batches of one size.

    Args:
        on_backward: Called with the loss' counterparts when ``loss.backward()`` is.

    Attributes:
        sizes: Samples of the batch in each world.
        cuts: Outputs of modules, and what was drawn at random.
        called: Copies of modules that were called in each world, in eval mode: their outputs have
            no rows to cut.
        is_guessed: A plain number was taken for one that depends on the batch.
        is_over: Something could not be followed, or nobody wants more to be.
    """

    def __init__(self, on_backward: Callable[[Counterparts], None]) -> None:
        super().__init__()
        self.sizes = (0, 0, 0)
        self.cuts: list[Cut] = []
        self.called: list[torch.nn.Module] = []
        self.is_guessed = False
        self.is_over = False
        self._on_backward = on_backward
        # By the id of what it is a counterpart of, which is kept, as ids of the dead come again.
        self._known: dict[int, tuple[Tensor, Counterparts]] = {}
        self._escaped: dict[float, Counterparts] = {}
        self._depth = 0
        self._is_inside = False  # a prepared module: it is not followed
        self._is_on_stack = False
        self._was_on_stack = False

    def start(self) -> None:
        """Begin to follow this thread, unless another mode might end before this one."""
        conversions.clear()
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        if [mode for mode in stack if mode is not default]:
            self.is_over = True
            return
        _push_mode(self)  # type: ignore[no-untyped-call]
        self._is_on_stack = True

    def stop(self) -> bool:
        """Follow nothing any more; returns whether it is gone from its thread, else call again."""
        self._give_up()
        return not self._is_on_stack or self._leave_stack()

    def _give_up(self) -> None:
        self.is_over = True
        self._known.clear()  # memory that the objective may need
        self.cuts.clear()
        self.called.clear()

    def _leave_stack(self) -> bool:
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not (stack and stack[-1] is self):
            return False
        _pop_mode()  # type: ignore[no-untyped-call]
        self._is_on_stack = False
        return True

    def add_batch(self, data: Any, size: int) -> None:
        """The objective is about to get a batch of so many samples."""
        if self.sizes[0] not in (0, size):
            self._give_up()
        if self.is_over:
            return
        first = -(-2 * size // 5)
        self.sizes = (size, first, size - first)
        for tensor in pytree.tree_leaves(data):
            if isinstance(tensor, Tensor) and tensor.dim() and len(tensor) == size:
                self.know(tensor, (_exact(tensor), _exact(tensor[:first]), _exact(tensor[first:])))

    def know(self, tensor: Tensor, counterparts: Counterparts) -> None:
        """From now on a tensor of the objective's is this in the worlds."""
        self._known[id(tensor)] = tensor, counterparts

    def counterparts(self, value: Any) -> Counterparts | None:
        """What a tensor or number is in each world; None if it does not depend on the batch."""
        if isinstance(value, Tensor):
            known = self._known.get(id(value))
            return None if known is None else known[1]
        return value.in_worlds if isinstance(value, Tracked) else None

    # -- functions --------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        plain_args, plain_kwargs = pytree.tree_map(plain, (args, kwargs))
        name = getattr(func, "__name__", "")
        is_traced = torch.compiler.is_compiling()
        if is_traced or self.is_over or self._is_inside or not self._follows(name, args, kwargs):
            return func(*plain_args, **plain_kwargs)
        if name == "backward":
            if len(args) > 1 or kwargs.get("gradient") is not None:
                self._give_up()  # of more than one number
            elif (losses := self.counterparts(args[0])) is not None:
                self._tried(self._on_backward, losses)
            return func(*plain_args, **plain_kwargs)
        before = generators_now()
        result = func(*plain_args, **plain_kwargs)
        if not are_alike(before, generators_now()):
            self._tried(self._draw, name, result)
            return result
        return self._tried(self._repeat, func, name, args, kwargs, result, default=result)

    def _follows(self, name: str, args: Any, kwargs: Any) -> bool:
        leaves = pytree.tree_leaves((args, kwargs))
        if name in _DRAWS or any(self.counterparts(leaf) is not None for leaf in leaves):
            return True
        return name in _TAKE_ESCAPED and any(
            type(x) is int and x and self._escaped_in(x, 1) != x for x in leaves
        )

    def _tried(self, function: Callable[..., Any], *args: Any, default: Any = None) -> Any:
        """What can't be followed is none of the objective's business."""
        before = generators_now()
        try:
            # Hooks of the objective's (of `torch.utils.checkpoint`) are for its own tensors.
            with saved_tensors_hooks(_itself, _itself):
                return function(*args)
        except Exception:
            _logger.debug("A loss can't be followed.", exc_info=True)
            self._give_up()
            return default
        finally:
            set_generators(before)

    def _repeat(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        """Do in each world what was done; return the result, with its numbers tracked."""
        leaves = pytree.tree_leaves(result)
        is_wanted = any(
            isinstance(x, (Tensor, int, float)) and type(x) is not bool for x in leaves
        )
        if not is_wanted and name != "__setitem__":
            return result
        everywhere = [
            pytree.tree_leaves(self._apply(func, name, args, kwargs, world)) for world in WORLDS
        ]
        if any(len(one) != len(leaves) for one in everywhere):
            raise CannotFollowError(name)
        found = [
            self._found(name, leaf, (one, first, second))
            for leaf, one, first, second in zip(leaves, *everywhere, strict=True)
        ]
        if isinstance(result, torch.Size):
            return torch.Size(found)
        return found[0] if len(found) == 1 and isinstance(result, (int, float)) else result

    def _found(self, name: str, leaf: Any, everywhere: Counterparts) -> Any:
        if isinstance(leaf, Tensor):
            self.know(leaf, everywhere)
        elif name in _ESCAPES or isinstance(leaf, float):  # Python, or a log, takes plain ones
            if len(set(everywhere)) > 1:
                self._escaped[leaf] = everywhere
        else:
            return tracked(leaf, everywhere)
        return leaf

    def _apply(self, func: Any, name: str, args: Any, kwargs: Any, world: int) -> Any:
        takes_escaped = name.strip("_") in _TAKE_ESCAPED

        def there(value: Any) -> Any:
            counterparts = self.counterparts(value)
            if counterparts is not None:
                return counterparts[world]
            if isinstance(value, Tensor):
                return _exact(value)
            if isinstance(value, torch.dtype) and value.is_floating_point:
                return torch.float64
            if takes_escaped and type(value) in (int, float):
                return self._escaped_in(value, world)
            return value

        if name in _PRECISIONS:
            return there(args[0])
        there_args, there_kwargs = pytree.tree_map(there, (args, kwargs))
        return func(*there_args, **there_kwargs)

    def _escaped_in(self, value: Any, world: int) -> Any:
        """A plain number, which may be one that escaped, or a multiple: ``len(x) * width``."""
        escaped, size = self._escaped | conversions, self.sizes[0]
        if value in escaped:
            self.is_guessed = True
            return escaped[value][world]
        if size in escaped and value % size == 0:
            self.is_guessed = True
            return value // size * escaped[size][world]
        return value

    def _draw(self, name: str, result: Any) -> None:
        """A random tensor of the batch: each part has its rows of it."""
        size, first, _ = self.sizes
        rows = torch.arange(size)[:first], torch.arange(size)[first:]
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and size in tensor.shape:
                if name == "randperm":
                    raise CannotFollowError(name)
                self._cut(tensor, rows, tensor.shape.index(size))

    # -- modules ----------------------------------------------------------------------------------

    def enter(self, module: torch.nn.Module, inputs: Any) -> None:
        """See `calls.Listener`."""
        self._depth += 1
        if self._depth == 1:
            # Off the stack, if it is the last there: compiled modules look at it.
            self._was_on_stack = self._leave_stack()
            self._is_inside = True

    def leave(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        """See `calls.Listener`."""
        if self._depth == 1 and not self.is_over and outputs is not None:
            self._tried(self._cut_outputs, module, inputs, outputs)
        self._depth -= 1
        if self._depth == 0:
            if self._was_on_stack and not self.is_over:
                _push_mode(self)  # type: ignore[no-untyped-call]
                self._is_on_stack = True
            self._is_inside = False

    def _cut_outputs(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        given = [x for x in pytree.tree_leaves(inputs) if self.counterparts(x) is not None]
        tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
        if not given or not tensors:
            return
        first = given[0]
        size = len(first) if isinstance(first, Tensor) and first.dim() else -1
        has_rows = all(list(tensor.shape).count(size) == 1 for tensor in tensors)
        if max(tensor.numel() for tensor in tensors) > _MOST_NUMBERS:
            raise CannotFollowError("too large")
        if has_rows and not any(x.requires_grad and x.is_leaf for x in given):
            rows = _rows(*self.counterparts(first))  # type: ignore[misc]
            for tensor in tensors:
                self._cut(tensor, rows, tensor.shape.index(size))
        else:
            self._call(module, inputs, tensors)

    def _cut(self, tensor: Tensor, rows: tuple[Tensor, Tensor], axis: int) -> None:
        whole = tensor.detach()
        rows = rows[0].to(whole.device), rows[1].to(whole.device)
        parts = (_exact(p) for p in (whole, *(whole.index_select(axis, row) for row in rows)))
        leaves = [part.clone().requires_grad_(tensor.requires_grad) for part in parts]
        if tensor.requires_grad:
            self.cuts.append(Cut((leaves[0], leaves[1], leaves[2]), rows, axis))
            leaves = [leaf.clone() for leaf in leaves]  # which may be changed in place
        self.know(tensor, (leaves[0], leaves[1], leaves[2]))

    def _call(self, module: torch.nn.Module, inputs: Any, tensors: list[Tensor]) -> None:
        """Call a copy of a module in each world; in eval mode, where samples are by themselves."""
        if sum(parameter.numel() for parameter in module.parameters()) > _MOST_NUMBERS:
            raise CannotFollowError("too large")
        twin = _twin(module)
        before = generators_now()
        with own_randomness():
            everywhere = [self._called(twin, inputs, world) for world in WORLDS]
        if not are_alike(before, generators_now()):
            raise CannotFollowError("random")
        self.called.append(twin)
        for tensor, one, first, second in zip(tensors, *everywhere, strict=True):
            self.know(tensor, (one, first, second))

    def _called(self, module: torch.nn.Module, inputs: Any, world: int) -> list[Tensor]:
        def there(value: Any) -> Any:
            counterparts = self.counterparts(value)
            if counterparts is None or not isinstance(value, Tensor):
                return in_world(value, world)
            return counterparts[world].to(value.dtype)

        args, kwargs = pytree.tree_map(there, inputs)
        outputs = pytree.tree_leaves(module(*args, **kwargs))
        return [_exact(output) for output in outputs if isinstance(output, Tensor)]


def _twin(module: torch.nn.Module) -> torch.nn.Module:
    """A copy, in eval mode, that does not tell anybody what it does."""
    twin = copy.deepcopy(module).eval()
    for part in twin.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            hooks.clear()
    return twin


def _rows(whole: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows of the whole are in each part.

    Raises:
        CannotFollowError: Some are not to be found there, so that they are no parts of it.
    """
    if len(first) + len(second) == len(whole) and torch.equal(torch.cat([first, second]), whole):
        numbers = torch.arange(len(whole), device=whole.device)
        return numbers[: len(first)], numbers[len(first) :]
    marks = [part.reshape(len(part), -1).double() for part in (whole, first, second)]
    line = torch.linspace(1, 2, marks[0].shape[1], dtype=torch.float64, device=whole.device).sin()
    ours, *theirs = (mark @ line for mark in marks)
    gaps = [(mark[:, None] - ours[None, :]).abs() for mark in theirs]
    if any(bool((gap.amin(1) > 1e-9 * ours.abs().amax()).any()) for gap in gaps):
        raise CannotFollowError("rows")
    rows = gaps[0].argmin(1), gaps[1].argmin(1)
    if len(set(torch.cat(rows).tolist())) < len(whole):
        raise CannotFollowError("rows that are alike")
    return rows


def _exact(tensor: Tensor) -> Tensor:
    """A copy: what changes it must not change what is the objective's."""
    is_number = tensor.is_floating_point()
    return tensor.to(torch.float64, copy=True) if is_number else tensor.clone()


def _itself(tensor: Tensor) -> Tensor:
    return tensor
