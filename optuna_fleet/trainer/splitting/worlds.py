"""What the code between a model's outputs and its loss would compute on parts of the batch.

While the objective computes on the whole batch, its operations are repeated in three *worlds*: on
the whole batch again, and on each of its two parts. Tensors and numbers that depend on the batch
have a counterpart in each. Prepared modules are not repeated: their outputs are cut into the rows
of each part, as they come out of a model that treats samples one by one and whose BatchNorm is
synchronised. Worlds compute in float64, on copies: nothing of the objective's is changed. Where
that would take too much memory they follow some of the samples only, in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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

from optuna_fleet.trainer.nested import tensors_in
from optuna_fleet.trainer.randomness import (
    TorchGenerators,
    has_generator,
    own_randomness,
    own_torch_randomness,
)
from optuna_fleet.trainer.splitting.constants import FACTORIES, Constants, Take
from optuna_fleet.trainer.splitting.cuts import MOST_NUMBERS, Cut, Rows, check_fits, find_rows
from optuna_fleet.trainer.splitting.errors import (
    CannotFollowError,
    CannotSplitError,
    MixedError,
    TooLargeError,
)
from optuna_fleet.trainer.splitting.precision import FewDigits, exact
from optuna_fleet.trainer.splitting.tracked import Tracked, escaped, in_world, plain, tracked
from optuna_fleet.trainer.splitting.twins import twin_of

WORLDS = range(3)
"""The whole batch, its first part, its second part."""

Counterparts = Sequence[Any]
"""What something is in each of the worlds."""

_logger = logging.getLogger(__name__)

_FEW = 4  # samples, where a model is called once more for them and for both parts

_PRECISIONS = ("float", "half", "bfloat16", "double")
_DRAWS = ("rand", "randn", "randint", "randperm", "bernoulli", "normal")
_ESCAPES = ("__len__", "__float__", "__int__", "__index__")
_TAKE_ESCAPED = {
    *FACTORIES,
    *("div", "mul", "truediv", "rtruediv", "true_divide", "rdiv", "rmul"),
}
"""Where a plain number that ``len`` or ``float`` gave is most likely what it is equal to."""


class Worlds(TorchFunctionMode):
    """Follows what is computed while it is active, of batches of one size.

    Args:
        on_backward: Called with the loss' counterparts when ``loss.backward()`` is.
        on_failure: Called with an error that a part of the batch meets and the whole does not.
        most_samples: Follow no more of the batch's samples, in float32.

    Attributes:
        constants: What does not depend on the batch; the number of its samples.
        dtype: What worlds compute in.
        cuts: Outputs of modules, and what was drawn at random.
        called: Copies of modules that were called in each world, in eval mode: their outputs have
            no rows to cut.
        is_coarse: These have computed with few digits.
        is_over: Something could not be followed, or nobody wants more to be.
        fits: That was for want of memory: as many samples would do. 0 if there is too little.
    """

    def __init__(
        self,
        on_backward: Callable[[Counterparts], None],
        on_failure: Callable[[Exception], None],
        most_samples: int | None = None,
    ) -> None:
        super().__init__()
        self.dtype = torch.float64 if most_samples is None else torch.float32
        self.constants = Constants(self.dtype)
        self.cuts: list[Cut] = []
        self.called: list[torch.nn.Module] = []
        self.is_coarse = False
        self.is_over = False
        self.fits: int | None = None
        self._on_backward = on_backward
        self._on_failure = on_failure
        self._most_samples = most_samples
        # By the id of what it is a counterpart of, which is kept, as ids of the dead come again.
        self._known: dict[int, tuple[Tensor, Counterparts]] = {}
        self._depth = 0  # of prepared modules: within one nothing is followed
        self._is_on_stack = self._was_on_stack = False  # of its thread's modes

    def start(self) -> None:
        """Begin to follow this thread, unless another mode might end before this one."""
        escaped.clear()
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        if all(mode is default for mode in stack):
            self._enter_stack()
        else:
            self.is_over = True

    def stop(self) -> bool:
        """Follow nothing any more; returns whether it is gone from its thread, else call again."""
        self._give_up()
        return not self._is_on_stack or self._leave_stack()

    def _enter_stack(self) -> None:
        _push_mode(self)  # type: ignore[no-untyped-call]
        self._is_on_stack = True

    def _leave_stack(self) -> bool:
        """Returns False where another mode came later and is still active."""
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not (stack and stack[-1] is self):
            return False
        _pop_mode()  # type: ignore[no-untyped-call]
        self._is_on_stack = False
        return True

    def _give_up(self) -> None:
        self.is_over = True
        self._known.clear()  # memory that the objective may need
        self.constants.clear()
        self.cuts.clear()
        self.called.clear()

    def add_batch(self, data: Any, size: int) -> None:
        """The objective is about to get a batch of so many samples."""
        if self.constants.size not in (0, size):
            self._give_up()
        if self.is_over:
            return
        self.constants.begin(size, min(size, self._most_samples or size))
        for tensor in _tensors(data):
            if tensor.dim() and len(tensor) == size:
                self.know(tensor, [self.constants.as_rows(tensor, world) for world in WORLDS])

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
        is_followed = not (torch.compiler.is_compiling() or self.is_over or self._depth > 0)
        if not is_followed or not self._follows(name, args, kwargs):
            result = func(*plain_args, **plain_kwargs)
            if is_followed and self.constants.may_depend(name, (args, kwargs)):
                self._guess(func, name, args, kwargs, result)
            return result
        if name == "backward":
            if len(args) > 1 or kwargs.get("gradient") is not None:
                self._give_up()  # of more than one number
            elif (losses := self.counterparts(args[0])) is not None:
                self._tried(self._on_backward, losses)
            return func(*plain_args, **plain_kwargs)
        generators = TorchGenerators()
        result = func(*plain_args, **plain_kwargs)
        if has_generator((args, kwargs)) or generators.are_used():
            self._tried(self._draw, name, result)
            return result
        return self._tried(self._repeat, func, name, args, kwargs, result, default=result)

    def _follows(self, name: str, args: Any, kwargs: Any) -> bool:
        leaves = pytree.tree_leaves((args, kwargs))
        if name in _DRAWS or any(self.counterparts(leaf) is not None for leaf in leaves):
            return True
        return name in _TAKE_ESCAPED and any(
            type(x) is int and x and self.constants.escaped_in(x, 1) != x for x in leaves
        )

    def _tried(self, function: Callable[..., Any], *args: Any, default: Any = None) -> Any:
        """What can't be followed is none of the objective's business."""
        try:
            # Hooks of the objective's (of `torch.utils.checkpoint`) are for its own tensors.
            with own_torch_randomness(), saved_tensors_hooks(_itself, _itself):
                return function(*args)
        except (CannotSplitError, MixedError) as error:
            self._give_up()
            self._on_failure(error)
        except TooLargeError as error:
            self._give_up()
            self.fits = error.num_samples
        except Exception:
            _logger.debug("A loss can't be followed.", exc_info=True)
            self._give_up()
        return default

    def _repeat(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        """Do in each world what was done; return the result, with its numbers tracked."""
        leaves = pytree.tree_leaves(result)
        kinds = (Tensor, int, float)
        is_wanted = any(isinstance(x, kinds) and type(x) is not bool for x in leaves)
        if not is_wanted and name != "__setitem__":
            return result
        everywhere = list(map(pytree.tree_leaves, self._in_worlds(func, name, args, kwargs)))
        if any(len(one) != len(leaves) for one in everywhere):
            raise CannotFollowError(name)
        found = [
            self._found(name, leaf, counterparts)
            for leaf, *counterparts in zip(leaves, *everywhere, strict=True)
        ]
        if isinstance(result, torch.Size):
            return torch.Size(found)
        return found[0] if len(found) == 1 and isinstance(result, (int, float)) else result

    def _in_worlds(self, func: Any, name: str, args: Any, kwargs: Any) -> list[Any]:
        """What a function gives in each: constants as they are or, if that fails, of its size."""
        errors = []
        takes = (self.constants.as_it_is, self.constants.as_guessed, self.constants.as_rows)
        for take in takes:
            try:
                results = self._applied(func, name, args, kwargs, take)
            except Exception as error:
                errors.append(error)
            else:
                self.constants.are_guessed |= take == self.constants.as_guessed
                return results
        has_mask = any(tensor.dtype is torch.bool for tensor in _tensors(args))
        if self._most_samples is not None or (name == "__getitem__" and not has_mask):
            raise errors[0]  # in a loop over the samples, say
        self._apply(func, name, args, kwargs, 0, takes[0])  # if it fails too, that is ours
        raise CannotSplitError(str(errors[0])) from errors[0]

    def _applied(self, func: Any, name: str, args: Any, kwargs: Any, take: Take) -> list[Any]:
        # Parts first: if one fails, nothing of the whole has been changed in place.
        first, second, whole = (
            self._apply(func, name, args, kwargs, world, take) for world in (1, 2, 0)
        )
        return [whole, first, second]

    def _guess(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """A tensor that may depend on the number of samples: used where a part fails without."""
        try:
            with own_torch_randomness():
                guesses = self._applied(func, name, args, kwargs, self.constants.as_guessed)
        except Exception:
            return
        if isinstance(result, Tensor):
            self.constants.guess(result, guesses)

    def _found(self, name: str, leaf: Any, everywhere: Counterparts) -> Any:
        if isinstance(leaf, Tensor):
            self.know(leaf, everywhere)
        elif name not in _ESCAPES and not isinstance(leaf, float):
            return tracked(leaf, tuple(everywhere))
        elif len(set(everywhere)) > 1:  # Python, or a log, takes plain ones
            escaped[leaf] = tuple(everywhere)
        return leaf

    def _apply(self, func: Any, name: str, args: Any, kwargs: Any, world: int, take: Take) -> Any:
        takes_escaped = name.strip("_") in _TAKE_ESCAPED

        def there(value: Any) -> Any:
            counterparts = self.counterparts(value)
            if counterparts is not None:
                return counterparts[world]
            if isinstance(value, torch.dtype) and value.is_floating_point:
                return self.dtype
            if takes_escaped and type(value) in (int, float):
                value = self.constants.escaped_in(value, world)
            if name in FACTORIES and take == self.constants.as_guessed:
                value = self.constants.scaled(value, world)
            return take(value, world)

        if name in _PRECISIONS:
            return there(args[0])
        is_leaf = self.constants.is_list if take == self.constants.as_rows else None
        there_args, there_kwargs = pytree.tree_map(there, (args, kwargs), is_leaf=is_leaf)
        return func(*there_args, **there_kwargs)

    def _draw(self, name: str, result: Any) -> None:
        """A random tensor of the batch: each part has its rows of it."""
        size, (most, first, _) = self.constants.size, self.constants.sizes
        numbers = torch.arange(most)
        rows = Rows(numbers, [numbers[:first], numbers[first:]])
        for tensor in _tensors(result):
            if size in tensor.shape:
                if name == "randperm":
                    raise CannotFollowError(name)
                self._cut(tensor, rows, tensor.shape.index(size))

    # -- modules ----------------------------------------------------------------------------------

    def enter(self) -> None:
        """A prepared module is called."""
        self._depth += 1
        if self._depth == 1:
            # Off the stack, if it is the last there: compiled modules look at it.
            self._was_on_stack = self._leave_stack()

    def leave(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        """It has ended; see `module_calls.Listener`."""
        if self._depth == 1 and not self.is_over and outputs is not None:
            self._tried(self._cut_outputs, module, inputs, outputs)
        self._depth -= 1
        if self._depth == 0 and self._was_on_stack and not self.is_over:
            self._enter_stack()

    def _cut_outputs(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        given = [x for x in pytree.tree_leaves(inputs) if self.counterparts(x) is not None]
        tensors = _tensors(outputs)
        if not given or not tensors:
            return
        first = given[0]
        size = len(first) if isinstance(first, Tensor) and first.dim() else -1
        has_rows = all(list(tensor.shape).count(size) == 1 for tensor in tensors)
        check_fits(tensors, self.constants.size, self._most_samples)
        if has_rows and not any(x.requires_grad and x.is_leaf for x in given):
            whole, *parts = self.counterparts(first)  # type: ignore[misc]
            rows = find_rows(first, whole, parts)
            for tensor in tensors:
                self._cut(tensor, rows, tensor.shape.index(size))
        else:
            self._call(module, inputs, tensors)

    def _cut(self, tensor: Tensor, rows: Rows, axis: int) -> None:
        cut = Cut.of(tensor, rows, axis, self.dtype)
        if tensor.requires_grad:
            self.cuts.append(cut)
            # Copies, as the objective may change them in place.
            self.know(tensor, [leaf.clone() for leaf in cut.leaves])
        else:
            self.know(tensor, cut.leaves)

    def _call(self, module: torch.nn.Module, inputs: Any, tensors: list[Tensor]) -> None:
        """Call a copy of a module in each world; in eval mode, where samples are by themselves."""
        is_large = sum(parameter.numel() for parameter in module.parameters()) > MOST_NUMBERS
        if is_large and self._most_samples is None:
            raise TooLargeError(_FEW)
        twin = twin_of(module, shares_weights=is_large)
        with own_randomness() as generators, FewDigits() as rounding:
            everywhere = [self._called(twin, inputs, world) for world in WORLDS]
            if generators.are_used():
                raise CannotFollowError("random")
        self.is_coarse |= rounding.is_found
        self.called.append(twin)
        for tensor, *outputs in zip(tensors, *everywhere, strict=True):
            self.know(tensor, outputs)

    def _called(self, module: torch.nn.Module, inputs: Any, world: int) -> list[Tensor]:
        def there(value: Any) -> Any:
            counterparts = self.counterparts(value)
            if counterparts is None or not isinstance(value, Tensor):
                return in_world(value, world)
            return counterparts[world].to(value.dtype)

        args, kwargs = pytree.tree_map(there, inputs)
        return [exact(output, self.dtype) for output in _tensors(module(*args, **kwargs))]


def _tensors(data: Any) -> list[Tensor]:
    return list(tensors_in(data))


def _itself(tensor: Tensor) -> Tensor:
    return tensor
