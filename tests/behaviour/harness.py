"""Runs objectives undisturbed, and again with forced widths, moves and deaths, and compares.

What must know the package's inside is here, and in `tests.fleets`, on which it stands; the other
modules of this folder import public names only, and so survive what is rebuilt below them.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import signal
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna

from optuna_fleet import Checkpoints
from optuna_fleet.events import (
    Abort,
    Ending,
    Event,
    GiveUp,
    Instruction,
    RankEnded,
    Requeue,
    WidthLimited,
)
from optuna_fleet.sampler_bridge.records import flights_of
from tests.behaviour.small import small_model, train, train_epoch
from tests.fleets import (
    Leg,
    ScriptableFleet,
    ScriptedController,
    ask_to_move,
    await_trainers,
    fleet_of,
    run,
    small_pipeline,
)

__all__ = ["fleet_of", "run", "small_model", "small_pipeline", "train", "train_epoch"]

NUM_DEVICES = 4
MAX_RESTARTS = 4

_DEATH = "died: signal SIGKILL"

Width = int | tuple[int, ...]
"""On how many devices, or on which."""


# -- in the objective -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """At which moments of a trial something happens; a rank is killed once in each."""

    within: Collection[int] = ()
    kills: Mapping[int, int] = field(default_factory=dict)
    folder: Path = Path()
    waits: bool = True


_plan = _Plan()


def moment(trial: Any) -> None:
    """A point of the objective, counted over the trial's life, at which it may move or die.

    All ranks call it equally often.
    """
    if not (_plan.within or _plan.kills):
        return
    now = trial.state["moment"] = trial.state.get("moment", -1) + 1
    if _plan.kills:
        trial.sum(0)  # or others might be as far as the next death
    flag = _plan.folder / f"{now}"
    if _plan.kills.get(now) == trial.rank and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if now in _plan.within:
        ask_to_move(trial, wait=_plan.waits)
        stop_line = trial._session.stop_line
        while _plan.waits and trial.sum(int(stop_line._is_asked)) < trial.world_size:
            trial.should_prune()  # the order is on its way


def _fly(trial: Any, *, objective: Callable[[Any], Any], plan: _Plan) -> Any:
    """The objective; what it has put into `trial.state["seen"]` becomes an attribute."""
    global _plan
    _plan = plan
    value = objective(trial)
    if "seen" in trial.state:
        trial.set_user_attr("seen", trial.state["seen"])
    return 0.0 if value is None else value


# -- widths by order ------------------------------------------------------------------------------


class _Controller(ScriptedController):
    """As the fleet's own, it obeys a trial's limit, and flies again what was lost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._begun: dict[int, int] = {}  # with how many epochs, run by run
        self._too_wide: set[int] = set()
        self._losses = 0

    def _take(self, event: Event) -> list[Instruction]:
        if isinstance(event, WidthLimited) and event.run_id in self._flying:
            return self._limit(event.run_id, event.max_devices)
        return super()._take(event)

    def _limit(self, run_id: int, most: int) -> list[Instruction]:
        """Fly on so many devices to the end: what moves no more is told of once."""
        number, leg = self._flying[run_id]
        if len(leg.devices) == most:
            self._legs[number] = []
            leg.until_epoch, leg.until_asked = None, False
            return []
        widest = max([leg, *self._legs[number]], key=lambda leg: len(leg.devices))
        self._legs[number] = [Leg(widest.devices[:most])]
        if len(leg.devices) < most:
            return []
        self._too_wide.add(run_id)
        left = tuple(d for d in leg.devices if d not in self._ended.get(run_id, {}))
        return [Abort(run_id=run_id, devices=left, lost=False)] if left else []

    def _rank_ended(self, event: RankEnded) -> list[Instruction]:
        run_id = event.run_id
        number, leg = self._flying[run_id]
        instructions = super()._rank_ended(event)
        is_lost = Ending.LOST in self._ended[run_id].values()
        if run_id in self._flying or not (is_lost or run_id in self._too_wide):
            return instructions
        if is_lost:
            self._losses += 1
            if self._losses > MAX_RESTARTS:
                self._live.discard(number)
                return [GiveUp(number=number, run_id=run_id, restarts=MAX_RESTARTS)]
            self._legs[number].insert(0, leg)
        self._epochs[number] = self._begun[run_id]
        self._live.add(number)
        return [Requeue(number=number, run_id=run_id)]

    def _launches(self) -> list[Instruction]:
        launches = super()._launches()
        for run_id, (number, _) in self._flying.items():
            self._begun.setdefault(run_id, self._epochs[number])
        return launches


class _Fleet(ScriptableFleet):
    controller = _Controller


def _devices(widths: Sequence[Width]) -> list[tuple[int, ...]]:
    """One stays where a trial moves, some join; those that are said to be are taken."""
    return [
        width
        if isinstance(width, tuple)
        else tuple((2 * i + k) % NUM_DEVICES for k in range(width))
        for i, width in enumerate(widths)
    ]


def _legs(widths: Sequence[Width], within: Collection[int]) -> list[Leg]:
    devices = _devices(widths)
    if within:
        assert len(within) == len(widths) - 1, "a move for each width but the first"
        *moved, last = devices
        return [*(Leg(some, until_asked=True) for some in moved), Leg(last)]
    return [Leg(some, until) for until, some in enumerate(devices[:-1], 1)] + [Leg(devices[-1])]


# -- what comes of it -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Flown:
    """What a trial came to.

    Attributes:
        trial: As the study has it.
        widths: On how many devices it flew, flight by flight.
        endings: How each flight ended.
        told: What was printed meanwhile.
        deaths: And of it, what of processes that were killed.
        error: What the call raised.
    """

    trial: optuna.trial.FrozenTrial
    widths: list[int]
    endings: list[str]
    told: str
    deaths: list[str]
    error: Exception | None

    @property
    def values(self) -> Any:
        """What is compared."""
        trial = self.trial
        return {"value": trial.values, "reports": trial.intermediate_values, **trial.user_attrs}


class Lab:
    """A fleet of four CPU slots, on which objectives fly as they are told to."""

    def __init__(self, pipeline: Any, **options: Any) -> None:
        options.setdefault("policy", "equal-split")
        options.setdefault("checkpoints", Checkpoints(interval_s=1e6))  # who is asked is to move
        self._fleet = _Fleet(pipeline, devices=NUM_DEVICES, device_type="cpu", **options)
        self._undisturbed: dict[Any, Flown] = {}
        await_trainers(self._fleet, NUM_DEVICES)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.close()

    def fly(
        self,
        objective: Callable[[Any], Any],
        widths: Sequence[Width] | None,
        *,
        within: Collection[int] = (),
        kills: Mapping[int, int] | None = None,
        waits: bool = True,
    ) -> Flown:
        """Fly with these widths, one after the other; None for what the fleet would plan.

        Args:
            objective: It calls `moment` where it is moved or killed.
            widths: The next one from the next epoch on, the last one to the end.
            within: At these moments it gets the next width, in the midst of a movable pass.
            kills: At these moments a rank is killed, the one that is given.
            waits: Until it is told to move, so that it does at that step.
        """
        study = optuna.create_study()
        self._fleet.script = None if widths is None else {0: _legs(widths, within)}
        error = None
        with tempfile.TemporaryDirectory() as folder, _listening() as told:
            plan = _Plan(tuple(within), dict(kills or {}), Path(folder), waits)
            flies = functools.partial(_fly, objective=objective, plan=plan)
            try:
                study.optimize(flies, n_trials=1, executor=self._fleet)
            except Exception as raised:
                error = raised
        flights = flights_of(study).get(0, [])
        return Flown(
            trial=study.trials[0],
            widths=[len(flight["devices"]) for flight in flights],
            endings=[flight["ending"] for flight in flights],
            told="\n".join(line for line in told if _DEATH not in line),
            deaths=[line for line in told if _DEATH in line],
            error=error,
        )

    def undisturbed(self, objective: Callable[[Any], Any], width: Width = 1) -> Flown:
        """On one device, or always as many, it neither moves nor dies."""
        if (objective, width) not in self._undisturbed:
            flown = self.fly(objective, [width])
            if flown.error is not None:
                raise flown.error
            self._undisturbed[objective, width] = flown
        return self._undisturbed[objective, width]

    def same(
        self,
        objective: Callable[[Any], Any],
        widths: Sequence[Width] = (1, 3, 2),
        *,
        within: Collection[int] = (),
        kills: Mapping[int, int] | None = None,
        waits: bool = True,
        against: Width = 1,
        rel: float = 1e-8,
        absolute: float = 1e-10,
        told: Sequence[str] = (),
    ) -> Flown:
        """It gives what it gives undisturbed, and nothing is told but what is expected.

        Args:
            objective: See `fly`, as for `widths`, `within`, `kills` and `waits`.
            against: How wide it is undisturbed.
            rel: The largest relative difference of two numbers; 0 with an `absolute` of 0 for
                the same bits.
            absolute: The largest absolute difference.
            told: What is told, once each.
        """
        undisturbed = self.undisturbed(objective, against)
        flown = self.fly(objective, widths, within=within, kills=kills, waits=waits)
        if flown.error is not None:
            raise flown.error
        _compare(flown, undisturbed, rel, absolute)
        assert flown.endings.count("lost") == len(kills or {})
        expected = [len(devices) for devices in _devices(widths)]
        assert kills or flown.widths == (expected if waits else expected[: len(flown.widths)])
        assert len(flown.deaths) == len(kills or {})
        for name in told:
            assert flown.told.count(name) == 1, f"not told of {name!r} once: {flown.told}"
        assert told or "Trial 0" not in flown.told, flown.told
        return flown

    def one_device(
        self, objective: Callable[[Any], Any], word: str, *, widths: Sequence[Width], most: int = 1
    ) -> Flown:
        """It ends on one device, or so many at `most`, as it is told once; and it is right.

        Args:
            objective: See `fly`, as for `widths`.
            word: What the user must read.
            most: On how many devices it may end.
        """
        flown = self.fly(objective, widths)
        if flown.error is not None:
            raise flown.error
        about = [line for line in flown.told.splitlines() if "Trial 0" in line]
        assert flown.widths[-1] <= most, f"on {flown.widths} devices: {flown.told}"
        assert len(about) == 1, f"told {len(about)} times: {about}"
        assert word in about[0]
        _compare(flown, self.undisturbed(objective), 1e-8, 1e-10)
        return flown

    def refused(
        self, objective: Callable[[Any], Any], *names: str, widths: Sequence[Width] | None = (2,)
    ) -> Flown:
        """The trial fails, and its error names the matter."""
        flown = self.fly(objective, widths)
        assert flown.error is not None, f"not refused: {flown.values}"
        assert flown.trial.state is optuna.trial.TrialState.FAIL
        for name in names:
            assert name in str(flown.error)
        return flown


@contextmanager
def _listening() -> Iterator[list[str]]:
    """What is told of trials."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("optuna").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("optuna").removeHandler(handler)


def _compare(flown: Flown, alone: Flown, rel: float, absolute: float) -> None:
    __tracebackhide__ = True
    assert flown.trial.state is alone.trial.state
    unlike = list(_unlike(flown.values, alone.values, rel, absolute, "trial"))
    assert not unlike, f"{len(unlike)} of the values differ from those on one device: {unlike[:5]}"


def _unlike(left: Any, right: Any, rel: float, absolute: float, name: str) -> Iterator[Any]:
    """Names of what differs, with both values."""
    if isinstance(left, Mapping) and isinstance(right, Mapping) and left.keys() == right.keys():
        for key in left:
            yield from _unlike(left[key], right[key], rel, absolute, f"{name}.{key}")
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, pair in enumerate(zip(left, right, strict=True)):
            yield from _unlike(*pair, rel, absolute, f"{name}[{index}]")
    elif isinstance(left, float) and isinstance(right, float):
        both_nan = math.isnan(left) and math.isnan(right)
        if not both_nan and not math.isclose(left, right, rel_tol=rel, abs_tol=absolute):
            yield name, left, right
    elif left != right:
        yield name, left, right
