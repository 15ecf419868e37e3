"""The objective as a trainer has it: loaded once, with the settings of the user's script.

And with torch set up for its trial, once somebody imports it: a plain objective may never do so.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from optuna_fleet.exceptions import FleetError
from optuna_fleet.settings import Adoption, Settings
from optuna_fleet.wire.messages import RunTrial
from optuna_fleet.wire.node_messages import KeepObjective
from optuna_fleet.wire.packing import unpack_objective


class LoadedObjective:
    """What this process runs, call after call."""

    def __init__(
        self,
        num_threads: int,  # the slot's share of the node's cores
        *,
        has_gpu: bool,
        resolve: Callable[[str], Any],  # for the study or storage that the objective refers to
        variables: Collection[str] = (),  # of the environment that this process has of its own
    ) -> None:
        self._num_threads = num_threads
        self._resolve = resolve
        self._objectives: dict[int, Any] = {}
        self._settings = Settings()
        self._adoption = Adoption(has_gpu=has_gpu, variables=variables)

    def of(self, run: RunTrial) -> Any:
        """The objective, with the settings of its script in force.

        Raises:
            FleetError: It can't be loaded here, or what is to be done before.
        """
        if run.objective_id not in self._objectives:
            with open(run.objective_at, "rb") as file:
                kept: KeepObjective = pickle.load(file)  # from our parent, the agent
            self._objectives = {kept.objective_id: kept.objective}
            self._settings = kept.settings
        packed = self._objectives[run.objective_id]
        if isinstance(packed, bytes):
            self._adoption.own_filters()
            self._adoption.set_up(self._settings)
            try:
                self._objectives[run.objective_id] = unpack_objective(packed, self._resolve)
            except Exception as error:
                raise FleetError(
                    "The objective can't be loaded in a trainer: "
                    f"{type(error).__name__}: {error}. What it refers to must be importable there "
                    "as it is in your script."
                ) from error
            self._adoption.adopt(self._settings)
        return self._objectives[run.objective_id]

    def adopt_torch(self) -> None:
        """Put in force, again, what decides what torch computes."""
        import torch

        self._adoption.adopt_torch(self._settings)
        # The slot's share of the cores; a script that chose fewer gets those.
        chosen = self._settings.num_threads or self._num_threads
        torch.set_num_threads(min(chosen, self._num_threads))


@contextmanager
def once_torch_is_imported(act: Callable[[], None]) -> Iterator[None]:
    """Within the block, torch is as `act` sets it up, for everybody who uses it.

    At once if torch is imported; else in the thread that imports it, before that goes on.
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
        loader: Any = spec and spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._act()

            loader.exec_module = exec_module  # of this one loader: it loads nothing but torch
        return spec
