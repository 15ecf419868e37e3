"""What happened (events, past facts) and what to do about it (instructions, imperatives).

The controller turns the one into the other; driver and replay carry the instructions out. A *run*
is one stay of a trial on devices. Its id is never used twice: what ended runs say can be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from optuna_fleet.alloc.problem import AllocationProblem, Facts, Plan
from optuna_fleet.preflight.verdict import Finding
from optuna_fleet.resources import Device


class EpochDecision(Enum):
    """What a trial does at the end of an epoch."""

    GO = "go on"
    CHECKPOINT = "checkpoint and go on"
    STOP = "stop: converged"
    YIELD = "yield: leave the devices with the state"


class Ending(Enum):
    """How one rank of a run ended: by itself, aborted, or with its process.

    `DISCONNECTED` if a collective failed for want of its peers: if nobody else tells why they
    left, they were lost. `KILLED` if the driver ended the process of a run that was aborted.
    """

    RETURNED = "returned"
    RAISED = "raised"
    DISCONNECTED = "disconnected"
    YIELDED = "yielded"
    ABORTED = "aborted"
    LOST = "lost"
    KILLED = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Facts):
    """What decides on which devices a trial can train, and how long.

    Attributes:
        structure: Name of its rate profile: trials of equal structure train at equal rates.
        resumable: It can leave its devices and go on elsewhere.
        min_devices: Fewest devices it fits on.
        max_devices: Most devices it can use: its global batch, or one would have no sample.
        rescale_up_s: Seconds of training a move to more devices costs; None for the policy's.
        rescale_down_s: Seconds of training a move to fewer devices costs; None for the policy's.
        movable: It can leave them within an epoch too.
        spans_types: It can have devices of several types at once.
        traits: What pre-flight checks know its kind by; empty for one that is not checked.
    """

    structure: str
    resumable: bool
    min_devices: int = 1
    max_devices: int
    rescale_up_s: float | None = None
    rescale_down_s: float | None = None
    movable: bool = True
    spans_types: bool = False
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialProposed:
    """The study gave a trial to run; with its model if that is known without a probe.

    `num_to_come` is how many may follow it, `checkpoint` where a dead driver left one of it.
    """

    number: int
    model: Model | None = None
    num_to_come: int = 0
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalDelayed:
    """There is no trial yet; `TrialProposed` or `ProposalsExhausted` follows by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalsExhausted:
    """No further trial may be started: the budget is spent, or the study was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequested:
    """A run asked for data for the first time, or said that its model is another now."""

    run_id: int
    model: Model


@dataclass(frozen=True, slots=True, kw_only=True)
class RateMeasured:
    """The training rate of a run over its first batches, in samples/s of the whole trial."""

    run_id: int
    samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthLimited:
    """A run has found that its trial gives other results on more than `max_devices`."""

    run_id: int
    max_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRefused:
    """A run that was told to yield can't be checkpointed, and trains on where it is."""

    run_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveMeasured:
    """A trial trains again, after `seconds` on devices without training."""

    run_id: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A run has written a checkpoint: from there its trial can go on, with this epoch."""

    run_id: int
    epoch: int
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnded:
    """A run finished an epoch and asks what to do; `converged` by the user's criterion.

    `predicted_epochs` is how many it will take in all, if somebody says so; `epochs_done` counts
    from the beginning of its loop. After its last epoch a run just ends.
    """

    run_id: int
    epochs_done: int
    converged: bool
    predicted_epochs: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    """One rank of a run left the objective; its device is free with that of the last one.

    Unless its trainer `is_leaving`: then `DeviceLost` follows.
    """

    run_id: int
    device: int
    ending: Ending
    is_leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLingers:
    """Ranks of a run take longer to end than others did: what these have left is free."""

    run_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost:
    """The trainer of a device died; what ran there is lost, and a successor is expected.

    `by_order` when the driver killed it as another rank of its run had failed, `with_node` when
    its node was taken: that does not count against the trial.
    """

    device: int
    by_order: bool = False
    with_node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthExpected:
    """Whether devices may join that were never there: a trial that needs more of them waits."""

    is_expected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLeaving:
    """A device will be gone soon: its trial leaves as soon as it can, and no other comes."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGone:
    """A device is no part of the fleet until it joins anew; the event may be repeated.

    It is left out, or its node has left: what still runs there, or is lost now, is lost with it.
    """

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailed:
    """A run broke a limit of its trial: it has to end at once, and the trial with it."""

    run_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceJoined:
    """A trainer is ready on a device, which belongs to the fleet from now on."""

    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessingMeasured:
    """What preprocessors can give to all trials together; None if they limit nobody."""

    samples_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckEnded:
    """A pre-flight check has come to this; to nothing if its node was lost."""

    finding: Finding | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckAffordable:
    """The devices have worked long enough for another check to be no more than its share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDecided:
    """The allocator answered."""

    plan: Plan


RunEvent: TypeAlias = (
    DataRequested
    | RateMeasured
    | WidthLimited
    | MoveRefused
    | MoveMeasured
    | CheckpointSaved
    | EpochEnded
    | RankEnded
    | RunLingers
    | RunFailed
)
Event: TypeAlias = (
    RunEvent
    | TrialProposed
    | ProposalDelayed
    | ProposalsExhausted
    | DeviceLost
    | DeviceGone
    | DeviceLeaving
    | GrowthExpected
    | DeviceJoined
    | PreprocessingMeasured
    | CheckEnded
    | CheckAffordable
    | PlanDecided
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    """Ask for a trial; answer `TrialProposed`, `ProposalDelayed` or `ProposalsExhausted`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Run a trial on these devices, from its `checkpoint` if it has one."""

    run_id: int
    number: int
    devices: tuple[int, ...]
    probe: bool
    measure: bool
    round: int
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginCheck:
    """Check a trial's kind on this device; answer with `CheckEnded`, later `CheckAffordable`."""

    number: int
    device: int
    traits: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """Solve this problem; answer with `PlanDecided`."""

    problem: AllocationProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEpoch:
    """Answer the run's `EpochEnded`; if it is to yield, its trial is about to get `devices`."""

    run_id: int
    decision: EpochDecision
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """The run must yield, within its epoch if it can; its trial is to get `devices`, if known."""

    run_id: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """A rank of the run failed or is `lost`: the others must end, or are killed."""

    run_id: int
    devices: tuple[int, ...]
    lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishTrial:
    """All ranks of the run have ended and the trial with it: tell the study."""

    number: int
    run_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """All ranks of the run have ended, the trial goes on later from its checkpoint."""

    number: int
    run_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The trial lost its devices too often: fail it."""

    number: int
    run_id: int
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnToQueue:
    """The trial was never launched: return it to the study as WAITING."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRound:
    """A plan is about to be carried out, which `moves` this many trials (for the log)."""

    round: int
    plan: Plan
    moves: int


Instruction: TypeAlias = (
    Propose
    | Launch
    | BeginCheck
    | Allocate
    | AnswerEpoch
    | Interrupt
    | Abort
    | FinishTrial
    | Requeue
    | GiveUp
    | ReturnToQueue
    | StartRound
)
