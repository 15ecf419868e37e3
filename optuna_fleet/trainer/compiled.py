"""The states of modules under their own names, whether ``torch.compile`` wraps them or not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def state_of(thing: Any) -> dict[str, Any]:
    """Its `state_dict`, without the ``_orig_mod`` of compiled modules in the keys."""
    with _uncompiled(thing) as own:
        return own.state_dict()  # type: ignore[no-any-return]


def load_state(thing: Any, state: dict[str, Any]) -> None:
    """Load what `state_of` returned, for a compiled module or one that was not."""
    with _uncompiled(thing) as own:
        own.load_state_dict(state)


@contextmanager
def _uncompiled(thing: Any) -> Iterator[Any]:
    """`thing`, with each compiled module in it, or it itself, replaced by what was compiled."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # costs seconds to import
    if dynamo is None or not isinstance(thing, torch.nn.Module):
        yield thing
        return
    kind = dynamo.OptimizedModule
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
