"""The parameter server of a piece of the model (HetPipe, section 5)."""

from __future__ import annotations

import torch
from typing_extensions import assert_never

from optuna_fleet.trainer.pipeline_parallel.messages import (
    Activations,
    Gradients,
    Inputs,
    Message,
    Pull,
    Push,
    ServerAddress,
    Snapshot,
    StageAddress,
    Targets,
    Tensors,
    Transport,
)
from optuna_fleet.trainer.pipeline_parallel.updates import added
from optuna_fleet.wsp.schedules import check_clocks


class ParameterServer:
    """Adds up waves: a wave's updates are in the weights once all virtual workers pushed it.

    They are added in the order of virtual workers, so weights of a clock do not depend on who was
    faster.

    Args:
        weights: w_0 of the piece; is copied.
        clock_distance: D; what was pushed may be one wave further apart.
    """

    def __init__(
        self,
        *,
        address: ServerAddress,
        weights: Tensors,
        num_workers: int,
        clock_distance: int,
        transport: Transport,
    ) -> None:
        self._address = address
        self._transport = transport
        self._clock_distance = clock_distance
        self._snapshots: dict[int, Tensors] = {
            0: {name: w.detach().clone() for name, w in weights.items()}
        }
        self._pushed = [0] * num_workers
        self._waves: dict[int, dict[int, Tensors]] = {}
        self._parked: list[Pull] = []
        self._seen = [0] * num_workers

    @property
    def clock(self) -> int:
        """Waves that every virtual worker has pushed: c_global."""
        return min(self._pushed)

    @property
    def weights(self) -> Tensors:
        """w_global, at the clock."""
        return self._snapshots[self.clock]

    @property
    def num_snapshots(self) -> int:
        """Versions that are kept, as some virtual worker may ask for them."""
        return len(self._snapshots)

    def receive(self, message: Message) -> None:
        """Take a push, or answer a pull as soon as its weights are there."""
        match message:
            case Push():
                self._push(message)
            case Pull():
                if not self._answer(message):
                    self._parked.append(message)
            case Inputs() | Activations() | Targets() | Gradients() | Snapshot():
                raise AssertionError(f"{self._address} is no stage")
            case _:
                assert_never(message)

    @torch.no_grad()
    def _push(self, push: Push) -> None:
        if push.wave != self._pushed[push.worker]:
            raise AssertionError(
                f"Virtual worker {push.worker} pushed wave {push.wave}, but "
                f"{self._pushed[push.worker]} is next."
            )
        before = self.clock
        self._waves.setdefault(push.wave, {})[push.worker] = push.updates
        self._pushed[push.worker] += 1
        check_clocks(self._pushed, self._clock_distance)
        if self.clock > before:
            self._advance(before)
            self._parked = [pull for pull in self._parked if not self._answer(pull)]

    def _advance(self, wave: int) -> None:
        weights = self._snapshots[wave]
        for _, updates in sorted(self._waves.pop(wave).items()):
            weights = added(weights, updates)
        self._snapshots[wave + 1] = weights
        self._forget()

    def _answer(self, pull: Pull) -> bool:
        if pull.clock > self.clock:
            return False
        clock = pull.clock if pull.exactly else self.clock
        self._seen[pull.asker.worker] = max(self._seen[pull.asker.worker], clock)
        self._reply(pull.asker, clock)
        self._forget()
        return True

    def _reply(self, asker: StageAddress, clock: int) -> None:
        weights = self._snapshots[clock]
        snapshot = Snapshot(piece=self._address.piece, clock=clock, weights=weights)
        self._transport.send(self._address, asker, snapshot)

    def _forget(self) -> None:
        """Virtual workers ask for newer and newer weights."""
        oldest = min(self._seen)
        kept = {c: w for c, w in self._snapshots.items() if c >= oldest or c == self.clock}
        self._snapshots = kept
