"""Tells of the calls of a trial's modules, while somebody wants to know.

The hooks are torch's global ones: a module stays the user's own, with nothing in it that would be
copied, pickled or compiled along.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.nn.modules import module as torch_module


class Listener(Protocol):
    """Hears of calls of modules: of the outermost one and of those within it."""

    def enter(self) -> None:
        """A module begins its forward."""

    def leave(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        """A module has ended its forward, or failed; `inputs` are (args, kwargs)."""


class ModuleCalls:
    """Tells `listener` of the calls of some modules, until it is closed."""

    def __init__(self, listener: Listener, modules: Iterable[torch.nn.Module]) -> None:
        self._listener = listener
        self._modules = weakref.WeakSet(part for module in modules for part in module.modules())
        register: Any = torch_module.register_module_forward_hook
        # Without that option of newer versions, models called by keyword are not looked into.
        has_option = "with_kwargs" in inspect.signature(register).parameters
        more = {"with_kwargs": True} if has_option else {}
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._enter),
            register(self._leave, always_call=True, **more),
        ]
        # Of hooks that the user did not set.
        text = r"Using `torch\.compile\(module\)` when there are global hooks"
        warnings.filterwarnings("ignore", message=text, category=UserWarning)

    def close(self) -> None:
        """Tell no more."""
        while self._handles:
            handle = self._handles.pop()
            handle.remove()
            # What torch forgets, and goes by when it looks for hooks.
            torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)

    def _hears(self, module: torch.nn.Module) -> bool:
        """Not while it is compiled, or transformed by ``torch.func``: its tensors are none."""
        if torch.compiler.is_compiling() or module not in self._modules:
            return False
        return torch._C._functorch.maybe_current_level() is None

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if self._hears(module):
            self._listener.enter()

    def _leave(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        # Torch leaves out the kwargs where the forward has failed.
        kwargs, outputs = rest if len(rest) == 2 else ({}, rest[-1])
        if self._hears(module):
            self._listener.leave(module, (args, kwargs), outputs)
