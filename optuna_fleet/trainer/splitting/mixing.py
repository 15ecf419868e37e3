"""Finds modules that can't do with a part of a batch what they do with the whole.

Worlds take the outputs of a module for what it makes of each sample by itself, and gradients of
parameters for sums over the samples. What is neither is found here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optuna_fleet.trainer.nested import tensors_in
from optuna_fleet.trainer.randomness import own_randomness
from optuna_fleet.trainer.splitting.precision import Tolerance
from optuna_fleet.trainer.splitting.tracked import plain
from optuna_fleet.trainer.splitting.twins import WeightsUnchanged, twin_of

MIXES = (
    "What its model gives for a sample depends on the other samples that it is called with (on "
    "their mean, say, or by attention to them), and each of several devices would have a part of "
    "these only. So that its results do not depend on the number of devices, the trial stays on "
    "one. BatchNorm is exact on several, unless it has track_running_stats=False."
)

HOOKS = (
    "Hooks of its model (`register_hook` and `register_post_accumulate_grad_hook` of parameters, "
    "`register_full_backward_hook` of modules) change gradients before those of several devices "
    "are put together. So that its results do not depend on the number of devices, the trial "
    "stays on one. What is done to a parameter's can be done after `loss.backward()`, to "
    "`parameter.grad`."
)

EMBEDDINGS = (
    "Its model has an embedding with `max_norm` or `scale_grad_by_freq`, which goes by all tokens "
    "of a batch, and each of several devices would have a part of these only. So that its results "
    "do not depend on the number of devices, the trial stays on one."
)

_FEW = 4
_TOLERANCE = Tolerance(double=1e-9, single=1e-4, coarse=2e-2)

Counterparts = Callable[[Any], Sequence[Any] | None]
Tell = weakref.WeakMethod[Callable[[str], Any]]


def why_alone(
    module: torch.nn.Module, inputs: Any, outputs: Any, counterparts: Counterparts
) -> str | None:
    """Say why several devices could not share what a module was called with; None if they can.

    Args:
        module: It has ended a call in training.
        inputs: Its positional arguments and those by keyword.
        counterparts: Of these what depends on the batch has some, of other sizes in its parts.
        outputs: What it gave.
    """
    if any(map(_has_late_hooks, module.parameters())):
        return HOOKS
    if any(map(_goes_by_all_tokens, module.modules())):
        return EMBEDDINGS
    try:
        return MIXES if _mixes(module, inputs, outputs, counterparts) else None
    except Exception:  # it can't be called so
        return None


def watch_hooks(module: torch.nn.Module, tell: Tell) -> None:
    """Have `tell` called with why several devices could not, if hooks change gradients."""
    of_parameters = [p._backward_hooks or {} for p in module.parameters()]
    of_modules = [h for m in module.modules() for h in (m._backward_hooks, m._backward_pre_hooks)]
    for hooks in (*of_parameters, *of_modules):
        for key, hook in hooks.items():
            hooks[key] = _Watched(hook, tell)


class _Watched:
    """A hook; copies of its module have the hook itself."""

    def __init__(self, hook: Callable[..., Any], tell: Tell) -> None:
        self._hook = hook
        self._tell = tell

    def __call__(self, *gradients: Any) -> Any:
        changed = self._hook(*gradients)
        if changed is not None and (tell := self._tell()) is not None:
            tell(HOOKS)
        return changed

    def __reduce__(self) -> Any:
        return _itself, (self._hook,)


def _itself(hook: Any) -> Any:
    return hook


def _has_late_hooks(parameter: Tensor) -> bool:
    """Whether there are some of the user's, which may do anything to ``parameter.grad``."""
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    names = [getattr(getattr(hook, "func", hook), "__module__", "") for hook in hooks.values()]
    return not all(name.startswith("optuna_fleet.") for name in names)


def _goes_by_all_tokens(module: torch.nn.Module) -> bool:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return isinstance(module, kinds) and bool(module.max_norm or module.scale_grad_by_freq)


@torch.no_grad()
def _mixes(module: torch.nn.Module, inputs: Any, outputs: Any, counterparts: Counterparts) -> bool:
    """Whether some samples give something else beside others than beside themselves again."""
    axes = {
        id(value): _axis_of_samples(found)
        for value in tensors_in(inputs)
        if (found := counterparts(value)) is not None
    }
    sizes = {v.shape[a] for v in tensors_in(inputs) if (a := axes.get(id(v))) is not None}
    if not sizes:
        return False
    number = min(_FEW, *sizes) // 2 * 2
    half = number // 2

    def called(samples: Tensor) -> tuple[list[Tensor], bool]:
        def some(value: Any) -> Any:
            axis = axes.get(id(value)) if isinstance(value, Tensor) else None
            rows = samples.to(value.device) if axis is not None else samples
            return plain(value) if axis is None else value.detach().index_select(axis, rows)

        args, kwargs = pytree.tree_map(some, inputs)
        twin = twin_of(module, shares_weights=True)  # another each time: it may count its calls
        with own_randomness() as generators, WeightsUnchanged(module):
            return list(tensors_in(twin(*args, **kwargs))), generators.are_used()

    samples = torch.arange(number)
    (ones, is_random), (others, _) = called(samples), called(samples % half)
    return not is_random and any(
        _differ(one, other, axis, half)
        for given, one, other in zip(tensors_in(outputs), ones, others, strict=True)
        if (axis := _only_axis(given, sizes)) is not None
    )


def _axis_of_samples(counterparts: Sequence[Any]) -> int | None:
    """Along which a tensor has rows of samples: the only one that is shorter in a part."""
    whole, part, _ = counterparts
    lengths = enumerate(zip(whole.shape, part.shape, strict=True))
    axes = [axis for axis, (all_, some) in lengths if all_ != some]
    return axes[0] if len(axes) == 1 else None


def _only_axis(output: Tensor, sizes: set[int]) -> int | None:
    axes = [axis for axis, length in enumerate(output.shape) if length in sizes]
    return axes[0] if len(axes) == 1 and output.is_floating_point() else None


def _differ(one: Tensor, other: Tensor, axis: int, half: int) -> bool:
    """Whether their first samples do."""
    first, second = one.narrow(axis, 0, half), other.narrow(axis, 0, half)
    largest = max(first.abs().max(), second.abs().max())
    is_known = bool(largest.isfinite()) and first.shape == second.shape
    return is_known and bool((first - second).abs().max() > _TOLERANCE.of(first.dtype) * largest)
