"""The orders of epochs, drawn once per node, in memory that all its preprocessors share."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from optuna_fleet.pipeline.spec import PipelineSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_BYTES = 64 << 20
"""The orders of a data set take no more, unless two of them do."""

_ITEM_BYTES = 8


class OrderFile:
    """Orders of a data set's epochs. Memory is taken as they are drawn; later ones take it over.

    Processes forked from the one that made it share it. Who is killed while drawing leaves nothing
    behind, not even a lock.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._num_slots = min(max(MOST_BYTES // (length * _ITEM_BYTES), 2), 64)
        self._fd = os.memfd_create("optuna-fleet-orders", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, self._num_slots * (1 + length) * _ITEM_BYTES)

    def read(
        self, epoch: int, start: int, stop: int, draw: Callable[[], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """Returns positions [start, stop) of the order of an epoch.

        ``draw`` returns the whole order; called if nobody has, while others wait for it.
        """
        slot = epoch % self._num_slots
        epochs, orders = self._memory
        part: NDArray[np.int64] = orders[slot, start:stop]
        with locked(self._fd, fcntl.LOCK_SH, slot):
            if epochs[slot] == epoch + 1:
                return np.array(part)
        with locked(self._fd, fcntl.LOCK_EX, slot):
            if epochs[slot] != epoch + 1:
                order = draw()
                epochs[slot] = 0
                orders[slot] = order
                epochs[slot] = epoch + 1
            return np.array(part)

    @cached_property
    def _memory(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which epoch is in each slot (+ 1; 0 for none), and its order."""
        memory = np.frombuffer(mmap.mmap(self._fd, 0), np.int64)
        return memory[: self._num_slots], memory[self._num_slots :].reshape(-1, self._length)


@contextmanager
def locked(fd: int, how: int, slot: int = 0) -> Iterator[None]:
    """Holds a lock on a slot of a file; who is killed meanwhile holds it no more."""
    # A lock of the process, not of the descriptor, which the others have as well.
    fcntl.lockf(fd, how, 1, slot)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, slot)


def order_files(spec: PipelineSpec) -> dict[str, OrderFile]:
    """Returns a file for each data set that has orders."""
    return {each.name: OrderFile(each.num_samples) for each in spec.datasets if each.has_order}
