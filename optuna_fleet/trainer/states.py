"""What the objects of a trial hold, as it is checkpointed and put back.

That is their ``state_dict``, and what it leaves out and a move would lose: which parameters are
frozen, buffers that are not persistent, groups of parameters that an optimizer was given in a
later epoch, and gradients that have been accumulated but not stepped with. Modules have it under
their own names, whether ``torch.compile`` wraps them or not.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def state_of(thing: Any) -> dict[str, Any]:
    """Its `state_dict`, without the ``_orig_mod`` of compiled modules in the keys."""
    with uncompiled(thing) as own:
        return own.state_dict()  # type: ignore[no-any-return]


def names_in(thing: Any) -> frozenset[str]:
    """What a module has a state of: one that has other names can't load it."""
    return frozenset(state_of(thing)) if isinstance(thing, torch.nn.Module) else frozenset()


def load_state(thing: Any, state: dict[str, Any]) -> None:
    """Load what `state_of` returned, for a compiled module or one that was not."""
    with uncompiled(thing) as own:
        own.load_state_dict(state)


def uncompiled(thing: Any) -> AbstractContextManager[Any]:
    """`thing`, with each compiled module in it, or it itself, replaced by what was compiled."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # costs seconds to import
    if dynamo is None or not isinstance(thing, torch.nn.Module):
        return nullcontext(thing)
    return _uncompiled(thing, dynamo.OptimizedModule)


@contextmanager
def _uncompiled(thing: torch.nn.Module, kind: type[Any]) -> Iterator[Any]:
    replaced = [
        (module._modules, name, part)
        for module in thing.modules()
        for name, part in module._modules.items()
        if isinstance(part, kind)
    ]
    for parts, name, part in replaced:
        parts[name] = part._orig_mod
    try:
        yield thing._orig_mod if isinstance(thing, kind) else thing
    finally:
        for parts, name, part in replaced:
            parts[name] = part


def remainder_of(objects: Sequence[Any], *, with_gradients: bool) -> list[dict[str, Any]]:
    """What the state of each object leaves out, for `add_groups` and `restore_remainder`."""
    places = {id(parameter): place for place, parameter in _parameters(objects).items()}

    def remainder(thing: Any) -> dict[str, Any]:
        if isinstance(thing, torch.optim.Optimizer):
            params = [group["params"] for group in thing.param_groups]
            return {"groups": [[places.get(id(p)) for p in group] for group in params]}
        if not isinstance(thing, torch.nn.Module):
            return {}
        own = {name: p for (_, name), p in _parameters([thing]).items()}
        gradients = {n: p.grad for n, p in own.items() if with_gradients and p.grad is not None}
        frozen = [name for name, p in own.items() if not p.requires_grad]
        return {"frozen": frozen, "gradients": gradients, "buffers": _unsaved_buffers(thing)}

    return list(map(remainder, objects))


def add_groups(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], objects: Sequence[Any]
) -> None:
    """Give an optimizer the groups of parameters that it had and that are not there yet."""
    parameters = _parameters(objects)
    for group in saved.get("groups", [])[len(optimizer.param_groups) :]:
        if all(place is not None and tuple(place) in parameters for place in group):
            optimizer.add_param_group({"params": [parameters[tuple(place)] for place in group]})


def restore_remainder(thing: Any, saved: dict[str, Any]) -> None:
    """Give a module what its state has left out."""
    if not isinstance(thing, torch.nn.Module) or "frozen" not in saved:
        return
    frozen, gradients = set(saved["frozen"]), saved["gradients"]
    for (_, name), parameter in _parameters([thing]).items():
        if parameter.requires_grad is (name in frozen):
            parameter.requires_grad_(name not in frozen)
        if name in gradients:
            parameter.grad = gradients[name].to(parameter.device, copy=True)
    for name, buffer in _unsaved_buffers(thing).items():
        was = saved["buffers"].get(name)
        if was is None or was.shape != buffer.shape:  # one that has grown is made again
            continue
        if not torch.equal(buffer, was := was.to(buffer.device)):
            with torch.no_grad():
                buffer.copy_(was)


def _unsaved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    with uncompiled(module) as own:
        return {
            f"{path}.{name}": buffer
            for path, part in own.named_modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and name in part._non_persistent_buffers_set
        }


def restore_into(state: dict[str, Any], saved: dict[str, Any], objects: Sequence[Any]) -> None:
    """Make a ``trial.state`` what it was; what is in it stays the same objects.

    The objective may hold one that it got from the state before its loop: a list, dict, set or
    tensor. It may have added to it what an earlier loop, which was not run again, had added.
    Tensors of the prepared `objects` are not written to: the state may hold one of these until the
    loop gives it another.
    """
    modules = [thing for thing in objects if isinstance(thing, torch.nn.Module)]
    tensors = (t for m in modules for t in itertools.chain(m.parameters(), m.buffers()))
    written = set(map(_memory_of, tensors))
    for key, value in saved.items():
        state[key] = _restored(state.get(key), value, written)


def _restored(held: Any, value: Any, written: set[int]) -> Any:
    """`held`, made what `value` is; or `value`, where that can't be done in place.

    Memory is `written` to once: what shares it now may have had its own when it was saved.
    """
    if type(held) is type(value) is tuple:
        pairs = itertools.zip_longest(held[: len(value)], value)
        return tuple(_restored(own, one, written) for own, one in pairs)
    if type(held) is not type(value) or not isinstance(value, (list, dict, set, torch.Tensor)):
        return value
    if (memory := _memory_of(held)) in written:
        return value
    written.add(memory)
    if isinstance(value, torch.Tensor):
        return _copied_into(held, value)
    if isinstance(value, dict):
        new: Any = {key: _restored(held.get(key), one, written) for key, one in value.items()}
    elif isinstance(value, list):
        pairs = itertools.zip_longest(held[: len(value)], value)
        new = [_restored(own, one, written) for own, one in pairs]
    else:
        new = value
    held.clear()
    (held.extend if isinstance(held, list) else held.update)(new)
    return held


def _copied_into(held: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if (held.shape, held.dtype, held.device) != (value.shape, value.dtype, value.device):
        return value
    try:
        with torch.no_grad():
            return held.copy_(value)
    except RuntimeError:  # not to be written to: expanded, or of `torch.inference_mode`
        return value


def _memory_of(thing: Any) -> int:
    """Equal for tensors that are views of one."""
    if isinstance(thing, torch.Tensor) and thing.layout == torch.strided:
        return thing.untyped_storage().data_ptr()
    return id(thing)


def _parameters(objects: Sequence[Any]) -> dict[tuple[int, str], torch.nn.Parameter]:
    """By the module's position and their names without what ``torch.compile`` adds to these."""
    return {
        (position, name.replace("_orig_mod.", "")): parameter
        for position, thing in enumerate(objects)
        if isinstance(thing, torch.nn.Module)
        for name, parameter in thing.named_parameters()
    }
