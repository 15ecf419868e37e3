"""A rehearsal: the beginning of an objective as one rank of a trial, in a throw-away process."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from optuna import TrialPruned
from torch import nn

from optuna_fleet.arguments import check_number
from optuna_fleet.exceptions import is_for_want_of_peers
from optuna_fleet.preflight.answers import RehearsedSession, UnfitError
from optuna_fleet.preflight.loops import is_last_loop
from optuna_fleet.preflight.precision import InDouble, double_, on_autocast
from optuna_fleet.preflight.quiet_noise import QuietNoise
from optuna_fleet.preflight.recorder import Notes, Recorder
from optuna_fleet.preflight.records import Ending, Order, Rehearsed
from optuna_fleet.preflight.subset import Data
from optuna_fleet.processes import cause_of_death, die_with
from optuna_fleet.trainer.checkpoints.checkpoint import Captured
from optuna_fleet.trainer.checkpoints.memory_file import MemoryFile
from optuna_fleet.trainer.checkpoints.saving import Saver
from optuna_fleet.trainer.groups import join_group_of, wait_until_left
from optuna_fleet.trainer.moves.leaving import Held
from optuna_fleet.trainer.objective import LoadedObjective
from optuna_fleet.trainer.seeding import seed_run, seed_torch
from optuna_fleet.trainer.session import Yielded
from optuna_fleet.trainer.training import Training
from optuna_fleet.trainer.trial import FleetTrial
from optuna_fleet.wire.messages import RunTrial, StopAt

_MOST_LOOPS = 4
_MOST_PASSES = 6  # of objectives that have no loop over epochs
_PER_PERIOD = 3
_NOISE = (0, 2, 5)  # before each mini-epoch: that losses may grow, and not only saturate


class Left(Yielded):
    """Unwinds an objective whose beginning was seen."""


class RehearsedTrial(FleetTrial):
    """Cuts the loops over epochs short, and has all that matters noted."""

    def __init__(
        self,
        session: RehearsedSession,
        open_training: Callable[[], Training],
        leg: Leg,
    ) -> None:
        super().__init__(session, open_training)
        self._leg = leg
        self._num_loops = 0

    @property
    def is_preflight(self) -> bool:
        """See `FleetTrial`."""
        return True

    def prepare(self, *objects: Any, **bounds: Any) -> Any:
        """See `FleetTrial`; it is on one device too, as the model need not train for long."""
        for thing in objects:
            if isinstance(thing, nn.Module):
                self._leg.adapt(thing)
        return super().prepare(*objects)

    def pipeline(self, *args: Any, **kwargs: Any) -> NoReturn:
        """See `FleetTrial`."""
        raise UnfitError("trial.pipeline() trains in stages, which are not rehearsed")

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """See `FleetTrial`."""
        check_number("num_epochs", num_epochs, least=1, whole=True)
        numbers = _few(num_epochs)
        return self._rehearsed(super().epochs(len(numbers)), numbers)

    def steps(self, num_steps: int, *, every: int) -> Iterator[int]:
        """See `FleetTrial`."""
        check_number("num_steps", num_steps, least=1, whole=True)
        check_number("every", every, least=1, whole=True)
        numbers, few = _few(-(-num_steps // every)), min(every, _PER_PERIOD)
        return self._rehearsed(super().steps(few * len(numbers), every=few), numbers)

    def _rehearsed(self, epochs: Iterator[int], numbers: list[int]) -> Iterator[int]:
        self._num_loops += 1
        loop, leg = self._num_loops, self._leg
        for epoch in epochs:
            leg.begin_epoch(self, loop, epoch)
            yield numbers[epoch]
            leg.end_epoch(self)
        if loop >= _MOST_LOOPS or is_last_loop():
            self._session.unwind(Left)

    def report(self, value: float, step: int) -> None:
        """See `FleetTrial`; goes nowhere."""
        super().report(value, step)
        self._leg.recorder.reported(value, step)


def _few(num: int) -> list[int]:
    """The first of so many, one in the middle and the last."""
    return sorted({0, num // 2, num - 1}) if num > 2 else list(range(num))


class Leg:
    """What one process does of a rehearsal: all of it, or up to the next move.

    Args:
        order: What to rehearse.
        notes: What the legs before have noted; added to.
        content: What the trial goes on with.
    """

    def __init__(self, order: Order, notes: Notes, content: Captured | None) -> None:
        self.notes = notes
        self.recorder = Recorder(notes)
        self._order = order
        self._content = content
        self._noise = QuietNoise()
        on_autocast(self._begins_autocast)
        has_data = order.payload is not None
        self._data = Data(order, notes.sizes, self._noise, self._begin_pass) if has_data else None
        self._session = RehearsedSession(self._run_trial(), order, notes)
        self._training: Training | None = None

    # -- what the trial calls ---------------------------------------------------------------------

    def adapt(self, module: nn.Module) -> None:
        """A module is about to be prepared."""
        if self._order.is_double:
            double_(module)

    def _begins_autocast(self) -> bool:
        self.notes.is_rough = True
        return not self._order.is_double

    def begin_epoch(self, trial: FleetTrial, loop: int, epoch: int) -> None:
        """A mini-epoch begins, or goes on."""
        if not trial.prepared:
            self._session.unwind(Left)
        self.recorder.begin_epoch(trial.prepared, loop, epoch)
        if epoch > 0:
            _disturb(trial.prepared, epoch)
        if self._order.moves and self.notes.moved_within != (loop, epoch):
            self.notes.moved_within = (loop, epoch)
            stop = StopAt(run_id=self._session.run.run_id, place=(loop, epoch, 1), stays=True)
            self._session.stop_line.stop_at(stop)
        self._noise.is_on = True

    def end_epoch(self, trial: FleetTrial) -> None:
        """A mini-epoch is over."""
        self._noise.is_on = False
        totals = trial.totals
        totals.merge()
        sums = {name: totals[name] for name in sorted(totals.own)}
        self.recorder.end_epoch(trial.prepared, trial.state, sums)

    def _begin_pass(self) -> None:
        """A pass over batches begins."""
        self.notes.num_passes += 1
        has_no_loop = not self.notes.num_epochs and self.notes.num_passes > _MOST_PASSES
        if self._is_plain or has_no_loop:
            self._session.unwind(Left)

    @property
    def _is_plain(self) -> bool:
        return self._training is None or not self._training.objects

    # -- its run ----------------------------------------------------------------------------------

    def run(self, load: Callable[[RunTrial], Any]) -> Rehearsed | Moved:
        """Run the objective; return how it ended, or that it was moved."""
        try:
            self._run(load)
            return self._rehearsed(Ending.RETURNED)
        except Left:
            return self._rehearsed(Ending.LEFT)
        except Yielded:
            assert self._training is not None
            assert self._training.leaving.held is not None
            return Moved.of(self.notes, self._training.leaving.held.content)
        except TrialPruned:
            return self._rehearsed(Ending.RETURNED)
        except UnfitError as error:
            return self._rehearsed(Ending.UNFIT, str(error))
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
            trace = "".join(traceback.format_exception(_of_users(error)))
            is_cut_off = self._order.world_size > 1 and is_for_want_of_peers(error)
            return self._rehearsed(Ending.CUT_OFF if is_cut_off else Ending.RAISED, problem, trace)

    def _run_trial(self) -> RunTrial:
        order, num_moves = self._order, self.notes.num_moves
        return RunTrial(
            run_id=num_moves,
            number=0,
            trial_id=0,
            rank=order.rank,
            world_size=order.world_size,
            seed=order.seed,
            objective_id=0,
            objective_at=order.objective_at,
            measure=False,
            group=order.group,
            store=order.store,
            gc_after_trial=False,
            maximize=order.maximize,
            held=num_moves - 1 if self._content else None,
        )

    def _run(self, load: Callable[[RunTrial], Any]) -> None:
        session, run = self._session, self._session.run
        objective = load(run)
        seed_run(run.seed, run.number)
        if run.world_size == 1:  # several join when the training begins
            join_group_of(run, "cpu")
        seed_torch(run.seed, run.number)
        if run.world_size > 1:
            self._open_training()
        try:
            try:
                self._call(objective, RehearsedTrial(session, self._open_training, self))
            finally:
                session.check()
        except Yielded:
            self._end()
            raise
        self._end()

    def _open_training(self) -> Training:
        if self._training is None:
            held = Held(self._content, Saver(self._session)) if self._content else None
            self._training = Training(self._session, self._data, "cpu", held)
        return self._training

    def _call(self, objective: Callable[[Any], Any], trial: RehearsedTrial) -> None:
        if self._order.is_double:
            torch.set_default_dtype(torch.float64)
        with self._noise, InDouble() if self._order.is_double else contextlib.nullcontext():
            objective(trial)

    def _end(self) -> None:
        """All ranks come here."""
        self._noise.is_on = False
        if self._training is not None:
            self._training.end(alone=False)
            wait_until_left()

    def _rehearsed(self, ending: Ending, problem: str = "", trace: str = "") -> Rehearsed:
        notes = self.notes
        if ending in (Ending.RETURNED, Ending.LEFT) and self._is_plain:
            ending = Ending.PLAIN
        return Rehearsed(
            ending=ending,
            record=notes.record,
            problem=problem,
            traceback=trace,
            params=notes.params,
            num_steps=notes.num_steps,
            num_epochs=notes.num_epochs,
            sizes=frozenset(notes.sizes),
            num_moves=notes.num_moves,
            refused=notes.refused,
            is_rough=notes.is_rough,
        )


def _of_users(error: BaseException) -> BaseException:
    """An exception whose traceback begins in the objective."""
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    return error.with_traceback(trace)


@torch.no_grad()
def _disturb(objects: Any, seed: int) -> None:
    """The models are worse than before, in all runs alike: what keeps the best shows that."""
    generator, met = torch.Generator().manual_seed(seed), set[int]()
    for thing in objects:
        for parameter in thing.parameters() if isinstance(thing, nn.Module) else ():
            if (
                parameter.requires_grad
                and parameter.is_floating_point()
                and id(parameter) not in met
            ):
                met.add(id(parameter))
                noise = torch.empty(parameter.shape, dtype=torch.float64)
                noise = (
                    noise.normal_(generator=generator)
                    * _NOISE[seed]
                    * (parameter.abs().mean() + 0.1)
                )
                parameter.add_(noise.to(parameter))


@dataclass(frozen=True, slots=True)
class Moved:
    """A leg has ended by a move: what is handed on to the next one."""

    notes: Notes
    data: bytes
    position: tuple[int, ...]
    epoch: int

    @classmethod
    def of(cls, notes: Notes, content: Captured) -> Moved:
        """With what the trial goes on with."""
        return cls(notes, bytes(content.file.data), content.position, content.epoch)

    @property
    def content(self) -> Captured:
        """What the trial goes on with."""
        return Captured(MemoryFile.of(self.data), self.position, self.epoch)


def rehearse(order: Order) -> Rehearsed:
    """Rehearse as ordered, in this process, which is good for nothing else afterwards.

    Where it is moved each leg has a process of its own, as trials have: nothing of the objective's
    modules and classes goes along.
    """
    if not order.moves:
        return _leg(order, Notes(), None)  # type: ignore[return-value]
    notes, content = Notes(), None
    while isinstance(found := _forked(partial(_leg, order, notes, content)), Moved):
        notes, content = found.notes, found.content
        notes.num_moves += 1
    return found


def _leg(order: Order, notes: Notes, content: Captured | None) -> Rehearsed | Moved:
    try:
        sys.path[:] = order.path
        os.chdir(order.folder)
        loaded = LoadedObjective(order.num_threads, has_gpu=False, resolve=_stand_in)
        leg = Leg(order, notes, content)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        return Rehearsed(ending=Ending.UNFIT, problem=f"{error}", traceback=trace)

    def load(run: RunTrial) -> Any:
        objective = loaded.of(run)
        loaded.adopt_numbers()
        loaded.adopt_torch()
        return objective

    return leg.run(load)


def _forked(work: Callable[[], Rehearsed | Moved]) -> Rehearsed | Moved:
    """What `work` returns in a child of this process and of its group."""
    with open(os.memfd_create("leg"), "w+b") as file:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                die_with(parent)
                pickle.dump(work(), file)
                file.flush()
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            cause = f"its process ended by {cause_of_death(code)}"
            return Rehearsed(ending=Ending.DIED, problem=cause)
        file.seek(0)
        return pickle.load(file)  # type: ignore[no-any-return]  # from our own child


def _stand_in(target: str) -> Any:
    return _Missing(target)


class _Missing:
    """Stands for the study or storage that the objective refers to."""

    def __init__(self, target: str) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        raise UnfitError(f"the objective asks the {self._target} for `{name}`")
