"""What each rank has added to ``trial.totals``, told to all of them while they train.

A rank that dies takes its part along. So it is told in each step: beside the gradients; or by
itself, without waiting, and by the time that it is looked at it has long arrived.
"""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from optuna_fleet.trainer.groups import group_size
from optuna_fleet.trainer.splitting import tracked

Sums = dict[str, Any]

_LEAST_BYTES = 256
_MOST_BYTES = 2**14  # a matrix of more would take more time than it is worth
_HEAD = struct.Struct("=qq")  # how many bytes there are to tell, and a note
_KINDS = {"torch.float64": np.float64, "torch.int64": np.int64}  # of tensors in totals


class SumsExchange:
    """Of one rank; all must tell equally often, and hear each before they tell the next."""

    def __init__(self) -> None:
        self.begin_run()

    def begin_run(self) -> None:
        """All ranks have as much room for what they tell."""
        self._room = _LEAST_BYTES

    def tell(self, own: Sums, note: int) -> Told:
        """Begin to tell the others, and to hear of them."""
        row = torch.frombuffer(self._row(own, note), dtype=torch.uint8)
        rows = torch.empty(group_size(), len(row), dtype=torch.uint8)
        return Told(rows, dist.all_gather(list(rows.unbind()), row, async_op=True))

    def beside(self, own: Sums, note: int) -> torch.Tensor:
        """What to add up over the ranks, for `added`, to the same end."""
        row = self._row(own, note)
        rows, begin = bytearray(group_size() * len(row)), dist.get_rank() * len(row)
        rows[begin : begin + len(row)] = row
        return torch.frombuffer(rows, dtype=torch.uint8)

    def added(self, rows: torch.Tensor) -> Told:
        """What the others have told `beside`."""
        return Told(rows.view(group_size(), -1), None)

    def _row(self, own: Sums, note: int) -> bytearray:
        tensors = [value for value in own.values() if isinstance(value, torch.Tensor)]
        least = 2 * sum(value.nbytes for value in tensors)  # what they take as text
        text = _packed(own) if least <= _MOST_BYTES else b""
        head = _HEAD.pack(len(text) or least, note)
        fitting = text if len(text) <= self._room else b""
        return bytearray(head + fitting.ljust(self._room, b"\0"))

    def hear(self, told: Told) -> int:
        """Wait for it; return the greatest note. There may be room for more next time."""
        told.wait()
        lengths, notes = zip(*told.heads(), strict=True)
        while self._room < min(max(lengths), _MOST_BYTES):
            self._room *= 2
        return int(max(notes))


class Told:
    """What all ranks have told at one step."""

    def __init__(self, rows: torch.Tensor, work: dist.Work | None) -> None:
        self._rows = rows
        self._work = work

    def wait(self) -> None:
        """Until it is there.

        Raises:
            RuntimeError: A rank is gone.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None

    def has_arrived(self) -> bool:
        """Whether it is there, as a whole; waits for nobody."""
        if self._work is not None and not self._work.is_completed():
            return False
        with suppress(RuntimeError):  # a rank is gone
            self.wait()
        room = self._rows.size(1) - _HEAD.size
        return self._work is None and all(length <= room for length, _ in self.heads())

    def heads(self) -> list[tuple[int, int]]:
        """How many bytes each rank had to tell, and its note."""
        return [_HEAD.unpack_from(row) for row in self._rows.numpy()]

    def parts(self) -> list[Sums]:
        """The sums of each rank."""
        ends = [_HEAD.size + length for length, _ in self.heads()]
        rows = [row.tobytes() for row in self._rows.numpy()]
        return [_unpacked(row[_HEAD.size : end]) for row, end in zip(rows, ends, strict=True)]


def _packed(own: Sums) -> bytes:
    """As text, which says numbers exactly and which is safe to read."""
    return json.dumps({name: _plain(value) for name, value in own.items()}).encode()


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return tracked.plain(value)
    return [str(value.dtype), value.shape, value.numpy().tobytes().hex()]


def _unpacked(text: bytes) -> Sums:
    return {
        name: _tensor(*value) if isinstance(value, list) else value
        for name, value in json.loads(text).items()
    }


def _tensor(kind: str, shape: list[int], numbers: str) -> torch.Tensor:
    flat = np.frombuffer(bytes.fromhex(numbers), dtype=_KINDS[kind])
    return torch.tensor(flat.reshape(shape))
