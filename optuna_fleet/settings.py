"""Settings of the script's process that hold for its objectives in other processes too.

They are read in the driver when a call of `optimize` begins, and set in trainers before an
objective is called, those of torch when it is imported. Where it never is it has no settings.
What else a process needs, `FleetExecutor(setup=...)` does.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import pickle
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import cloudpickle
import numpy as np

from optuna_fleet.accelerator import ACCELERATORS, device_types
from optuna_fleet.exceptions import FleetConfigError, FleetError, shown
from optuna_fleet.wire.packing import pack
from optuna_fleet.wire.unpicklable import explained
from optuna_fleet.workplace import Workplace, workplace_here


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a process, as plain data: to unpickle it imports nothing.

    Attributes:
        torch: What differs from torch's defaults, by name.
        num_threads: How many threads torch computes with; None if it is not loaded.
        numpy_errors: How NumPy treats floating-point errors.
        numpy_printing: How it prints arrays.
        filters: The filters of `warnings`, each pickled by itself: some may not be readable.
        log_levels: Levels of loggers by name, where they are set; "root" is the root logger.
        log_disabled: The level that `logging.disable` was given.
        workplace: Where the script is at work; None for anywhere.
        setup: A function that each process calls first, pickled; empty for none.
    """

    torch: Mapping[str, Any] = field(default_factory=dict)
    num_threads: int | None = None
    numpy_errors: Mapping[str, Any] = field(default_factory=dict)
    numpy_printing: Mapping[str, Any] = field(default_factory=dict)
    filters: tuple[bytes, ...] = ()
    log_levels: Mapping[str, int] = field(default_factory=dict)
    log_disabled: int = 0
    workplace: Workplace | None = None
    setup: bytes = b""


def settings_here(setup: bytes = b"") -> Settings:
    """The settings of this process; of NumPy's print options those that are plain values."""
    torch: Any = sys.modules.get("torch")
    values = {} if torch is None else _torch_values(torch)
    return Settings(
        torch={name: v for name, v in values.items() if v != _TORCH[name].default},
        num_threads=None if torch is None else torch.get_num_threads(),
        numpy_errors=np.geterr(),
        numpy_printing={k: v for k, v in np.get_printoptions().items() if _is_plain(v)},
        filters=tuple(packed for entry in warnings.filters if (packed := _packed(entry))),
        log_levels=_log_levels(),
        log_disabled=logging.root.manager.disable,
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
        self._awaits_torch = False  # filters of its warnings, which can't be read before

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
        logging.disable(settings.log_disabled)
        levels = {**dict.fromkeys(self._log_levels, logging.NOTSET), **self._own_log_levels}
        self._log_levels = {**levels, **settings.log_levels}
        for name, level in self._log_levels.items():
            logging.getLogger(None if name == "root" else name).setLevel(level)
        self._adopt_filters(settings)
        self.adopt_numbers(settings)

    def adopt_numbers(self, settings: Settings) -> None:
        """Apply those of NumPy: an objective may have changed them."""
        np.seterr(**settings.numpy_errors)
        np.set_printoptions(**settings.numpy_printing)

    def adopt_torch(self, settings: Settings) -> None:
        """Apply those of torch, likewise, and import it."""
        torch = importlib.import_module("torch")
        if self._awaits_torch:
            self._adopt_filters(settings)
        if self._own_torch is None:
            self._own_torch = _torch_values(torch)
        wanted = {**self._own_torch, **settings.torch}
        if wanted.get("default_device") in device_types() and not self._has_gpu:
            wanted["default_device"] = "cpu"
        for name, setting in _TORCH.items():
            if name in wanted:
                with contextlib.suppress(Exception):  # this version may not take it
                    if setting.get(torch) != wanted[name]:
                        setting.set(torch, wanted[name])

    def own_filters(self) -> None:
        """Go back to this process' own filters of warnings: imports may warn, as in the script."""
        self._set_filters(self._own_filters)

    def _adopt_filters(self, settings: Settings) -> None:
        has_torch = "torch" in sys.modules
        readable = [packed for packed in settings.filters if has_torch or b"torch" not in packed]
        self._awaits_torch = len(readable) < len(settings.filters)
        self._set_filters([entry for packed in readable for entry in _unpacked(packed)])

    def _set_filters(self, filters: list[Any]) -> None:
        warnings.resetwarnings()  # also has it forget what it looked up in them
        warnings.filters[:] = filters  # type: ignore[index]


# -- torch ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Setting:
    """One setting of torch: what it is by default, how it is read and set."""

    default: Any
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], Any]


def _attribute(path: str, default: Any) -> _Setting:
    owner, _, name = path.rpartition(".")
    owner_of = attrgetter(owner)
    return _Setting(default, attrgetter(path), lambda t, value: setattr(owner_of(t), name, value))


def _default_device(torch: Any) -> str:
    try:
        return str(torch.get_default_device().type)
    except AttributeError:  # torch 2.4, once one was set and then none
        return "cpu"


def _set_default_device(torch: Any, kind: str) -> None:
    torch.set_default_device(None if kind == "cpu" else kind)  # None: no detour for each call


def _sdp(kind: str, name: str) -> _Setting:
    backend = attrgetter(f"backends.{kind}")
    return _Setting(
        True,
        lambda torch: getattr(backend(torch), f"{name}_sdp_enabled")(),
        lambda torch, value: getattr(backend(torch), f"enable_{name}_sdp")(value),
    )


# In the order in which they are set: one of the coarser settings sets finer ones along. What
# `cuda.matmul.allow_tf32` says is what `float32_matmul_precision` does.
_TORCH: dict[str, _Setting] = {
    "default_dtype": _Setting(
        "float32",
        lambda torch: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda torch, name: torch.set_default_dtype(getattr(torch, name)),
    ),
    "default_device": _Setting("cpu", _default_device, _set_default_device),
    "deterministic_algorithms": _Setting(
        (False, False),
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "detect_anomaly": _Setting(
        (False, True),
        lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda torch, value: torch.autograd.set_detect_anomaly(*value),
    ),
    "printing": _Setting(
        {"precision": 4, "threshold": 1000, "edgeitems": 3, "linewidth": 80, "sci_mode": None},
        lambda torch: dict(vars(torch._tensor_str.PRINT_OPTS)),
        lambda torch, value: torch.set_printoptions(**value),
    ),
    "float32_matmul_precision": _Setting(
        "highest",
        lambda torch: torch.get_float32_matmul_precision(),
        lambda torch, value: torch.set_float32_matmul_precision(value),
    ),
    **{f"{a.type} {name}": _sdp(a.type, name) for a in ACCELERATORS for name in a.attentions},
    **{
        path: _attribute(path, default)
        for path, default in {
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
            **{path: value for each in ACCELERATORS for path, value in each.switches.items()},
            "backends.cudnn.conv.fp32_precision": "tf32",
            "backends.cudnn.rnn.fp32_precision": "tf32",
            "backends.mkldnn.matmul.fp32_precision": "none",
            "backends.mkldnn.conv.fp32_precision": "none",
            "backends.mkldnn.rnn.fp32_precision": "none",
        }.items()
    },
}


def _torch_values(torch: Any) -> dict[str, Any]:
    """All settings that this version of torch has."""
    values = {}
    with warnings.catch_warnings():  # torch's old names for TF32 are deprecated
        warnings.simplefilter("ignore")
        for name, setting in _TORCH.items():
            with contextlib.suppress(Exception):
                values[name] = setting.get(torch)
    return values


# -- the rest -------------------------------------------------------------------------------------


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _log_levels() -> dict[str, int]:
    loggers = {"root": logging.root, **logging.root.manager.loggerDict}
    return {
        name: logger.level
        for name, logger in loggers.items()
        if isinstance(logger, logging.Logger) and logger.level != logging.NOTSET
    }


def _packed(entry: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(entry))
    except Exception:
        return b""


def _unpacked(packed: bytes) -> list[Any]:
    """The filter of warnings, if it can be unpickled here."""
    try:
        return [pickle.loads(packed)]  # from the driver, on the authenticated channel
    except Exception:
        return []
