"""How much of this machine the pipeline takes when the user does not say."""

from __future__ import annotations

import os
import shutil

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


DECODED_PART = 3
"""One in so many bytes is for the decoded store: what it keeps is larger than a pool's samples,
and saves less."""


def budget(memory_bytes: int | None, spill_dir: str | None) -> int:
    """Returns how many bytes of preprocessed data this machine may have, of what was asked for.

    Raises:
        FleetConfigError: It does not have that.
    """
    if spill_dir is None:
        free, part, where = available_bytes(), 4, "of memory are available here"
    else:
        free, part, where = _disk_free(spill_dir), 2, f"are free in spill_dir={spill_dir!r}"
    wanted = memory_bytes or max(LEAST_MEMORY_BYTES, free // part)
    if wanted > free and (memory_bytes or spill_dir):
        raise FleetConfigError(
            f"A SharedPipeline is to have memory_bytes={wanted}, but only {free} bytes {where}. "
            f"Make room, or give a smaller number. Left out, it is one part in {part} of that."
        )
    return wanted


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


def default_chunk_bytes(memory_bytes: int) -> int:
    """Returns the chunk size for a budget: smaller if it is tiny."""
    return min(CHUNK_BYTES, max(4096, memory_bytes // 16))


def guess_sample_bytes(chunk_bytes: int) -> int:
    """Returns a sample's size to assume where none could be measured."""
    return max(1, chunk_bytes // 32)
