"""A trial of one rank that moves once: its objective is run twice, in this process."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from optuna_fleet.trainer.began_anew import BeganAnew, Left
from optuna_fleet.trainer.reports import Reports
from optuna_fleet.trainer.session import Yielded

NUM_EPOCHS, NUM_BATCHES = 4, 3

Place = tuple[int, int]
"""An epoch, and the batch of it that is next: 0 is between two epochs."""


class MovingTrial:
    """Restores what is prepared, and `state`, where the loop goes on.

    Args:
        leaves_at: The objective is left there.
        number: Of the run.
        rank: It looks if it is 0.
    """

    def __init__(self, leaves_at: Place | None, number: int, rank: int) -> None:
        self.state: dict[str, Any] = {}
        self.world_size = 1 + number
        self.is_resumed = number > 0
        self.left: Left | None = None
        self.told: list[str] = []
        self.names: set[str] = set()
        self._leaves_at = leaves_at
        self._begins_at: Place = (0, 0)
        self._is_left = False
        self._objects: list[Any] = []
        self._modules: list[torch.nn.Module] = []
        self._restored: list[Any] = []
        self._session: Any = SimpleNamespace(
            run=SimpleNamespace(rank=rank),
            began=time.perf_counter(),
            remark=self._remark,
            reports=Reports(False),
        )
        self._look(None)

    def _look(self, left: Left | None) -> None:
        self._began_anew = BeganAnew(
            self._session,
            objects=self._objects,
            modules=self._modules,
            state=self.state,
            left=left,
        )

    def _remark(self, keys: list[str], text: str) -> None:
        self.told.append(text)
        self.names.update(key.split(" of ")[0].rpartition("/")[2] for key in keys)

    def go_on_from(self, other: MovingTrial, left: Left | None) -> None:
        assert other._leaves_at is not None
        self.left = left
        self._begins_at = other._leaves_at
        self.state.update(copy.deepcopy(other.state))
        self._restored = [copy.deepcopy(thing.state_dict()) for thing in other._objects]
        self._look(left)

    def leave(self, error: Yielded) -> Left | None:
        assert self._leaves_at is not None
        return self._began_anew.left(error, is_within=self._leaves_at[1] > 0)

    def _come_to(self, *place: int) -> None:
        self._is_left = place == self._leaves_at
        self.check()

    def report(self, value: float, step: int) -> None:
        self._session.reports.add(value, step)

    def check(self) -> None:
        if self._is_left:
            raise Yielded

    def prepare(self, *objects: Any) -> Any:
        for thing in objects:
            if len(self._objects) < len(self._restored):
                thing.load_state_dict(self._restored[len(self._objects)])
            self._objects.append(thing)
            if isinstance(thing, torch.nn.Module):
                self._modules.append(thing)
        return objects[0] if len(objects) == 1 else objects

    def epochs(self, number: int = NUM_EPOCHS) -> Iterator[int]:
        first, _ = self._begins_at
        for self._epoch in range(first, number):
            if self._epoch == first:
                self._began_anew.begin_loop()
            yield self._epoch
            self._come_to(self._epoch + 1, 0)

    def batches(self) -> Iterator[torch.Tensor]:
        epoch, first = self._begins_at
        for step in range(first if self._epoch == epoch else 0, NUM_BATCHES):
            self._began_anew.begin_batch()
            if step:
                self._come_to(self._epoch, step)
            yield torch.full((2,), 1.0 + self._epoch + step / NUM_BATCHES)


def fly(
    objective: Callable[[Any], Any], leaves_at: Place = (2, 0), *, rank: int = 0
) -> MovingTrial:
    """Return the trial as it is in its second run."""
    first, second = MovingTrial(leaves_at, 0, rank), MovingTrial(None, 1, rank)
    try:
        try:
            objective(first)
        finally:
            first.check()  # raised again, as by a session
    except Yielded as error:
        packed = pickle.dumps(first.leave(error))
    assert len(packed) < 10_000
    second.go_on_from(first, pickle.loads(packed))
    objective(second)
    return second
