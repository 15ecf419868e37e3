"""Acts when torch is imported, whoever imports it: a plain objective may never do so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextmanager
def once_torch_is_imported(act: Callable[[], None]) -> Iterator[None]:
    """Within the block, torch is as `act` sets it up, for everybody who uses it.

    Args:
        act: Called at once if torch is imported; else when it has been, in the thread that imports
            it, before anything there goes on.
    """
    if "torch" in sys.modules:
        act()
        yield
        return
    finder = _Finder(act)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds torch where the others find it, and has its loader call `act` at the end."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder.find_spec for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (find(name, path, target) for find in others)), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Any) -> None:
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._act()

        loader.exec_module = exec_module  # of this one loader: it loads nothing but torch
