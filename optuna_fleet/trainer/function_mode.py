"""A mode of torch that sees all its functions, for a time that is no block of code."""

from __future__ import annotations

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)


class FunctionMode(TorchFunctionMode):
    """Goes on its thread's stack of modes, and off it only where it is the last there."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on_stack = False

    @staticmethod
    def is_alone() -> bool:
        """Whether no mode is active that might end before this one."""
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        return all(mode is default for mode in stack)

    def enter_stack(self) -> None:
        """See functions from now on."""
        _push_mode(self)  # type: ignore[no-untyped-call]
        self.is_on_stack = True

    def leave_stack(self) -> bool:
        """See none any more; returns False where another mode came later and is still active."""
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not (stack and stack[-1] is self):
            return False
        _pop_mode()  # type: ignore[no-untyped-call]
        self.is_on_stack = False
        return True
