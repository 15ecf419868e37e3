"""How much of this machine the pipeline takes when the user does not say."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.machine_memory import available_bytes

LEAST_MEMORY_BYTES = 64 << 20
"""The default is no smaller: one of nothing would only fail later, with another message."""

NICENESS = 15
"""Added to the niceness of preprocessors where trials compute on the CPU.

Trainers then keep nearly all of their speed (docs/data.md has a measurement). When they
wait for data, preprocessors have their cores.
"""

STUCK_S = 600.0
"""A preprocessor that works on one sample for longer is replaced, where there is no executor.

Those of an executor have half of its ``hang_s``.
"""

CHUNK_BYTES = 20 << 20
"""Size of a chunk aimed at: 32 images of 3 x 224 x 224 in float32.

So that usual batches lie within one: putting a batch together from several costs three times as
much as reading it. Larger ones would only keep the first reader waiting.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user asks for; None where the machine decides.

    Attributes:
        memory_bytes: Memory for preprocessed data.
        decoded_bytes: Most of it for the decoded store; 0 for none.
        spill_dir: Folder for what does not fit.
        spill_bytes: Most bytes in that folder.
        chunk_bytes: Size of a chunk to aim at.
    """

    memory_bytes: int | None = None
    decoded_bytes: int | None = None
    spill_dir: str | None = None
    spill_bytes: int | None = None
    chunk_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What the pipeline of a node may take: what is `Wanted`, or else what the machine decides."""

    memory_bytes: int
    decoded_bytes: int
    spill_dir: str | None = None
    spill_bytes: int = 0
    chunk_bytes: int


def budgets(wanted: Wanted) -> Budgets:
    """Returns what a pipeline may take on this machine, of what the user asks for.

    Raises:
        FleetConfigError: The machine does not have what was asked for.
    """
    memory_bytes = wanted.memory_bytes or default_memory_bytes()
    decoded_bytes = wanted.decoded_bytes
    if decoded_bytes is None:
        decoded_bytes = memory_bytes // 3  # what it keeps is larger, and saves less, than a pool
    spill_bytes = 0
    if wanted.spill_dir is not None:
        spill_bytes = wanted.spill_bytes or _disk_free(wanted.spill_dir) // 2
    return Budgets(
        memory_bytes=memory_bytes,
        decoded_bytes=min(decoded_bytes, most_decoded_bytes(memory_bytes)),
        spill_dir=wanted.spill_dir,
        spill_bytes=spill_bytes,
        chunk_bytes=wanted.chunk_bytes or default_chunk_bytes(memory_bytes),
    )


def check_sense(wanted: Wanted) -> None:
    """Raises FleetConfigError if what the user asks for would do no good on any machine."""
    if wanted.spill_bytes is not None and wanted.spill_dir is None:
        raise FleetConfigError(
            f"SharedPipeline was given spill_bytes={wanted.spill_bytes}, but no spill_dir: "
            "nothing would be spilled. Give a folder on a local disk too, or leave both out."
        )
    if wanted.memory_bytes is not None:
        _check_decoded(wanted.decoded_bytes, wanted.memory_bytes)


def _check_decoded(decoded_bytes: int | None, memory_bytes: int) -> None:
    most = most_decoded_bytes(memory_bytes)
    if decoded_bytes is not None and decoded_bytes > most:
        raise FleetConfigError(
            f"SharedPipeline was given decoded_bytes={decoded_bytes}, but that must be at most "
            f"{most}: the decoded store is a part of memory_bytes, which is {memory_bytes} here, "
            "and preprocessed samples need the rest. Give less, leave it out for a third, or give "
            "a larger memory_bytes."
        )


def most_decoded_bytes(memory_bytes: int) -> int:
    """Returns how much of a budget the decoded store may take; the rest is for what it makes."""
    return memory_bytes * 7 // 8


def check(wanted: Wanted) -> None:
    """Raises FleetConfigError if this machine does not have what the user asks for."""
    if wanted.memory_bytes is None:
        _check_decoded(wanted.decoded_bytes, default_memory_bytes())
    elif wanted.memory_bytes > available_bytes():
        raise FleetConfigError(
            f"SharedPipeline was given memory_bytes={wanted.memory_bytes}, but only "
            f"{available_bytes()} bytes of memory are available here. Leave it out for a quarter "
            "of these."
        )
    if wanted.spill_dir is not None:
        free = _disk_free(wanted.spill_dir)
        if wanted.spill_bytes is not None and wanted.spill_bytes > free:
            raise FleetConfigError(
                f"SharedPipeline was given spill_bytes={wanted.spill_bytes}, but only {free} "
                f"bytes are free in {wanted.spill_dir}."
            )


def _disk_free(folder: str) -> int:
    """Bytes free in a folder where files can be made."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600))
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise FleetConfigError(
            f"SharedPipeline was given spill_dir={folder!r}, where no file can be made "
            f"({error.strerror}). Give an existing folder on a local disk that can be written to."
        ) from error


def default_preprocessors(cpus: int, *, cpu_slots: bool) -> int:
    """Returns for how many preprocessors to set cores aside, of ``cpus`` that a node may use.

    With ``cpu_slots`` the trials themselves compute on those cores (no accelerators).
    """
    return max(1, cpus // 4) if cpu_slots else max(1, min(16, cpus // 2))


def most_preprocessors(cpus: int, *, num_slots: int, cpu_slots: bool) -> int:
    """Returns up to how many preprocessors to run where they are as many as are needed.

    Beside accelerators all ``cpus`` but one per trainer, which has kernels to launch. Where trials
    compute on the CPU half of the cores, which are theirs first: see `NICENESS`.
    """
    return max(1, cpus // 2 if cpu_slots else cpus - num_slots)


def default_memory_bytes() -> int:
    """Returns a quarter of the memory that is available."""
    return max(LEAST_MEMORY_BYTES, available_bytes() // 4)


def default_chunk_bytes(memory_bytes: int) -> int:
    """Returns the chunk size for a budget: smaller if it is tiny."""
    return min(CHUNK_BYTES, max(4096, memory_bytes // 16))


def guess_sample_bytes(chunk_bytes: int) -> int:
    """Returns a sample's size to assume where none could be measured."""
    return max(1, chunk_bytes // 32)
