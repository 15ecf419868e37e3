"""What is kept of a trial: captured as one where it stops, and restored as one where it goes on.

That is what was prepared and what its ``state_dict`` leaves out, ``trial.state``, the sums of
``trial.totals``, random generators, reports, and the place in the loops over epochs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from optuna_fleet.exceptions import FleetConfigError, TrialError
from optuna_fleet.trainer import checkpoint
from optuna_fleet.trainer.checkpoint import Captured, Checkpoint, captured
from optuna_fleet.trainer.gradients import collectives
from optuna_fleet.trainer.randomness import rng_state
from optuna_fleet.trainer.run_parts import Parts
from optuna_fleet.trainer.states import (
    add_groups,
    load_state,
    names_in,
    remainder_of,
    restore_into,
    restore_remainder,
    state_of,
    uncompiled,
)


class InParts(Protocol):
    """What was prepared, if each rank has some of its state; all ranks call it alike."""

    def gather(self) -> None:
        """Have on rank 0 what the others hold."""

    def release(self) -> None:
        """Forget what the others hold."""


class TrainingState:
    """Of one rank.

    Attributes:
        objects: What was prepared so far.
        in_parts: The model, the first of the objects, and its optimizer, if they are in stages.
    """

    def __init__(self, parts: Parts) -> None:
        self.objects = parts.objects
        self.in_parts: InParts | None = None
        self._parts = parts
        self._session = parts.session
        self._position = parts.position
        self._user = parts.user
        self._called: list[str] = []
        self._names: list[frozenset[str]] = []  # in modules, where the loop began
        self._saved: Checkpoint | None = None
        self._is_restored = False

    # -- where it stops ---------------------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        """Whether the objective began anew, to go on with what was captured."""
        return self._saved is not None

    @property
    def is_empty(self) -> bool:
        """Whether nothing that could be kept is trained."""
        return self._position.reads_unprepared and not self.objects

    @property
    def has_pending_gradients(self) -> bool:
        """Whether gradients wait for the step of some optimizer, and must be kept."""
        return self._parts.reducer.awaits_step_of(self.objects)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within it rank 0 has what there is to capture; if it is in parts, all ranks enter."""
        if self.in_parts is None:
            yield
            return
        self.in_parts.gather()
        try:
            yield
        finally:
            self.in_parts.release()

    def meet(self, step: int | None) -> list[dict[str, Any]]:
        """Called on all ranks where they stop, before a step of the first pass or at the end.

        Returns of each its random generators, and what it has added to ``trial.totals``.

        Raises:
            TrialError: They have come apart.
        """
        self._parts.net.check()
        totals = {} if step is None else self._parts.totals.own
        return collectives.gather({"rng": rng_state(), "totals": totals})

    def capture(self, step: int | None, ranks: list[dict[str, Any]]) -> Captured:
        """Capture the trial where its `ranks` have met, while `gathered`; on rank 0.

        It raises as `captured` does.
        """
        self._check_names()
        return captured(
            self._content(
                epoch=self._position.epoch + (step is None),
                rng=[own["rng"] for own in ranks],
                totals=[own["totals"] for own in ranks if step is not None],
                step=step,
            )
        )

    def weights(self) -> Captured:
        """Capture what it has learned, not to go on with, while `gathered`; on rank 0."""
        return captured(self._content(epoch=self._position.epoch + 1, rng=[]))

    def _content(self, **where: Any) -> Checkpoint:
        return Checkpoint(
            loop=self._position.loop,
            objects=[state_of(thing) for thing in self.objects],
            state=self._user,
            history=dict(self._session.reports.values),
            modules=[i for i, thing in enumerate(self.objects) if self._is_module(i, thing)],
            names=self._called,
            remainder=remainder_of(self.objects, with_gradients=self.has_pending_gradients),
            **where,
        )

    def _is_module(self, place: int, thing: Any) -> bool:
        return isinstance(thing, torch.nn.Module) or (self.in_parts is not None and place == 0)

    def _check_names(self) -> None:
        """Check that modules, as they are where the loop begins, could take what they have now."""
        for thing, then in zip(self.objects, self._names, strict=False):
            if changed := sorted(names_in(thing) ^ then):
                raise FleetConfigError(
                    f"Parameters or buffers of the {type(thing).__name__} were added or removed "
                    f"since the loop over epochs began ({', '.join(changed[:3])}), which the "
                    "model that the objective makes could not take. Change it between two loops: "
                    "trial.epochs(5), then prune it, say, then trial.epochs(5)."
                )

    # -- where it goes on -------------------------------------------------------------------------
    # Objects are restored when they are prepared, so that the objective sees them as they were,
    # and all once more where the training goes on: what came after `prepare` began anew (weights,
    # a scheduler's first rate).

    def go_on_with(self, saved: Checkpoint, device: torch.device) -> None:
        """The objective begins anew, to go on from there."""
        self._saved = saved = checkpoint.placed(saved, device)
        self._user.update(copy.deepcopy(saved.state))
        self._session.reports.begin_with(saved.history)

    def add(self, thing: Any, name: str = "") -> bool:
        """An object was prepared, by that name if it has one; whether it was restored, on all."""
        self.objects.append(thing)
        with uncompiled(thing) as own:
            self._called.append(name or type(own).__name__)
        if self._saved is not None:
            return self._restore(thing, len(self.objects) - 1, self._saved)
        if isinstance(thing, torch.optim.Optimizer) and thing.state:
            thing.load_state_dict(thing.state_dict())  # moves it to where the parameters are
        return False

    def _restore(self, thing: Any, position: int, saved: Checkpoint) -> bool:
        if position >= len(saved.objects):
            if self._position.loop >= saved.loop:
                return False  # made after the loop that was checkpointed
            raise TrialError(
                "trial.prepare() was called with more objects than when trial "
                f"{self._session.run.number} was checkpointed ({len(saved.objects)}): an "
                "objective must prepare the same objects each time."
            )
        state = saved.objects[position]
        num_groups = len(state.get("param_groups", ()))
        groups = getattr(thing, "param_groups", None)
        if groups is not None and len(groups) < num_groups:
            return False  # they were added later: see `_restore_all`
        is_module = isinstance(thing, torch.nn.Module)
        if is_module and names_in(thing) != state.keys():
            return False  # it was changed from here to the loop (pruned, say), and will be again
        load_state(thing, _kept(thing, state))
        return True

    def begin_loop(self) -> int | None:
        """A loop over epochs begins; return its first one, or None if it was done before."""
        saved = self._saved
        if saved is not None and self._position.loop < saved.loop:
            return None
        first = 0
        if saved is not None and self._position.loop == saved.loop:
            first = saved.epoch
            if saved.step is None:
                self._restore_all(saved)
            else:  # what the epoch begins with is done again before the pass that goes on
                self._restore_for_epoch(saved)
        self._names = list(map(names_in, self.objects))
        return first

    def _restore_for_epoch(self, saved: Checkpoint) -> None:
        for position, thing in enumerate(self.objects[: len(saved.objects)]):
            self._restore(thing, position, saved)
        restore_into(self._user, copy.deepcopy(saved.state), self.objects)
        checkpoint.restore_rng(saved.rng)

    def first_step(self) -> tuple[int, bool]:
        """The epoch's first pass begins, which can be left in its midst.

        Returns the step to begin with, and whether that goes on on as many devices.
        """
        saved, run = self._saved, self._session.run
        if saved is None or saved.step is None or self._is_restored:
            return 0, False
        if (self._position.loop, self._position.epoch) != (saved.loop, saved.epoch):
            return 0, False
        self._restore_all(saved)
        self._parts.totals.begin(saved.totals, run.rank, run.world_size)
        return saved.step, saved.step > 0 and len(saved.rng) == run.world_size

    def _restore_all(self, saved: Checkpoint) -> None:
        self._is_restored = True
        for position, thing in enumerate(self.objects[: len(saved.objects)]):
            if isinstance(thing, torch.optim.Optimizer):
                add_groups(thing, saved.remainder[position], self.objects)
            load_state(thing, _kept(thing, saved.objects[position]))
            restore_remainder(thing, saved.remainder[position])
        restore_into(self._user, copy.deepcopy(saved.state), self.objects)
        checkpoint.restore_rng(saved.rng)
        # Its memory is needed.
        nothing = [dict[str, Any]() for _ in saved.objects]
        self._saved = replace(saved, objects=nothing, remainder=[], state={}, rng=[], totals=[])

    def check_reached(self) -> None:
        """The objective has returned: has it been in the loop that was captured?

        It may return before all loops, as it knows what it has left in `FleetTrial.state`.

        Raises:
            TrialError: It has not, so that what it returns is of another training.
        """
        if self._saved is not None and 0 < self._position.loop < self._saved.loop:
            raise TrialError(
                f"Trial {self._session.run.number} was checkpointed in loop {self._saved.loop} "
                "over trial.epochs() or trial.steps(), but when it was run again its objective "
                f"returned after {self._position.loop}: it must make the same loops each time, "
                "and none within another."
            )


def _kept(thing: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Modules copy their state; optimizers keep what they get."""
    return state if isinstance(thing, torch.nn.Module) else copy.deepcopy(state)
