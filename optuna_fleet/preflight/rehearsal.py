"""A rehearsal: the beginning of an objective as one rank of a trial, in a throw-away process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from optuna import TrialPruned
from torch import nn

from optuna_fleet.arguments import check_number
from optuna_fleet.exceptions import is_for_want_of_peers
from optuna_fleet.preflight.answers import Heard, RehearsedSession, UnfitError
from optuna_fleet.preflight.loops import is_last_loop
from optuna_fleet.preflight.precision import InDouble, double_, watch_autocast
from optuna_fleet.preflight.quiet_noise import QuietNoise, without_dropout
from optuna_fleet.preflight.recorder import Recorder
from optuna_fleet.preflight.records import Ending, Order, Rehearsed
from optuna_fleet.preflight.subset import Data
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
        rehearsal: Rehearsal,
    ) -> None:
        super().__init__(session, open_training)
        self._rehearsal = rehearsal
        self._num_loops = 0

    @property
    def is_preflight(self) -> bool:
        """See `FleetTrial`."""
        return True

    @property
    def is_resumed(self) -> bool:
        """See `FleetTrial`."""
        self._rehearsal.tells_resumed = True
        return super().is_resumed

    def prepare(self, *objects: Any, **bounds: Any) -> Any:
        """See `FleetTrial`; it is on one device too, as the model need not train for long."""
        for thing in objects:
            if isinstance(thing, nn.Module):
                self._rehearsal.adapt(thing)
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
        loop, rehearsal = self._num_loops, self._rehearsal
        for epoch in epochs:
            rehearsal.begin_epoch(self, loop, epoch)
            yield numbers[epoch]
            rehearsal.end_epoch(self)
        if loop >= _MOST_LOOPS or is_last_loop():
            self._session.unwind(Left)

    def report(self, value: float, step: int) -> None:
        """See `FleetTrial`; goes nowhere."""
        super().report(value, step)
        self._rehearsal.recorder.reported(value, step)


def _few(num: int) -> list[int]:
    """The first of so many, one in the middle and the last."""
    return sorted({0, num // 2, num - 1}) if num > 2 else list(range(num))


class Rehearsal:
    """Of one rank: one run after the other, if it is moved.

    Attributes:
        tells_resumed: Whether the objective has asked if it is resumed.
    """

    def __init__(self, order: Order) -> None:
        self.tells_resumed = False
        self.recorder = Recorder()
        self._order = order
        self._noise = QuietNoise()
        self._casts = watch_autocast(is_double=order.is_double)
        self._mode = InDouble(self._noise.replaced)
        self._data = Data(order, self._noise, self._begin_pass) if order.payload else None
        self._heard = Heard()
        self._params = dict(order.params or {})
        self._asked: dict[str, Any] = {}
        self._session: RehearsedSession | None = None
        self._training: Training | None = None
        self._num_moves = 0
        self._num_passes = 0
        self._has_moved_within = (0, 0)

    # -- what the trial calls ---------------------------------------------------------------------

    def adapt(self, module: nn.Module) -> None:
        """A module is about to be prepared."""
        without_dropout(module)
        if self._order.is_double:
            double_(module)

    def begin_epoch(self, trial: FleetTrial, loop: int, epoch: int) -> None:
        """A mini-epoch begins, or goes on."""
        assert self._session is not None
        if not trial.prepared:
            self._session.unwind(Left)
        self.recorder.begin_epoch(trial.prepared, loop, epoch)
        if epoch > 0:
            _disturb(trial.prepared, epoch)
        if self._order.moves and self._has_moved_within != (loop, epoch):
            self._has_moved_within = (loop, epoch)
            place = (loop, epoch, 1)
            stop = StopAt(run_id=self._session.run.run_id, place=place, stays=True)
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
        assert self._session is not None
        self._num_passes += 1
        is_plain = self._training is None or not self._training.objects
        if is_plain or (not self.recorder.num_epochs and self._num_passes > _MOST_PASSES):
            self._session.unwind(Left)

    # -- its runs ---------------------------------------------------------------------------------

    def run(self, load: Callable[[RunTrial], Any]) -> Rehearsed:
        """Run the objective, again after each move, and return what was noted."""
        held: Held | None = None
        while True:
            run = self._next_run(held)
            try:
                self._run(run, load, held)
                return self._rehearsed(Ending.RETURNED)
            except Left:
                has_objects = self._training is not None and self._training.objects
                return self._rehearsed(Ending.LEFT if has_objects else Ending.PLAIN)
            except Yielded:
                assert self._training is not None
                held, self._num_moves = self._training.leaving.held, self._num_moves + 1
            except TrialPruned:
                return self._rehearsed(Ending.RETURNED)
            except UnfitError as error:
                return self._rehearsed(Ending.UNFIT, str(error))
            except BaseException as error:
                problem = f"{type(error).__name__}: {error}"
                trace = "".join(traceback.format_exception(_of_users(error)))
                is_cut_off = run.world_size > 1 and is_for_want_of_peers(error)
                ending = Ending.CUT_OFF if is_cut_off else Ending.RAISED
                return self._rehearsed(ending, problem, trace)

    def _next_run(self, held: Held | None) -> RunTrial:
        order = self._order
        return RunTrial(
            run_id=self._num_moves,
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
            held=self._num_moves - 1 if held else None,
        )

    def _run(self, run: RunTrial, load: Callable[[RunTrial], Any], held: Held | None) -> Any:
        session = self._session = RehearsedSession(run, self._order, self._params, self._heard)
        self._training, self._noise.is_on = None, False
        objective = load(run)
        seed_run(run.seed, run.number)
        if run.world_size == 1:  # several join when the training begins
            join_group_of(run, "cpu")
        seed_torch(run.seed, run.number)

        def open_training() -> Training:
            if self._training is None:
                self._training = Training(session, self._data, "cpu", held)
            return self._training

        if run.world_size > 1:
            open_training()
        is_at_end = False
        try:
            try:
                value = self._called(objective, RehearsedTrial(session, open_training, self))
            finally:
                session.check()
            is_at_end = True
            return value
        except Yielded:
            is_at_end = True
            raise
        finally:
            self._asked |= session.parameters
            self._noise.is_on = False
            if self._training is not None and is_at_end:
                self._training.end(alone=False)
                wait_until_left()

    def _called(self, objective: Callable[[Any], Any], trial: RehearsedTrial) -> Any:
        if not self._order.is_double:
            return objective(trial)
        torch.set_default_dtype(torch.float64)
        with self._mode:
            return objective(trial)

    def _rehearsed(self, ending: Ending, problem: str = "", trace: str = "") -> Rehearsed:
        if ending is Ending.RETURNED and (self._training is None or not self._training.objects):
            ending = Ending.PLAIN
        recorder = self.recorder
        return Rehearsed(
            ending=ending,
            record=recorder.record,
            problem=problem,
            traceback=trace,
            params=self._asked,
            num_steps=recorder.num_steps,
            num_epochs=recorder.num_epochs,
            sizes=frozenset(self._data.sizes if self._data else ()),
            num_moves=self._num_moves,
            refused=self._heard.refused,
            tells_resumed=self.tells_resumed,
            is_rough=recorder.is_rough or bool(self._casts),
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


def rehearse(order: Order) -> Rehearsed:
    """Rehearse as ordered, in this process, which is good for nothing else afterwards."""
    try:
        loaded = LoadedObjective(order.num_threads, has_gpu=False, resolve=_stand_in)
        rehearsal = Rehearsal(order)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        return Rehearsed(ending=Ending.UNFIT, problem=f"{error}", traceback=trace)

    def load(run: RunTrial) -> Any:
        objective = loaded.of(run)
        loaded.adopt_numbers()
        loaded.adopt_torch()
        return objective

    return rehearsal.run(load)


def _stand_in(target: str) -> Any:
    return _Missing(target)


class _Missing:
    """Stands for the study or storage that the objective refers to."""

    def __init__(self, target: str) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        raise UnfitError(f"the objective asks the {self._target} for `{name}`")
