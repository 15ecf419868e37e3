"""What the controller knows of trials and runs, and the policy it follows. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, get_args

from optuna_fleet.events import Ending, Model

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

    `lost_with_node` if a whole node was taken from it; `clears` if it was told to leave
    one that goes; `lingers` if its last ranks are not waited for any more; `is_news` if the last
    plan did not know how it would end; `is_between_epochs` if one has ended since the last plan
    was asked for.
    """

    run_id: int
    number: int
    devices: tuple[int, ...]
    measured: bool
    stage: Stage = Stage.TRAINING
    endings: dict[int, Ending] = field(default_factory=dict)
    lost_with_node: bool = False
    clears: bool = False
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
