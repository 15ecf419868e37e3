"""Errors, named by what happens next.

``FleetConfigError``: nothing was started; change the call. ``TrialError``: one trial fails, the
others go on. ``RetryableError``: the work is tried again elsewhere. Any other ``FleetError`` ends
the sweep.
"""

from __future__ import annotations

from collections.abc import Iterable

from optuna_fleet.accelerator import ACCELERATORS


class FleetError(Exception):
    """Base class of every error raised by optuna-fleet."""


class FleetConfigError(FleetError, ValueError):
    """An argument or an environment that can't work; raised before any trial starts."""


class OutsideFleetError(FleetConfigError, AttributeError):
    """A trial that no FleetExecutor runs was asked for what only those have that one runs."""


class RetryableError(FleetError):
    """The work can be tried again on other devices."""


class LaunchError(RetryableError):
    """A process of the fleet could not be started."""


class TrainerLostError(RetryableError):
    """A trainer process died, or lost its peers, while it ran a trial."""


class PipelineLostError(RetryableError):
    """The process that serves the shared pipeline has ended; in a sweep, with it its node."""


class TrialError(FleetError):
    """One trial can't go on; the other trials are not affected."""


class PreprocessingError(TrialError):
    """A sample could not be preprocessed; carries the data set's name, index and traceback."""


class TrialTimeoutError(TrialError, TimeoutError):
    """A trial took longer than `trial_s`."""


class OutOfMemoryError(TrialError, MemoryError):
    """A trial took more than `trial_memory_bytes`, or the kernel killed it for want of memory."""


class StorageLostError(FleetError):
    """The study's storage was gone for longer than `storage_patience_s`."""


class RemoteObjectiveError(TrialError):
    """In the place of an exception of the objective whose own type can't be sent to the driver."""


class ProtocolError(FleetError):
    """A message on the control channel breaks the protocol, or its sender has no secret."""


_PEERS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout",
)


def is_for_want_of_peers(error: BaseException) -> bool:
    """Whether torch raised an exception because other ranks of a collective are gone, or silent.

    Gloo's errors have no type of their own.
    """
    if is_out_of_memory(error):  # to send needs some too
        return False
    if {"DistBackendError", "DistNetworkError", "DistStoreError"} & _names(error):
        return not _says(error, ("invalid usage", "invalid argument"))
    is_of_gloo = isinstance(error, RuntimeError) and _says(error, ("gloo/transport",))
    return is_of_gloo and _says(error, _PEERS_GONE)


def is_of_device(error: BaseException) -> bool:
    """Whether a GPU has failed, whatever it was asked to do.

    Illegal accesses and failed assertions are no such errors: mostly they are the program's.
    """
    told = (words for each in ACCELERATORS for words in each.failures)
    return isinstance(error, RuntimeError) and _says(error, told)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, of whatever library, means that memory ran out."""
    if {"MemoryError", "OutOfMemoryError"} & _names(error):  # the second is torch's
        return True
    of_groups = (words for each in ACCELERATORS for words in each.wants_memory)
    told = ("can't allocate memory", "out of memory", "ALLOC_FAILED", *of_groups)
    return isinstance(error, RuntimeError) and _says(error, told)


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _says(error: BaseException, any_of: Iterable[str]) -> bool:
    """Whether its text contains one of these; false if its `__str__` fails."""
    try:
        text = str(error)
    except Exception:
        return False
    return any(words in text for words in any_of)


def shown(value: object) -> str:
    """Return its `repr`, or a description where that fails."""
    try:
        return repr(value)
    except Exception as trouble:
        return f"<{type(value).__qualname__}, whose repr raises {type(trouble).__qualname__}>"
