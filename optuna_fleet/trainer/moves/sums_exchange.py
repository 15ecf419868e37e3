"""What each rank has added to ``trial.totals``, told to all of them while they train.

A rank that dies takes its part along. So it is told in each step: beside the gradients; or by
itself, without waiting, and by the time that it is looked at it has long arrived.
"""

from __future__ import annotations

import json
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
_HEAD_BYTES = 16  # the length of what follows, and a note
_KINDS = {"torch.float64": np.float64, "torch.int64": np.int64}  # of tensors in totals


class SumsExchange:
    """Of one rank; all must tell equally often, and look at each before they tell the next."""

    def __init__(self) -> None:
        self.begin_run()

    def begin_run(self) -> None:
        """All ranks have as much room for what they tell."""
        self._room = _LEAST_BYTES

    def tell(self, own: Sums, note: int) -> Told:
        """Begin to tell the others, and to hear of them.

        Args:
            own: This rank's sums.
            note: A number besides.
        """
        row = self._row(own, note)
        rows = torch.empty(group_size(), len(row), dtype=torch.uint8)
        work = dist.all_gather(list(rows.unbind()), row, async_op=True)
        assert work is not None
        return Told(work, rows)

    def beside(self, own: Sums, note: int) -> torch.Tensor:
        """What to add up over the ranks, for `added`, to the same end."""
        row = self._row(own, note)
        rows = torch.zeros(group_size(), len(row), dtype=torch.uint8)
        rows[dist.get_rank()] = row
        return rows.flatten()

    def added(self, rows: torch.Tensor) -> Told:
        """What the others have told `beside`."""
        return Told(None, rows.view(group_size(), -1))

    def _row(self, own: Sums, note: int) -> torch.Tensor:
        tensors = [value for value in own.values() if isinstance(value, torch.Tensor)]
        least = 2 * sum(value.nbytes for value in tensors)  # what they take as text
        text = _packed(own) if least <= _MOST_BYTES else b""
        row = torch.zeros(_HEAD_BYTES + self._room, dtype=torch.uint8)
        row[:_HEAD_BYTES].view(torch.int64)[:] = torch.tensor([len(text) or least, note])
        if text and len(text) <= self._room:
            row[_HEAD_BYTES : _HEAD_BYTES + len(text)] = torch.frombuffer(
                bytearray(text), dtype=torch.uint8
            )
        return row

    def hear(self, told: Told) -> bool:
        """Wait for it; return whether there was room for all. If not, there may be next time."""
        told.wait()
        most = min(max(told.lengths()), _MOST_BYTES)
        while self._room < most:
            self._room *= 2
        return told.is_whole()


class Told:
    """What all ranks have told at one step."""

    def __init__(self, work: dist.Work | None, rows: torch.Tensor) -> None:
        self._work = work
        self._rows = rows

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
        return self._work is None and self.is_whole()

    def lengths(self) -> list[int]:
        """Bytes that each rank had to tell."""
        return [length for length, _ in self._heads()]

    def greatest_note(self) -> int:
        """The greatest number that any rank has told besides."""
        return max(note for _, note in self._heads())

    def _heads(self) -> list[list[int]]:
        heads: list[list[int]] = self._rows[:, :_HEAD_BYTES].clone().view(torch.int64).tolist()
        return heads

    def is_whole(self) -> bool:
        """Whether there was room for what each rank had to tell."""
        return max(self.lengths()) <= self._rows.size(1) - _HEAD_BYTES

    def parts(self) -> list[Sums]:
        """The sums of each rank."""
        ends = [_HEAD_BYTES + length for length in self.lengths()]
        rows = [row.numpy().tobytes() for row in self._rows]
        return [_unpacked(row[_HEAD_BYTES:end]) for row, end in zip(rows, ends, strict=True)]


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
