"""The one table: devices, trials and runs, and what the controller knows of the call besides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Literal, get_args

from optuna_fleet.alloc.problem import SEVERAL, AllocationProblem, Assignment
from optuna_fleet.events import Ending, Model
from optuna_fleet.resources import Device

Paradigm = Literal["global", "local", "elastic"]
"""When to decide: in rounds (FLEET-G), as devices fall free (FLEET-L), at events (BFTrainer)."""

PARADIGMS: tuple[Paradigm, ...] = get_args(Paradigm)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRules:
    """When to decide again, and within which bounds; see also `policies.Policy`.

    Attributes:
        max_restarts: How often a trial may lose its devices, without coming further, before it is
            failed.
        max_trials: Most trials that are under way at once; later ones are proposed as these end.
        lookahead: Trials that may wait for devices while further ones are proposed. Only trials
            whose model is known without a probe can wait unprobed.
        more_may_join: A trial that needs more devices than there are waits for them; else it is
            launched all the same, to fail and say so.
        looks_ahead: Kinds of trials are checked before a plan makes use of what is found.
        own_preprocessors: How many each trial has for itself; None if all trials share.
    """

    paradigm: Paradigm = "global"
    alpha: float = 0.8
    rate_spread: float = 2.0
    time_limit_s: float = 1.0
    phases: bool = False
    preprocess_samples_per_s: float | None = None
    rescale_s: float = 1.0
    moves_within_epochs: bool = False
    max_restarts: int = 3
    max_trials: int | None = None
    lookahead: int = 0
    more_may_join: bool = False
    looks_ahead: bool = True
    own_preprocessors: int | None = None


class Status(Enum):
    """Where a trial is; Optuna's storage owns its state."""

    PROPOSED = "proposed"
    PROBING = "probing"
    WAITING = "waiting"
    FLYING = "flying"


class Stage(Enum):
    """What a run is doing."""

    TRAINING = "training"
    AT_REST = "waits for the answer to `EpochEnded`"
    ASKED = "will be told to yield at the end of its epoch"
    LEAVING = "was told to yield"
    FIXED = "has refused to yield, and trains on"
    ABORTED = "was told to end at once"
    FAILED = "likewise, and its trial ends with it whatever becomes of its ranks"


_GONE = {Ending.LOST, Ending.KILLED}
_OVER = {Stage.ABORTED, Stage.FAILED}
STAGES_AFTER = {
    Stage.TRAINING: {Stage.AT_REST, Stage.ASKED, Stage.LEAVING} | _OVER,
    Stage.AT_REST: {Stage.TRAINING, Stage.LEAVING} | _OVER,
    Stage.ASKED: {Stage.TRAINING, Stage.LEAVING} | _OVER,
    Stage.LEAVING: {Stage.FIXED} | _OVER,
    Stage.FIXED: _OVER,
    Stage.ABORTED: {Stage.FAILED},
    Stage.FAILED: {Stage.FAILED},
}


@dataclass(slots=True, kw_only=True)
class Run:
    """A run that has not ended on all its devices; `endings` are those of its ranks, by device.

    `lost_with_node` if a whole node was taken from it; `lingers` if its last ranks are not waited
    for any more; `is_news` if the last plan did not know how it would end; `is_between_epochs` if
    one has ended since the last plan was asked for.
    """

    run_id: int
    number: int
    devices: tuple[int, ...]
    measured: bool
    stage: Stage = Stage.TRAINING
    endings: dict[int, Ending] = field(default_factory=dict)
    lost_with_node: bool = False
    lingers: bool = False
    is_news: bool = False
    is_between_epochs: bool = False

    def become(self, stage: Stage) -> None:
        """Enter another stage."""
        assert stage in STAGES_AFTER[self.stage], f"a run that {self.stage} can't become {stage}"
        self.stage = stage

    @property
    def is_moving(self) -> bool:
        """Whether it is to yield."""
        return self.stage in (Stage.ASKED, Stage.LEAVING)

    @property
    def is_aborted(self) -> bool:
        """Whether its ranks were told to end."""
        return self.stage in _OVER

    @property
    def is_over(self) -> bool:
        """Whether it has ended on all its devices."""
        return len(self.endings) == len(self.devices)

    @property
    def is_lost(self) -> bool:
        """Whether ranks were lost, not by their trial's doing: it is to be run again."""
        endings = set(self.endings.values())
        if endings & {Ending.LOST, Ending.ABORTED}:
            return True
        # Peers of nobody who has ended otherwise; that is known in the end.
        return self.is_over and Ending.DISCONNECTED in endings <= {Ending.DISCONNECTED, *_GONE}

    @property
    def remaining(self) -> tuple[int, ...]:
        """The devices on which it has not ended."""
        return tuple(device for device in self.devices if device not in self.endings)

    @property
    def surviving(self) -> tuple[int, ...]:
        """The devices whose processes have not ended with it."""
        return tuple(d for d in self.devices if self.endings.get(d) not in _GONE)

    @property
    def left(self) -> tuple[int, ...]:
        """The devices on which it has ended, but not their processes."""
        return tuple(device for device, how in self.endings.items() if how not in _GONE)

    @property
    def lost_on(self) -> tuple[int, ...]:
        """The devices that it has lost, or all, if it is not known which were lost first."""
        lost = tuple(d for d, how in self.endings.items() if how is Ending.LOST)
        return lost or self.devices

    @property
    def is_ending(self) -> bool:
        """Whether its devices fall free without a further decision."""
        return self.is_moving or self.is_aborted or bool(self.endings)


@dataclass(slots=True, kw_only=True)
class Trial:
    """A trial that is not done.

    `checkpoint` is where its last one is, and `epochs_saved` the epochs that are in it.
    `rescale_s` is what its last move was measured to cost, `previous_devices` what is left of the
    devices that a run had which lost some, or is about to; `max_devices` bounds it besides its
    model, where it has shown that it must not have more. `losses` has the nodes of each time that
    it lost devices since it got on, and `furthest` the epochs that it has done at most.
    """

    number: int
    model: Model | None = None
    epochs_done: int = 0
    checkpoint: str | None = None
    epochs_saved: int = 0
    predicted_epochs: float | None = None
    losses: list[frozenset[int]] = field(default_factory=list)
    furthest: int = 0
    was_launched: bool = False
    waited_rounds: int = 0
    rescale_s: float | None = None
    run: Run | None = None
    max_devices: int | None = None
    previous_devices: tuple[int, ...] = ()

    @property
    def status(self) -> Status:
        """Where it is; a trial whose model is not known is probed first."""
        if self.run is None:
            return Status.PROPOSED if self.model is None else Status.WAITING
        return Status.PROBING if self.model is None else Status.FLYING

    @property
    def lost_on(self) -> frozenset[int]:
        """The nodes of its losses."""
        return frozenset().union(*self.losses)

    @property
    def is_too_wide(self) -> bool:
        """Whether it has more devices than it has shown that it may have."""
        most = self.max_devices
        return most is not None and self.run is not None and len(self.run.devices) > most

    @property
    def fits_one_device(self) -> bool:
        """Whether one device is enough for it; its model must be known."""
        assert self.model is not None
        return self.model.min_devices == 1

    @property
    def most_devices(self) -> int:
        """Most devices it may have; its model must be known."""
        assert self.model is not None
        return self.model.max_devices if self.max_devices is None else self.max_devices


class Presence:
    """The devices that have joined, each until it is gone.

    One that is lost stays: a successor of its trainer is expected. What is known of a device is
    kept when it is gone, for the sake of runs that were on it.
    """

    def __init__(self) -> None:
        self._known: dict[int, Device] = {}
        self._here: set[int] = set()
        self._nums: dict[str, int] = {}  # by type; empty until it is asked for, as the next
        self._fewest: dict[tuple[str, int], tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[int]:
        return iter(self._here)

    def __getitem__(self, number: int) -> Device:
        """A device that has joined at any time."""
        return self._known[number]

    def join(self, device: Device) -> bool:
        """A device joins, for the first time or again; return whether there is one more now."""
        is_more = not self.leave(device.index)
        self._known[device.index] = device
        self._here.add(device.index)
        return is_more

    def leave(self, device: int) -> bool:
        """A device is gone; return whether that is news."""
        self._nums, self._fewest = {}, {}
        is_here = device in self._here
        self._here.discard(device)
        return is_here

    @property
    def num_by_kind(self) -> dict[str, int]:
        """Number of devices of each type, in ascending order."""
        if not self._nums:
            self._nums = dict(sorted(self.num_of_each(self._here).items()))
        return self._nums

    @property
    def kinds(self) -> tuple[str, ...]:
        """Device types, in ascending order."""
        return tuple(self.num_by_kind)

    @property
    def widest(self) -> int:
        """Most devices of one type."""
        return max(self.num_by_kind.values(), default=0)

    def fewest_nodes(self, kind: str, width: int) -> tuple[int, ...]:
        """On how few nodes 1, 2, ... devices of a type can be; 1 where there are not so many."""
        key = kind, width
        if key not in self._fewest:
            here = (self._known[device] for device in self._here)
            sizes = Counter(device.node for device in here if device.kind == kind)
            largest_first = sorted(sizes.values(), reverse=True)
            nodes = [n for n, size in enumerate(largest_first, 1) for _ in range(size)][:width]
            self._fewest[key] = (*nodes, *[1] * (width - len(nodes)))
        return self._fewest[key]

    def nodes_of(self, devices: Iterable[int]) -> frozenset[int]:
        """The nodes of devices that have joined at any time."""
        return frozenset(self._known[device].node for device in devices)

    def num_of_each(self, devices: Iterable[int]) -> Counter[str]:
        """How many of these devices, which have joined at any time, are of each type."""
        return Counter(self._known[device].kind for device in devices)

    def kind_of_all(self, devices: Iterable[int]) -> str:
        """Type of devices that have joined at any time, at least one; or `SEVERAL`."""
        kinds = self.num_of_each(devices)
        return SEVERAL if len(kinds) > 1 else next(iter(kinds))


class State:
    """The state of one call, which the controller and its planner change; nothing is decided here.

    Attributes:
        policy: What it follows.
        devices: Those that are there.
        trials: Trials that are not done, by number.
        runs: Runs that have not ended on all their devices, by run id.
        idle: Devices without a run.
        run_on: The run that each other device has, until it has ended there.
        joined: Device -> when it joined, as an ordinal; until it is lost.
        leaving: Devices that will be gone soon; nobody gets them.
        pending: Placements that wait until their devices are idle, by trial number. Nobody else
            gets these devices; all others may be planned for meanwhile.
        checked_on: The device that a check has, if there is any.
        may_grow: Devices may join that were never there.
        is_exhausted: No further trial may be started.
        is_proposing: A proposal is awaited.
        is_delayed: The study has no proposal before another trial ends.
        num_to_come: Trials that will still be proposed, as far as the study knows.
        moves_s: What each move so far was measured to cost, in seconds.
        finished_epochs: Of each trial that ended by itself, though it could go on.
        bounded_epochs: Of each that was to have no more.
        made_per_s: Samples per second that preprocessors were measured to give; None if that never
            was, or limits nobody.
        is_deciding: A plan is awaited.
        problem: The last one that was posed.
        has_news: Something has happened that the last plan did not know of.
        is_void: The last plan was made of wrong figures: another is made at once.
    """

    def __init__(self, policy: PolicyRules, run_ids: Iterator[int]) -> None:
        self.policy = policy
        self.devices = Presence()
        self.trials: dict[int, Trial] = {}
        self.runs: dict[int, Run] = {}
        self.idle: set[int] = set()
        self.joined: dict[int, int] = {}
        self.leaving: set[int] = set()
        self.pending: dict[int, Assignment] = {}
        self.checked_on: int | None = None
        self.may_grow = policy.more_may_join
        self.is_exhausted = self.is_proposing = self.is_delayed = False
        self.num_to_come = 0
        self.moves_s: list[float] = []
        self.finished_epochs: list[int] = []
        self.bounded_epochs: list[int] = []
        self.made_per_s: float | None = None
        self.is_deciding = self.has_news = self.is_void = False
        self.problem: AllocationProblem | None = None
        self._run_ids = run_ids
        self._joins = count()
        self.run_on: dict[int, Run] = {}
        self._ending: dict[int, Run] = {}  # in part, by run id: soon they are over

    def with_status(self, status: Status) -> list[Trial]:
        """Trials of that status, eldest first."""
        return [trial for trial in self.trials.values() if trial.status is status]

    def waiting(self) -> list[Trial]:
        """Trials that wait, but for those that have a pending placement, eldest first."""
        return [t for t in self.with_status(Status.WAITING) if t.number not in self.pending]

    def free(self) -> list[int]:
        """Idle devices that no pending placement waits for, in order.

        Not those of a run that will be over in a moment: one plan serves all of them.
        """
        ending = (run.left for run in self._ending.values() if not run.lingers)
        return sorted(self.idle.difference(self.leaving, self.promised, *ending))

    def next_devices(self, run: Run) -> tuple[int, ...]:
        """Where its trial is to go on, if that is known: on the rest, if some devices go."""
        if (promised := self.pending.get(run.number)) is not None:
            return promised.devices
        rest = tuple(device for device in run.devices if device not in self.leaving)
        return rest if len(rest) < len(run.devices) else ()

    @property
    def promised(self) -> set[int]:
        """Devices that pending placements wait for."""
        return {device for one in self.pending.values() for device in one.devices}

    def ready(self) -> list[tuple[Trial, tuple[int, ...]]]:
        """Takes out and returns the pending placements whose devices are all idle."""
        ready = [
            (self.trials[number], assignment.devices)
            for number, assignment in self.pending.items()
            if self.trials[number].run is None and self.idle.issuperset(assignment.devices)
        ]
        for trial, _ in ready:
            del self.pending[trial.number]
        return ready

    def can_serve(self, assignment: Assignment) -> bool:
        """Whether its trial and all its devices will be ready without a further decision."""
        own, runs = self.trials[assignment.number].run, self.run_on
        return (
            (own is None or own.is_ending)
            and self.leaving.isdisjoint(assignment.devices)
            and all(runs[d].is_ending if d in runs else d in self.idle for d in assignment.devices)
        )

    def void(self) -> None:
        """The last plan was made of wrong figures: make another at once."""
        self.is_void = self.has_news = True

    def call_off(self) -> None:
        """The last plans can't be carried out; another is made of what is left of them.

        What of them has not begun is dropped: who was not told to yield yet stays.
        """
        for run in self.runs.values():
            if run.stage is Stage.ASKED:
                run.become(Stage.TRAINING)
        self.pending = {n: a for n, a in self.pending.items() if self.can_serve(a)}
        self.void()

    def start_run(self, trial: Trial, devices: tuple[int, ...], *, measured: bool) -> Run:
        """Starts a run of a trial on idle devices."""
        self.idle.difference_update(devices)
        run = Run(
            run_id=next(self._run_ids), number=trial.number, devices=devices, measured=measured
        )
        trial.run = self.runs[run.run_id] = run
        trial.was_launched = True
        trial.waited_rounds, trial.previous_devices = 0, ()
        self.run_on.update(dict.fromkeys(devices, run))
        return run

    def end_rank(self, run: Run, device: int, ending: Ending, *, is_leaving: bool) -> None:
        """Ends a run on one device."""
        run.endings[device] = ending
        del self.run_on[device]
        self._ending[run.run_id] = run
        if device in run.surviving and not is_leaving:
            self.idle.add(device)

    def end_run(self, run: Run) -> Trial:
        """Forgets a run that has ended on all its devices; the trial waits, or is proposed."""
        del self.runs[run.run_id]
        self._ending.pop(run.run_id, None)
        trial = self.trials[run.number]
        if run.is_lost or trial.is_too_wide:
            trial.furthest = max(trial.furthest, trial.epochs_done)
            trial.epochs_done = trial.epochs_saved
        trial.run = None
        if run.is_lost or not self.leaving.isdisjoint(run.devices):
            trial.previous_devices = tuple(d for d in run.surviving if d not in self.leaving)
        return trial

    def end_check(self) -> None:
        """The check is over; its device is idle again, if it is there."""
        if self.checked_on is not None:
            self.idle.add(self.checked_on)
        self.checked_on = None

    def join(self, device: int) -> None:
        """A device joins, for the first time or again."""
        self.leaving.discard(device)
        self.idle.add(device)
        self.joined[device] = next(self._joins)

    def lose(self, device: int) -> None:
        """A device is lost."""
        self.idle.discard(device)
        self.joined.pop(device, None)
        if device == self.checked_on:
            self.checked_on = None

    def remove(self, number: int) -> None:
        """A trial is done."""
        del self.trials[number]
        self.pending.pop(number, None)

    def note_end(self, trial: Trial) -> None:
        """A trial has ended by itself: in the epoch after those it is known to have done."""
        epochs = trial.epochs_done + 1
        most = None if trial.model is None else trial.model.max_epochs
        is_bounded = most is not None and epochs >= most
        (self.bounded_epochs if is_bounded else self.finished_epochs).append(epochs)
