"""A rehearsal: the beginning of an objective as one rank of a trial, in a throw-away process."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch
from optuna import TrialPruned
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from torch import nn

from optuna_fleet.arguments import check_number
from optuna_fleet.events import EpochDecision, MoveRefused, WidthLimited
from optuna_fleet.exceptions import is_for_want_of_peers
from optuna_fleet.pipeline.preprocessor import payload
from optuna_fleet.pipeline.reader.batches import Batch
from optuna_fleet.pipeline.reader.inline import InlineClient
from optuna_fleet.pipeline.reader.plan import Batches, ReadPlan, planned
from optuna_fleet.preflight.loops import is_last_loop
from optuna_fleet.preflight.precision import InDouble, double_, in_double, without_autocast
from optuna_fleet.preflight.quiet_noise import QuietNoise, without_dropout
from optuna_fleet.preflight.recorder import Recorder
from optuna_fleet.preflight.records import Ending, Order, Rehearsed
from optuna_fleet.sampler_bridge.choices import Chosen, PackedChoice
from optuna_fleet.trainer.groups import join_group_of, wait_until_left
from optuna_fleet.trainer.moves.leaving import Held
from optuna_fleet.trainer.objective import LoadedObjective
from optuna_fleet.trainer.seeding import seed_run, seed_torch
from optuna_fleet.trainer.session import Session, Yielded
from optuna_fleet.trainer.training import Training
from optuna_fleet.trainer.trial import FleetTrial
from optuna_fleet.wire.calls import AfterEpoch, EndEpoch, RankCall
from optuna_fleet.wire.messages import CheckpointFailed, RunTrial, StopAt
from optuna_fleet.wire.packing import is_primitive, unpack

_MOST_LOOPS = 4
_MOST_PASSES = 6  # of objectives that have no loop over epochs
_PER_PERIOD = 3


class Left(Yielded):
    """Unwinds an objective whose beginning was seen."""


class UnfitError(Exception):
    """It can't be checked: says why."""


class Data(InlineClient):
    """A few batches of each pass, always of the same samples, the last batch of an odd size.

    Attributes:
        sizes: Of the batches that were read.
    """

    def __init__(self, order: Order, noise: QuietNoise, begin_pass: Callable[[], None]) -> None:
        assert order.spec is not None
        assert order.payload is not None
        source = order.payload.load()
        source = replace(source, generators=payload.generators_in(source))
        collates = {
            each.name: unpack(each.collate) for each in order.spec.datasets if each.collate
        }
        super().__init__(order.spec, source, collates)
        self.sizes: set[int] = set()
        self._order = order
        self._noise = noise
        self._begin_pass = begin_pass
        self._made_samples: dict[tuple[str, int], Any] = {}

    def read(self, name: str, **arguments: Any) -> Batches[Batch]:
        """See `InlineClient`."""
        plan = planned(self.spec, name, **arguments)
        full = self._order.num_batches if self.spec.dataset(name).shuffled else 1
        return Batches(replace(plan, num_samples=_subset(plan, full)), self._made_of)

    def _made_of(self, plan: ReadPlan) -> Iterator[Batch]:
        self._begin_pass()
        for batch in super()._made(plan):
            self.sizes.add(batch.global_size)
            yield replace(batch, data=in_double(batch.data)) if self._order.is_double else batch

    def _batch(self, plan: ReadPlan, step: int) -> Batch:
        with self._noise.paused():
            return super()._batch(plan, step)

    def _sample(self, plan: ReadPlan, position: int) -> Any:
        # In each mini-epoch in another place, or a rank would always have the same.
        position = (position + plan.epoch * (plan.num_samples // 3 | 1)) % plan.num_samples
        if (plan.name, position) not in self._made_samples:
            sample = super()._sample(replace(plan, epoch=0), position)
            self._made_samples[plan.name, position] = sample
        return self._made_samples[plan.name, position]


def _subset(plan: ReadPlan, num_full: int) -> int:
    """How many samples make so many batches, and one more of an odd size."""
    size = min(plan.batch_size, plan.num_samples)
    if plan.drop_last:
        return min(plan.num_samples // size, num_full) * size
    num = min(plan.num_samples, num_full * size + (size // 2 | 1))
    last = num % size or size
    return num if last % 2 or num == 1 else num - 1


@dataclass(slots=True)
class _Heard:
    """What the runs of a rehearsal have told their driver."""

    refused: str = ""
    limited: str = ""


class RehearsedSession(Session):
    """Answers by itself: what is suggested was decided before, and nothing goes anywhere."""

    def __init__(self, run: RunTrial, order: Order, params: dict[str, Any], heard: _Heard) -> None:
        super().__init__(None, run)
        self._order = order
        self._params = params
        self._heard = heard
        self._distributions: dict[str, BaseDistribution] = {}
        self._user_attrs: dict[str, Any] = {}
        self.moves_next = False

    def call(self, target: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """See `Session`."""
        self.check()
        if target == "trial" and name in _DISTRIBUTIONS:
            value = self._suggested(args[0], _DISTRIBUTIONS[name](*args[1:], **kwargs))
            if is_primitive(value):
                self.parameters[args[0]] = value
            return value
        if target == "trial" and name in ("set_user_attr", "set_system_attr", "set_constraint"):
            self._user_attrs |= {args[0]: args[1]} if name == "set_user_attr" else {}
            return None
        return self._unknown(target, name)

    def read(self, target: str, name: str) -> Any:
        """See `Session`."""
        if target == "study" and name in self._order.study:
            return self._order.study[name]
        own = {
            "params": self.parameters,
            "distributions": self._distributions,
            "user_attrs": self._user_attrs,
            "system_attrs": {},
            "datetime_start": None,
        }
        return own[name] if target == "trial" and name in own else self._unknown(target, name)

    def tell(self, target: str, name: str, *args: Any, **kwargs: Any) -> None:
        """See `Session`."""
        self.call(target, name, *args, **kwargs)

    def _unknown(self, target: str, name: str) -> NoReturn:
        raise UnfitError(f"the objective asks the {target} for `{name}`, which has no answer here")

    def _suggested(self, name: str, distribution: BaseDistribution) -> Any:
        self._distributions[name] = distribution
        choices = getattr(distribution, "choices", ())
        if name not in self._params:
            if self._order.params is not None:
                raise UnfitError(f"no value was given for the parameter {name!r}")
            self._params[name] = _drawn(name, distribution, self._order.seed)
        value = self._params[name]
        for index, choice in enumerate(choices):
            if isinstance(choice, PackedChoice) and value == index:
                return Chosen(index=index)
        return value

    def ask(self, kind: type[RankCall], **fields: Any) -> Any:
        """See `Session`."""
        self.check()
        if kind is EndEpoch:
            decision = EpochDecision.YIELD if self._order.moves else EpochDecision.GO
            return AfterEpoch(decision, stays=True)
        return self._unknown("driver", kind.__name__)

    def report(self, value: float, step: int) -> None:
        """See `Session`."""
        self.check()

    def should_prune(self) -> bool:
        """See `Session`."""
        self.check()
        return False

    def send(self, message: Any) -> None:
        """See `Session`."""
        match message:
            case MoveRefused():
                self._heard.refused = self._heard.refused or "it refuses to be moved"
            case CheckpointFailed():
                self._heard.refused = self._heard.refused or message.problem
            case WidthLimited():
                self._heard.limited = f"on more than {message.max_devices}"

    def send_aside(self, message: Any) -> None:
        """See `Session`."""
        self.send(message)


_DISTRIBUTIONS: dict[str, Callable[..., BaseDistribution]] = {
    "suggest_float": FloatDistribution,
    "suggest_int": IntDistribution,
    "suggest_categorical": CategoricalDistribution,
}


def _drawn(name: str, distribution: BaseDistribution, seed: int) -> Any:
    """A value drawn at random; of choices that are objects the position."""
    rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    match distribution:
        case CategoricalDistribution(choices=choices):
            index = int(rng.integers(len(choices)))
            return index if isinstance(choices[index], PackedChoice) else choices[index]
        case FloatDistribution() | IntDistribution():
            low, high, step = distribution.low, distribution.high, distribution.step
            if distribution.log:
                value = float(np.exp(rng.uniform(np.log(low), np.log(high))))
            else:
                value = float(rng.uniform(low, high))
            if step:
                value = low + round((value - low) / step) * step
            value = min(max(value, low), high)
            return round(value) if isinstance(distribution, IntDistribution) else value
    raise UnfitError(f"the distribution of the parameter {name!r} is unknown")


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
    """Of one rank: one run after the other, if it is moved."""

    def __init__(self, order: Order) -> None:
        self.recorder = Recorder()
        self._order = order
        self._noise = QuietNoise()
        self._mode = InDouble(self._noise.replaced)
        self._data = Data(order, self._noise, self._begin_pass) if order.payload else None
        self._heard = _Heard()
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
                trace = "".join(traceback.format_exception(error))
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
            collective_s=60.0,
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
            is_rough=recorder.is_rough,
        )


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
                noise = noise.normal_(generator=generator) * 5 * (parameter.abs().mean() + 0.1)
                parameter.add_(noise.to(parameter))


def rehearse(order: Order) -> Rehearsed:
    """Rehearse as ordered, in this process, which is good for nothing else afterwards."""
    if order.is_double:
        without_autocast()
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
