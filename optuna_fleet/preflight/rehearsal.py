"""A rehearsal: the beginning of an objective as one rank of a trial, in a throw-away process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from traceback import format_exc
from typing import Any, NoReturn, TypeAlias

import optuna
import torch
from optuna import TrialPruned
from optuna.samplers import RandomSampler
from torch import nn

from optuna_fleet.events import EpochDecision, MoveRefused
from optuna_fleet.exceptions import is_for_want_of_peers
from optuna_fleet.pipeline.reader.read_plan import ReadPlan
from optuna_fleet.preflight.conditions import Data, InDouble, QuietNoise
from optuna_fleet.preflight.recorder import Recorder, is_last_loop
from optuna_fleet.preflight.rehearsals import (
    ENVIRONMENT,
    Ending,
    Order,
    Rehearsed,
    forked,
    left_by,
)
from optuna_fleet.trainer.checkpoint import Captured
from optuna_fleet.trainer.groups import join_group_of, wait_until_left
from optuna_fleet.trainer.leaving import Held
from optuna_fleet.trainer.objective import LoadedObjective
from optuna_fleet.trainer.prepared import OPTIONS
from optuna_fleet.trainer.randomness import seed_run, seed_torch
from optuna_fleet.trainer.saving import Saver
from optuna_fleet.trainer.session import Session, Yielded
from optuna_fleet.trainer.training import Training
from optuna_fleet.trainer.trial import FleetTrial
from optuna_fleet.wire.calls import AfterEpoch, EndEpoch, RankCall, Report, ShouldPrune
from optuna_fleet.wire.messages import CheckpointFailed, RunTrial, StopAt
from optuna_fleet.wire.packing import is_primitive

_MOST_LOOPS = 4
_MOST_PASSES = 6  # of objectives that have no loop over epochs
_PER_PERIOD = 3
_NOISE = (0, 2, 5)  # before each mini-epoch: that losses may grow, and not only saturate

Moved: TypeAlias = tuple[Rehearsed, Captured]
"""What a leg that ends by a move hands on."""


def rehearse(order: Order) -> Rehearsed:
    """Rehearse as ordered, in this process, which is good for nothing else afterwards.

    Where it is moved each leg has a process of its own, as trials have, which only knows what is
    imported: nothing that the objective's modules and classes keep goes along.
    """
    notes, content = Rehearsed(), None
    try:
        scene = _Scene(order)
    except Exception as error:
        return Rehearsed(ending=Ending.UNFIT, problem=f"{error}", traceback=format_exc())
    while True:
        leg = partial(_run_leg, scene, notes, content)
        found = left_by(*forked(leg)) if order.moves else leg()
        if not isinstance(found, tuple):
            return found
        notes, content = found
        notes.num_moves += 1


class UnfitError(Exception):
    """It can't be checked: says why."""


class _Scene:
    """What is the same for all legs: loaded, and not used."""

    def __init__(self, order: Order) -> None:
        torch.set_num_threads(1)  # others would not be there in forks
        self.order = order
        self.noise = QuietNoise()
        self._loaded = LoadedObjective(
            order.num_threads, has_gpu=False, resolve=_Missing, variables=ENVIRONMENT
        )
        self._loaded.of(self.run(0, None))
        self.data = Data(order.spec, order, self.noise) if order.spec else None

    def run(self, number: int, held: int | None) -> RunTrial:
        """What a driver would say to begin a leg with."""
        order = self.order
        return RunTrial(
            run_id=number,
            number=0,
            trial_id=0,
            rank=order.rank,
            world_size=order.world_size,
            seed=order.seed,
            objective_id=order.objective_id,
            objective_at=order.objective_at,
            measure=False,
            group="" if order.store is None else "preflight",
            store=order.store,
            gc_after_trial=False,
            maximize=order.maximize,
            held=held,
        )

    def objective(self, run: RunTrial) -> Any:
        """It, with the settings of its script."""
        self._loaded.adopt_numbers()
        self._loaded.adopt_torch()
        return self._loaded.of(run)


def _run_leg(scene: _Scene, notes: Rehearsed, content: Captured | None) -> Rehearsed | Moved:
    """Rehearse up to the next move, or the end; add to what the legs before have noted."""
    trial = _Trial(scene, notes, content)
    try:
        trial.begin()
    except (Yielded, TrialPruned):
        pass
    except UnfitError as error:
        notes.ending, notes.problem = Ending.UNFIT, str(error)
    except BaseException as error:
        is_cut_off = scene.order.world_size > 1 and is_for_want_of_peers(error)
        notes.ending = Ending.CUT_OFF if is_cut_off else Ending.RAISED
        notes.problem, notes.traceback = f"{type(error).__name__}: {error}", format_exc()
    held = trial.end(alone=not notes.is_whole)
    return (notes, held.content) if held else notes


class _Trial(FleetTrial):
    """Cuts the loops over epochs short, and has all that matters noted."""

    def __init__(self, scene: _Scene, notes: Rehearsed, content: Captured | None) -> None:
        run = scene.run(notes.num_moves, notes.num_moves - 1 if content else None)
        session = _Session(run, scene.order, notes)
        held = Held(content, Saver(session)) if content else None
        super().__init__(session, lambda: Training(session, scene.data, "cpu", held))
        if scene.data is not None:
            scene.data.begin_pass = self._begin_pass
        self._scene = scene
        self._order = scene.order
        self._noise = scene.noise
        self._notes = notes
        self._recorder = Recorder(notes)
        self._num_loops = 0
        self._num_looped = 0  # objects that were prepared for loops so far

    def begin(self) -> None:
        """Run the objective."""
        order, run = self._order, self._session.run
        objective = self._scene.objective(run)
        seed_run(run.seed, run.number)
        if run.world_size == 1:  # several join when the training begins
            join_group_of(run, "cpu")
        seed_torch(run.seed, run.number)
        if run.world_size > 1:
            assert self._training
        if order.is_double:
            torch.set_default_dtype(torch.float64)
        try:
            with self._noise, InDouble() if order.is_double else nullcontext():
                objective(self)
        finally:
            self._session.check()

    def end(self, *, alone: bool) -> Held | None:
        """Leave the other ranks; return what the trial goes on with elsewhere."""
        self._notes.is_rough = self._noise.is_rough
        if self.opened is not None and not alone:
            self.opened.end(alone=False)
            wait_until_left()
        if not alone and (self.opened is None or not self.opened.objects):
            self._notes.ending = Ending.PLAIN
        return None if self.opened is None else self.opened.leaving.held

    def _begin_pass(self, plan: ReadPlan) -> None:
        """A pass over batches begins."""
        self._notes.sizes.update(map(plan.size, range(plan.num_steps)))
        self._notes.num_passes += 1
        has_no_loop = not self._notes.num_epochs and self._notes.num_passes > _MOST_PASSES
        if has_no_loop or not self.prepared:
            self._session.unwind(Yielded)

    # -- what the objective asks for --------------------------------------------------------------

    @property
    def is_preflight(self) -> bool:
        return True

    def prepare(self, *objects: Any, **named: Any) -> Any:
        """See `FleetTrial`; it is on one device too, as the model need not train for long."""
        named = {name: thing for name, thing in named.items() if name not in OPTIONS}
        for thing in (*objects, *named.values()):
            if isinstance(thing, nn.Module) and self._order.is_double:
                thing.double()
        return super().prepare(*objects, **named)

    def pipeline(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnfitError("trial.pipeline() trains in stages, which are not rehearsed")

    def report(self, value: float, step: int) -> None:
        """See `FleetTrial`; goes nowhere."""
        super().report(value, step)
        self._recorder.reported(value, step)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        numbers = _few(num_epochs)
        return self._rehearsed(super().epochs(len(numbers)), numbers)

    def steps(self, num_steps: int, *, every: int) -> Iterator[int]:
        numbers, few = _few(-(-num_steps // every)), min(every, _PER_PERIOD)
        return self._rehearsed(super().steps(few * len(numbers), every=few), numbers)

    def _rehearsed(self, epochs: Iterator[int], numbers: list[int]) -> Iterator[int]:
        self._num_loops += 1
        loop = self._num_loops
        trained = self.prepared[self._num_looped :] or self.prepared  # folds before are done
        self._num_looped = len(self.prepared)
        for epoch in epochs:
            if not self.prepared:
                self._session.unwind(Yielded)
            self._begin_epoch(loop, epoch, trained)
            self._noise.is_on = True
            yield numbers[epoch]
            self._noise.is_on = False
            self.totals.merge()
            totals = {name: self.totals[name] for name in sorted(self.totals.own)}
            self._recorder.end_epoch(self.prepared, self.state, totals)
        if loop >= _MOST_LOOPS or is_last_loop():
            self._session.unwind(Yielded)

    def _begin_epoch(self, loop: int, epoch: int, trained: Sequence[Any]) -> None:
        """A mini-epoch begins, or goes on."""
        self._recorder.begin_epoch(self.prepared, loop, epoch)
        _disturb(trained, epoch, 4 * self._order.is_nudged)
        if self._order.moves and self._notes.moved_within != (loop, epoch):
            self._notes.moved_within = (loop, epoch)
            stop = StopAt(run_id=self._session.run.run_id, place=(loop, epoch, 1), stays=True)
            self._session.stop_line.stop_at(stop)


def _few(num: int) -> list[int]:
    """The first of so many, one in the middle and the last."""
    return sorted({0, num // 2, num - 1}) if num > 2 else list(range(num))


@torch.no_grad()
def _disturb(objects: Sequence[Any], epoch: int, epsilons: int) -> None:
    """The models are worse than before, in all runs alike: what keeps the best shows that."""
    generator = torch.Generator().manual_seed(epoch)
    modules = nn.ModuleList(thing for thing in objects if isinstance(thing, nn.Module))
    for parameter in modules.parameters() if _NOISE[epoch] or epsilons else ():
        if parameter.requires_grad and parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            size = _NOISE[epoch] * (parameter.abs().mean() + 0.1)
            parameter.add_((size * noise).to(parameter))
            parameter.mul_(1 + epsilons * torch.finfo(parameter.dtype).eps * noise)


class _Session(Session):
    """Asks a trial in this process' memory instead of the driver; nothing goes anywhere."""

    def __init__(self, run: RunTrial, order: Order, notes: Rehearsed) -> None:
        super().__init__(None, run)
        self._order = order
        self._notes = notes
        directions = order.study["directions"]
        study = optuna.create_study(sampler=RandomSampler(order.seed), directions=directions)
        known = {**(order.params or {}), **notes.params}
        study.enqueue_trial(known, user_attrs=notes.user_attrs)
        self._trial = study.ask()

    def call(self, target: str, name: str, *args: Any, **kwargs: Any) -> Any:
        self.check()
        if target != "trial":
            self._unknown(target, name)
        if name.startswith("suggest_"):
            return self._suggested(name, *args, **kwargs)
        answer = getattr(self._trial, name)(*args, **kwargs)
        self._notes.user_attrs = self._trial.user_attrs
        return answer

    def _suggested(self, kind: str, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._order.params is not None and name not in self._order.params:
            raise UnfitError(f"no value was given for the parameter {name!r}")
        if not is_primitive(given := (self._order.params or {}).get(name)):
            return given
        objects = {}  # of the choices, by their position
        if kind == "suggest_categorical":
            objects = {i: c for i, c in enumerate(args[0]) if not is_primitive(c)}
            args = ([i if i in objects else choice for i, choice in enumerate(args[0])],)
        value = getattr(self._trial, kind)(name, *args, **kwargs)
        self._notes.params[name] = value
        return objects[value] if type(value) is int and value in objects else value

    def read(self, target: str, name: str) -> Any:
        if target == "study" and name in self._order.study:
            return self._order.study[name]
        return getattr(self._trial, name) if target == "trial" else self._unknown(target, name)

    def tell(self, target: str, name: str, *args: Any, **kwargs: Any) -> None:
        self.call(target, name, *args, **kwargs)

    def _unknown(self, target: str, name: str) -> NoReturn:
        raise UnfitError(f"the objective asks the {target} for `{name}`, which has no answer here")

    def ask(self, kind: type[RankCall], **fields: Any) -> Any:
        self.check()
        if kind is EndEpoch:
            decision = EpochDecision.YIELD if self._order.moves else EpochDecision.GO
            return AfterEpoch(decision, stays=True)
        return False if kind in (ShouldPrune, Report) else self._unknown("driver", kind.__name__)

    def send(self, message: Any) -> None:
        match message:
            case MoveRefused():
                self._notes.refused = self._notes.refused or "it refuses to be moved"
            case CheckpointFailed():
                self._notes.refused = self._notes.refused or message.problem


class _Missing:
    """Stands for the study or storage that the objective refers to."""

    def __init__(self, target: str) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        raise UnfitError(f"the objective asks the {self._target} for `{name}`")
