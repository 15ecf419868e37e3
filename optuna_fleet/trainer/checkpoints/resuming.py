"""What a run goes on from: a checkpoint, put back into what the objective makes again."""

from __future__ import annotations

import copy
from typing import Any

import torch

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.checkpoints.states import (
    add_groups,
    load_state,
    names_in,
    restore_into,
    restore_remainder,
)
from optuna_fleet.trainer.parts import Parts


class Resuming:
    """Restores prepared objects, ``trial.state`` and generators.

    Once when they are there, so that the objective sees them as they were, and once more when the
    training goes on: what came after `prepare` began anew (weights, a scheduler's first rate).
    """

    def __init__(self, saved: checkpoint.Checkpoint, parts: Parts) -> None:
        self._saved = saved = checkpoint.placed(saved, parts.device)
        self._parts = parts
        self._position = parts.position
        self._is_done = False
        parts.state.update(copy.deepcopy(saved.state))

    def prepared(self, thing: Any, position: int) -> None:
        """An object was prepared, the one at that position."""
        saved = self._saved.objects
        if position >= len(saved):
            if self._position.loop >= self._saved.loop:
                return  # made after the loop that was checkpointed
            raise TrialError(
                "trial.prepare() was called with more objects than when trial "
                f"{self._parts.run.number} was checkpointed ({len(saved)}): an objective must "
                "prepare the same objects each time."
            )
        state = saved[position]
        num_groups = len(state.get("param_groups", ()))
        groups = getattr(thing, "param_groups", None)
        if groups is not None and len(groups) < num_groups:
            return  # they were added later: see `_restore_all`
        is_module = isinstance(thing, torch.nn.Module)
        if is_module and names_in(thing) != state.keys():
            return  # it was changed between here and the loop (pruned, say), and will be again
        # Modules copy it; optimizers keep what they get.
        load_state(thing, state if is_module else copy.deepcopy(state))

    def begin_loop(self) -> int | None:
        """A loop over epochs begins; return its first one, or None if it was done before."""
        saved = self._saved
        if self._position.loop < saved.loop:
            return None
        if self._position.loop > saved.loop:
            return 0
        if saved.step is None:
            self._restore_all()
        else:  # what the epoch begins with is done again before the pass that goes on
            for position, thing in enumerate(self._parts.objects[: len(saved.objects)]):
                self.prepared(thing, position)
            state = copy.deepcopy(saved.state)
            restore_into(self._parts.state, state, self._parts.objects)
            checkpoint.restore_rng(saved.rng)
        return saved.epoch

    def check_reached(self) -> None:
        """The objective has returned: has it been in the loop that was checkpointed?

        It may return before all loops, as it knows what it has left in `FleetTrial.state`.

        Raises:
            TrialError: It has not, so that what it returns is of another training.
        """
        if 0 < self._position.loop < self._saved.loop:
            raise TrialError(
                f"Trial {self._parts.run.number} was checkpointed in loop {self._saved.loop} over "
                "trial.epochs() or trial.steps(), but when it was run again its objective "
                f"returned after {self._position.loop}: it must make the same loops each time, "
                "and none within another."
            )

    def begin_pass(self) -> tuple[int, bool]:
        """The epoch's first pass begins.

        Returns:
            The step to begin with, and whether that goes on on as many devices.
        """
        saved, run = self._saved, self._parts.run
        is_here = (self._position.loop, self._position.epoch) == (saved.loop, saved.epoch)
        if self._is_done or saved.step is None or not is_here:
            return 0, False
        self._restore_all()
        self._parts.totals.begin(saved.totals, run.rank, run.world_size)
        return saved.step, saved.step > 0 and len(saved.rng) == run.world_size

    def _restore_all(self) -> None:
        saved, self._is_done = self._saved, True
        for position, thing in enumerate(self._parts.objects[: len(saved.objects)]):
            if isinstance(thing, torch.optim.Optimizer):
                add_groups(thing, saved.remainder[position], self._parts.objects)
            load_state(thing, saved.objects[position])
            restore_remainder(thing, saved.remainder[position])
            saved.objects[position] = saved.remainder[position] = {}  # their memory is needed
        restore_into(self._parts.state, saved.state, self._parts.objects)
        checkpoint.restore_rng(saved.rng)
