"""Tells of the calls of a trial's modules.

The hooks are torch's global ones, set once per process: a module stays the user's own, with
nothing in it that would be copied, pickled or compiled along.
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

    def enter(self, module: torch.nn.Module, inputs: Any) -> Any:
        """A module begins its forward, with these positional arguments.

        Returns:
            Others in their place, or None.
        """

    def leave(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
        """A module has ended its forward, or failed; `inputs` are (args, kwargs).

        Returns:
            Other outputs, or None.
        """


_modules = weakref.WeakSet[torch.nn.Module]()
_listener: weakref.ref[Listener] | None = None
_has_hooks = False


def listen(listener: Listener) -> None:
    """Let `listener` hear of the calls of the modules that `watch` is given; it alone."""
    global _listener
    _listener = weakref.ref(listener)
    _modules.clear()


def watch(modules: Iterable[torch.nn.Module]) -> None:
    """Let the listener hear of these modules."""
    global _has_hooks
    _modules.update(modules)
    if not _has_hooks:
        _has_hooks = True
        quieten()
        torch_module.register_module_forward_pre_hook(_enter)
        register: Any = torch_module.register_module_forward_hook
        # Without that option of newer versions, models called by keyword are not looked into.
        has_option = "with_kwargs" in inspect.signature(register).parameters
        more = {"with_kwargs": True} if has_option else {}
        register(_leave, always_call=True, **more)


def quieten() -> None:
    """Keep torch from warning of hooks that the user did not set."""
    if _has_hooks:
        text = r"Using `torch\.compile\(module\)` when there are global hooks"
        warnings.filterwarnings("ignore", message=text, category=UserWarning)


def _listener_to(module: torch.nn.Module) -> Listener | None:
    """None while it is compiled, or transformed by ``torch.func``: its tensors are none there."""
    if torch.compiler.is_compiling() or _listener is None or module not in _modules:
        return None
    return _listener() if torch._C._functorch.maybe_current_level() is None else None


def _enter(module: torch.nn.Module, inputs: Any) -> Any:
    listener = _listener_to(module)
    return None if listener is None else listener.enter(module, inputs)


def _leave(module: torch.nn.Module, args: Any, *rest: Any) -> Any:
    # Torch leaves out the kwargs where the forward has failed.
    kwargs, outputs = rest if len(rest) == 2 else ({}, rest[-1])
    listener = _listener_to(module)
    return None if listener is None else listener.leave(module, (args, kwargs), outputs)
