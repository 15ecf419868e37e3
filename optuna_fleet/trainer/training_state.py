"""What an objective has given to `FleetTrial.prepare`, and what is kept of its trial.

That is captured as one where the trial stops, and restored as one where it goes on: what was
prepared and what its ``state_dict`` leaves out, ``trial.state``, the sums of ``trial.totals``,
random generators, reports, and the place in the loops over epochs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from optuna_fleet.arguments import check_that, is_a
from optuna_fleet.exceptions import FleetConfigError, TrialError
from optuna_fleet.trainer import checkpoint
from optuna_fleet.trainer.checkpoint import Captured, Checkpoint, captured
from optuna_fleet.trainer.gradients import batchnorm, collectives
from optuna_fleet.trainer.gradients.replicas import check_same, check_together, make_same
from optuna_fleet.trainer.groups import group_size
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

OPTIONS = ("min_devices", "max_devices", "kind")
"""Keywords of `FleetTrial.prepare` that are no objects."""

_TAKES = (
    "modules, optimizers, schedulers and other objects with `state_dict` and `load_state_dict`"
)
_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


class InParts(Protocol):
    """What was prepared, if each rank has some of its state; all ranks call it alike."""

    def gather(self) -> None:
        """Have on rank 0 what the others hold."""

    def release(self) -> None:
        """Forget what the others hold."""


class TrainingState:
    """Of one rank.

    Attributes:
        state: `trial.state`.
        objects: What was prepared so far; it trains on one device, or data parallel on several.
        modules: Those of them that are modules.
        in_parts: The model, the first of the objects, and its optimizer, if they are in stages.
    """

    def __init__(self, parts: Parts) -> None:
        self.state: dict[str, Any] = {}
        self.objects: list[Any] = []
        self.modules: list[torch.nn.Module] = []
        self.in_parts: InParts | None = None
        self._parts = parts
        self._session = parts.session
        self._position = parts.position
        self._kind: str | None = None  # as the user calls it
        self._called: list[str] = []
        self._names: list[frozenset[str]] = []  # in modules, where the loop began
        self._saved: Checkpoint | None = None
        self._is_restored = False

    # -- what is prepared -------------------------------------------------------------------------

    def traits(self, reads: str) -> frozenset[str]:
        """Of a trial that `reads` its batches so, see `Model`; none where it is not checked."""
        if self._parts.widths.bounds.min_devices > 1 or self.in_parts is not None:
            return frozenset()
        if self._kind is not None:
            return frozenset({f"of the kind {self._kind}"})
        parts = [part for module in self.modules for part in module.modules()]
        tensors = (tensor for module in self.modules for tensor in module.parameters())
        choices = self._parts.session.choices.items()
        return frozenset(
            {
                reads,
                *(f"{type(x).__module__}.{type(x).__qualname__}" for x in self.objects),
                *(f"{type(part).__module__}.{type(part).__qualname__}" for part in parts),
                *(str(tensor.dtype) for tensor in tensors),
                *(f"{name}={choice}" for name, choice in choices),
            }
        )

    def prepare(
        self, objects: Sequence[Any], named: Mapping[str, Any], kind: str | None = None
    ) -> None:
        """Take more of them, some as the user calls them.

        Raises:
            FleetConfigError: One has no state that can be saved, or is lazy, or a wrapper that
                trains data parallel itself, or there is none.
        """
        check_that("kind", kind, is_a(str), "be a word, as 'resnet'", optional=True)
        self._kind = kind or self._kind
        called = [*("" for _ in objects), *named]
        objects = [*objects, *named.values()]
        if not objects:
            raise FleetConfigError(f"trial.prepare() was given nothing, but takes {_TAKES}.")
        for thing in objects:  # before any optimizer's state is made to follow them
            if isinstance(thing, torch.nn.Module):
                thing.to(self._parts.device)
        for thing, name in zip(objects, called, strict=True):
            _check(thing, name)
            self.add(thing, name)
            if isinstance(thing, torch.nn.Module):
                self._train(thing)

    def _train(self, module: torch.nn.Module) -> None:
        self.modules.append(module)
        if group_size() > 1:
            check_same(module)
            make_same(module)
        batchnorm.begin(self._parts.weights)
        self._parts.reducer.watch(module)

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

    def check_together(self) -> None:
        """See `replicas.check_together`."""
        check_together(self.objects, self.state, self._parts.weights)

    def meet(self, step: int | None) -> list[dict[str, Any]]:
        """Called on all ranks where they stop, before a step of the first pass or at the end.

        Returns of each its random generators, and what it has added to ``trial.totals``.

        Raises:
            TrialError: They have come apart.
        """
        self.check_together()
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
            state=self.state,
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
        self.state.update(copy.deepcopy(saved.state))
        self._session.reports.begin_with(saved.history)

    def add(self, thing: Any, name: str = "") -> None:
        """An object was prepared, by that name if it has one."""
        self.objects.append(thing)
        with uncompiled(thing) as own:
            self._called.append(name or type(own).__name__)
        if self._saved is not None:
            self._restore(thing, len(self.objects) - 1, self._saved)
        elif isinstance(thing, torch.optim.Optimizer) and thing.state:
            thing.load_state_dict(thing.state_dict())  # moves it to where the parameters are

    def _restore(self, thing: Any, position: int, saved: Checkpoint) -> None:
        if position >= len(saved.objects):
            if self._position.loop >= saved.loop:
                return  # made after the loop that was checkpointed
            raise TrialError(
                "trial.prepare() was called with more objects than when trial "
                f"{self._session.run.number} was checkpointed ({len(saved.objects)}): an "
                "objective must prepare the same objects each time."
            )
        state = saved.objects[position]
        num_groups = len(state.get("param_groups", ()))
        groups = getattr(thing, "param_groups", None)
        if groups is not None and len(groups) < num_groups:
            return  # they were added later: see `_restore_all`
        is_module = isinstance(thing, torch.nn.Module)
        if is_module and names_in(thing) != state.keys():
            return  # it was changed from here to the loop (pruned, say), and will be again
        load_state(thing, _kept(thing, state))

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
        restore_into(self.state, copy.deepcopy(saved.state), self.objects)
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
        restore_into(self.state, copy.deepcopy(saved.state), self.objects)
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


def _check(thing: Any, name: str) -> None:
    """Check what was prepared, as `name` if it has one."""
    has_state = hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
    if isinstance(thing, type) or not has_state:
        kind = f"class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
        what = f" as `{name}`" if name else ""
        raise FleetConfigError(
            f"trial.prepare() was given a `{kind}`{what}, but takes {_TAKES}, each by itself."
        )
    if isinstance(thing, torch.nn.Module):
        _check_initialised(thing)
        _check_unwrapped(thing)


def _check_unwrapped(module: torch.nn.Module) -> None:
    """Check that a module, and no part of it, is trained data parallel already."""
    wrapper = next((part for part in module.modules() if isinstance(part, _WRAPPERS)), None)
    if wrapper is not None:
        raise FleetConfigError(
            f"trial.prepare() was given what is in a `{type(wrapper).__name__}`, but trains "
            "modules data parallel by itself: leave the wrapper out, and prepare and call the "
            "module inside it."
        )


def _check_initialised(module: torch.nn.Module) -> None:
    """Check that no tensor of a module is still to be made."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise FleetConfigError(
                f"The tensor {name!r} of {type(module).__name__} is lazy, but must be "
                f"initialised: run one batch through the model before `trial.prepare`."
            )
