"""Data sets that give many samples at once (``__getitems__``), where the user asks for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from optuna_fleet.pipeline.spec import TOGETHER


class Together:
    """Gives ``dataset[index]``, by way of ``__getitems__``.

    Which samples are read together depends on the order of the epoch alone: those at positions 0
    to 31, 32 to 63, and so on, as one sample would be, seeded as the first of them. So what they
    draw, and what they are padded to, is the same in every process and whatever the chunks.

    ``places`` returns the places in the order of an epoch from one position on, and ``begin`` is
    called for an epoch and a place before a sample is made.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        length: int,
        places: Callable[[int, int], Sequence[int]],
        begin: Callable[[int, int], None],
        may_skip: bool,
    ) -> None:
        self.dataset = dataset
        self._length = length
        self._places = places
        self._begin = begin
        self._may_skip = may_skip
        self._wanted: tuple[int, int | None] = (0, None)
        self._group: tuple[int, int] | None = None
        self._found: dict[int, Any] | None = None  # by position; None to read one by one

    def at(self, epoch: int, position: int | None) -> None:
        """Tells which sample is asked for next; None: one that is not at its own position."""
        self._wanted = epoch, position

    def is_one_of_many(self) -> bool:
        """Returns whether the sample that was told of is read with others, or has been."""
        epoch, position = self._wanted
        if position is None:
            return False
        return self._found is not None or self._group != (epoch, position - position % TOGETHER)

    def rest(self, positions: range) -> list[Any]:
        """Returns, of the samples at these positions, those that were read with the last one."""
        found = self._found or {}
        return [found.pop(position) for position in takewhile(found.__contains__, positions)]

    def __getitem__(self, index: int) -> Any:
        """Returns the sample.

        Raises:
            ValueError: ``__getitems__`` gave fewer samples than it was asked for, or more.
            Exception: What it raises.
        """
        epoch, position = self._wanted
        if position is None:
            return self.dataset[index]
        group = epoch, position - position % TOGETHER
        # Each is given once: whoever has it may write into it.
        if group != self._group or (self._found is not None and position not in self._found):
            self._group, self._found = None, None
            self._found = self._read(*group, position)
            self._group = group
        return self.dataset[index] if self._found is None else self._found.pop(position)

    def _read(self, epoch: int, start: int, position: int) -> dict[int, Any] | None:
        places = self._places(epoch, start)
        indices = [place % self._length for place in places]
        self._begin(epoch, places[0])
        try:
            samples = list(self.dataset.__getitems__(indices))
        except Exception:
            if not self._may_skip:
                raise
            self._begin(epoch, places[position - start])
            return None  # one by one, to see which is to be skipped
        if len(samples) != len(indices):
            raise ValueError(
                f"__getitems__ gave {len(samples)} samples for {len(indices)} indices"
            )
        return dict(enumerate(samples, start))
