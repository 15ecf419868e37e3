"""What of the script's process holds for its objectives in other processes too.

Where it is at work (folder, imports, environment), and its settings of torch, warnings and logs.
They are read in the driver when a call of `optimize` begins, and set in the processes of the
fleet before anything of the user's is called; those of torch when it is imported. Where it never
is it has no settings. What else a process needs, `FleetExecutor(setup=...)` does.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import pickle
import socket
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import cloudpickle

from optuna_fleet.accelerator import ACCELERATORS, device_types
from optuna_fleet.exceptions import FleetConfigError, FleetError, shown
from optuna_fleet.wire.packing import pack
from optuna_fleet.wire.unpicklable import explained

# -- where it is at work --------------------------------------------------------------------------


# What each node, or process, of the fleet has of its own, whatever the script has set.
_OF_EACH = {
    *(name for each in ACCELERATORS for name in (each.visible, each.interface, *each.always)),
    *("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "OPTUNA_FLEET_JOIN", "OPTUNA_FLEET_TOKEN"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """What relative paths, imports and `os.environ` mean to a script.

    Attributes:
        folder: Its working directory; None if that was removed.
        sys_path: Where its imports are found.
        argv: Its arguments.
        variables: Those of the environment that it has ever changed, as they are now; None for
            those that it has removed.
        key: By which its `multiprocessing.Manager` knows who may ask it.
    """

    folder: str | None
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    variables: Mapping[str, str | None]
    key: bytes = field(repr=False)

    def take_on(self, *, but: Collection[str] = ()) -> None:
        """Have them mean the same to this process.

        Args:
            but: Variables that stay as they are.

        Raises:
            FleetError: There is no such folder here.
        """
        for name in self.variables.keys() - set(but):
            if (value := self.variables[name]) is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        time.tzset()
        sys.path[:], sys.argv[:] = self.sys_path, self.argv
        multiprocessing.current_process().authkey = self.key
        importlib.invalidate_caches()  # its folders may have new modules
        try:
            if self.folder is not None:
                os.chdir(self.folder)
        except OSError as error:
            raise FleetError(
                f"{socket.gethostname()} has no folder {self.folder}, where the script is at work "
                f"({error.strerror}). Give all nodes the same paths."
            ) from error


def workplace_here() -> Workplace:
    """That of this process, the driver."""
    names = {*os.environ, *_AT_FIRST}
    _changed.update(n for n in names if os.environ.get(n) != _AT_FIRST.get(n))
    try:
        folder = os.getcwd()
    except OSError:
        folder = None
    return Workplace(
        folder=folder,
        sys_path=tuple(sys.path),
        argv=tuple(sys.argv),
        key=bytes(multiprocessing.current_process().authkey),
        variables={name: os.environ.get(name) for name in _changed - _OF_EACH},
    )


def _at_first() -> dict[str, str]:
    """The environment that this process was started with.

    It can't be read where somebody has written his title over it.
    """
    entries: list[str] = []
    with suppress(OSError):
        entries = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    found = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return found if found.keys() & os.environ.keys() else dict(os.environ)


_AT_FIRST = _at_first()
_changed: set[str] = set()


# -- settings -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a process, as plain data: to unpickle it imports nothing.

    Attributes:
        torch: What differs from torch's defaults, by name.
        num_threads: How many threads torch computes with; None if it is not loaded.
        filters: The filters of `warnings`, each pickled by itself: some may not be readable.
        log_levels: Levels of loggers by name, where they are set; "root" is the root logger.
        workplace: Where the script is at work; None for anywhere.
        setup: A function that each process calls first, pickled; empty for none.
    """

    torch: Mapping[str, Any] = field(default_factory=dict)
    num_threads: int | None = None
    filters: tuple[bytes, ...] = ()
    log_levels: Mapping[str, int] = field(default_factory=dict)
    workplace: Workplace | None = None
    setup: bytes = b""


def settings_here(setup: bytes = b"") -> Settings:
    """The settings of this process."""
    torch: Any = sys.modules.get("torch")
    values = {} if torch is None else _torch_values(torch)
    filters: list[bytes] = []
    for entry in warnings.filters:
        with suppress(Exception):  # its category may hold what can't be sent
            filters.append(cloudpickle.dumps(entry))
    return Settings(
        torch={name: value for name, value in values.items() if value != _TORCH[name]},
        num_threads=None if torch is None else torch.get_num_threads(),
        filters=tuple(filters),
        log_levels=_log_levels(),
        workplace=workplace_here(),
        setup=setup,
    )


def packed_setup(setup: Callable[[], object] | None) -> bytes:
    """The user's function, as `Settings` have it.

    Raises:
        FleetConfigError: It can't be sent to another process.
    """
    if setup is None:
        return b""
    try:
        return pack(setup)
    except Exception as error:
        reason = explained({"setup": setup}, "given to FleetExecutor", error)
        raise FleetConfigError(f"`setup` can't be sent to other processes: {reason}") from error


class Adoption:
    """Applies settings of other processes, over those that this process has of its own.

    Args:
        has_gpu: If not, a default device that is one becomes the CPU.
        variables: Those of the environment that this process has of its own.
    """

    def __init__(self, *, has_gpu: bool, variables: Collection[str] = ()) -> None:
        self._has_gpu = has_gpu
        self._variables = variables
        self._present: Settings | None = None
        self._is_set_up = False
        self._own_filters = list(warnings.filters)
        self._own_log_levels = self._log_levels = _log_levels()
        self._own_torch: dict[str, Any] | None = None

    def set_up(self, settings: Settings) -> None:
        """Go where the script is at work, and do what is to be done first, once.

        Raises:
            FleetError: That can't be done.
        """
        if settings is self._present:
            return
        if settings.workplace is not None:
            settings.workplace.take_on(but=self._variables)
        try:
            if settings.setup and not self._is_set_up:
                pickle.loads(settings.setup)()  # from the driver, on the authenticated channel
        except Exception as error:
            raise FleetError(
                f"`setup` of the FleetExecutor failed in one of its processes: {shown(error)}. "
                "Each of them calls it once, before all else of yours."
            ) from error
        self._present, self._is_set_up = settings, True

    def adopt(self, settings: Settings) -> None:
        """Apply all these settings but those of torch.

        Raises:
            FleetError: See `set_up`.
        """
        self.set_up(settings)
        levels = {**dict.fromkeys(self._log_levels, logging.NOTSET), **self._own_log_levels}
        self._log_levels = {**levels, **settings.log_levels}
        for name, level in self._log_levels.items():
            logging.getLogger(None if name == "root" else name).setLevel(level)
        self._adopt_filters(settings)

    def adopt_torch(self, settings: Settings) -> None:
        """Apply those of torch, which an objective may have changed, and import it."""
        torch = importlib.import_module("torch")
        self._adopt_filters(settings)
        if self._own_torch is None:
            self._own_torch = _torch_values(torch)
        wanted = {**self._own_torch, **settings.torch}
        if wanted.get("default_device") in device_types() and not self._has_gpu:
            wanted["default_device"] = "cpu"
        for name in (name for name in _TORCH if name in wanted):
            with suppress(Exception):  # this version may not take it
                if _of_torch(torch, name) != wanted[name]:
                    _set_of_torch(torch, name, wanted[name])

    def own_filters(self) -> None:
        """Go back to this process' own filters of warnings: imports may warn, as in the script."""
        self._set_filters(self._own_filters)

    def _adopt_filters(self, settings: Settings) -> None:
        """Those of torch's warnings can't be read before it is imported."""
        has_torch, filters = "torch" in sys.modules, []
        for packed in settings.filters:
            with suppress(Exception):  # from the driver, on the authenticated channel
                filters += [pickle.loads(packed)] if has_torch or b"torch" not in packed else []
        self._set_filters(filters)

    def _set_filters(self, filters: list[Any]) -> None:
        warnings.resetwarnings()  # also has it forget what it looked up in them
        warnings.filters[:] = filters  # type: ignore[index]


def _log_levels() -> dict[str, int]:
    loggers = {"root": logging.root, **logging.root.manager.loggerDict}
    return {
        name: logger.level
        for name, logger in loggers.items()
        if isinstance(logger, logging.Logger) and logger.level != logging.NOTSET
    }


# torch's settings and their defaults, in the order in which they are set: a coarse one sets finer
# ones along. Those with dots are attributes. What `cuda.matmul.allow_tf32` says is what
# `float32_matmul_precision` does.
_TORCH: dict[str, Any] = {
    "default_dtype": "float32",
    "default_device": "cpu",
    "deterministic_algorithms": (False, False),
    "float32_matmul_precision": "highest",
    "utils.deterministic.fill_uninitialized_memory": True,
    "backends.cudnn.enabled": True,
    "backends.cudnn.benchmark": False,
    "backends.cudnn.benchmark_limit": 10,
    "backends.cudnn.deterministic": False,
    "backends.cudnn.allow_tf32": True,
    "backends.mkldnn.deterministic": False,
    "backends.fp32_precision": "none",
    "backends.cudnn.fp32_precision": "none",
    "backends.mkldnn.fp32_precision": "none",
    **{path: default for each in ACCELERATORS for path, default in each.switches.items()},
    "backends.cudnn.conv.fp32_precision": "tf32",
    "backends.cudnn.rnn.fp32_precision": "tf32",
    "backends.mkldnn.matmul.fp32_precision": "none",
    "backends.mkldnn.conv.fp32_precision": "none",
    "backends.mkldnn.rnn.fp32_precision": "none",
}


def _torch_values(torch: Any) -> dict[str, Any]:
    """All settings that this version of torch has."""
    values: dict[str, Any] = {}
    with warnings.catch_warnings():  # torch's old names for TF32 are deprecated
        warnings.simplefilter("ignore")
        for name in _TORCH:
            with suppress(Exception):
                values[name] = _of_torch(torch, name)
    return values


def _of_torch(torch: Any, name: str) -> Any:
    match name:
        case "default_dtype":
            return str(torch.get_default_dtype()).removeprefix("torch.")
        case "default_device":
            return str(torch.get_default_device().type)
        case "deterministic_algorithms":
            warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
            return torch.are_deterministic_algorithms_enabled(), warn_only
        case "float32_matmul_precision":
            return torch.get_float32_matmul_precision()
    return attrgetter(name)(torch)


def _set_of_torch(torch: Any, name: str, value: Any) -> None:
    match name:
        case "default_dtype":
            torch.set_default_dtype(getattr(torch, value))
        case "default_device":
            torch.set_default_device(None if value == "cpu" else value)  # None: no detour per call
        case "deterministic_algorithms":
            torch.use_deterministic_algorithms(value[0], warn_only=value[1])
        case "float32_matmul_precision":
            torch.set_float32_matmul_precision(value)
        case _:
            owner, _, attribute = name.rpartition(".")
            setattr(attrgetter(owner)(torch), attribute, value)
