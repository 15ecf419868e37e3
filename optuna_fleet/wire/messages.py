"""What travels between the driver and trainers on the control channel.

What a user's code made (objectives, values, exceptions) travels as cloudpickle inside of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from optuna_fleet.events import Ending
from optuna_fleet.wire.node_messages import ProcessId, StoreReady
from optuna_fleet.wire.packing import Raised

Place: TypeAlias = tuple[int, int, int]
"""A step of a trial: its loop over epochs, from 1, the epoch in it and the batch in that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReady:
    """First message of a trainer; `problem`: its device does not work, and its process ends."""

    device: int
    process: ProcessId
    problem: str = ""


# -- driver to trainer ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrial:
    """Run the objective as one rank of a trial.

    Attributes:
        objective_id: Which objective it is.
        objective_at: Where this node's agent keeps it.
        measure: Measure the training rate over the first batches.
        group: Name of the run's process group in the store; not used by any other run.
        store: Where the ranks find each other; needed for more than one.
        study_name: Name of the study, which checkpoints carry.
        by_gloo: Whether its ranks are a group by gloo, though some may be on GPUs.
        run_name: In the names of the checkpoints that it writes.
        folder: Where these are, on the driver's machine.
        folder_token: By which a trainer knows whether it sees that folder itself.
        checkpoints: Where those are that it is to be resumed from, the newest good one counts.
        bests: Where those of its best reports may be, the newest first.
        maximize: Whether larger values are better; None where there are several objectives.
        leaves_final: Whether it leaves a checkpoint when it is done, if it is among the best.
        heartbeat_s: Seconds between two `Heartbeat` messages; None for none.
        collective_s: Seconds after which a collective, or the rendezvous before, gives up.
        num_devices: Most devices of one type that the trial could have in this fleet.
        num_of_all_types: Most that it could have if it spans types.
        held: The run that left its state in the memory of rank 0's process: the trial goes on with
            that, `checkpoints` or not. None where it goes on with a checkpoint, or begins.
    """

    run_id: int
    number: int
    seed: int
    maximize: bool | None
    trial_id: int = 0
    rank: int = 0
    world_size: int = 1
    objective_id: int = 0
    measure: bool = False
    group: str = ""
    store: StoreReady | None = None
    gc_after_trial: bool = False
    objective_at: str = ""
    run_name: str = ""
    folder: str = ""
    folder_token: str = ""
    checkpoints: tuple[str, ...] = ()
    bests: tuple[str, ...] = ()
    leaves_final: bool = False
    heartbeat_s: float | None = None
    collective_s: float = 600.0
    num_devices: int = 1
    num_of_all_types: int = 1
    study_name: str = ""
    by_gloo: bool = False
    held: int | None = None

    @property
    def resumes(self) -> bool:
        """Whether the trial goes on from where it was."""
        return self.held is not None or bool(self.checkpoints)

    @property
    def are_alike(self) -> bool:
        """Whether all devices of the fleet are of one type, as far as is known."""
        return self.num_of_all_types <= self.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class AskStep:
    """The run is to leave its devices within an epoch, or to be saved: answer with `AtStep`."""

    run_id: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAt:
    """Stop before the first step that is not before this one, and capture the trial's state.

    If it `saves`, the state is written, and all ranks go on. Else all leave the objective: at once
    if the trial `stays` with rank 0's process, whose memory has the state; if not when the
    checkpoint is written.
    """

    run_id: int
    place: Place
    saves: bool = False
    stays: bool = False


# -- trainer to driver ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStep:
    """Answers `AskStep`: this rank could stop before that step, and waits there for `StopAt`."""

    run_id: int
    rank: int
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The run has come to where it is to leave.

    The checkpoint that it tells of next is of the state that it leaves with.
    """

    run_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The run's first training batch is done."""

    run_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A sentence for the user, unless it has `keys`, what it is about, and all were told of."""

    run_id: int
    keys: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """The run could not make a checkpoint, and goes on without; `problem` says why."""

    run_id: int
    problem: str


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a rank is in its objective.

    Attributes:
        num_batches: Batches that it has asked for.
        num_calls: Calls that it has made.
        passed: The last place that ranks come by together: its number among the calls, and how
            many collectives it had begun before.
        collectives: The last that it has begun, of gradients, BatchNorms, sums and means: the
            running number of each, from 1, and what it is for.
        epoch: The epoch that it is in.
        is_ordered: Its calls come from the thread that trains, so that their order among the
            collectives is the same on all ranks.
        way_out: In words, how it has left the objective for good, where it may still wait for
            others; empty while it has not, or if it failed.
    """

    num_batches: int = 0
    num_calls: int = 0
    passed: tuple[int, int] = (0, 0)
    collectives: tuple[tuple[int, str], ...] = ()
    epoch: int = 0
    is_ordered: bool = True
    way_out: str = ""

    @property
    def num_collectives(self) -> int:
        """Collectives that it has begun."""
        return self.collectives[-1][0] if self.collectives else 0


class Phase(Enum):
    """What a rank is at.

    In the objective it computes, as long as it likes. What it has in common with its peers, their
    rendezvous and collectives, ends soon or never.
    """

    OBJECTIVE = "in the objective"
    JOINING = "joining"
    COLLECTIVE = "in a collective"


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A sign of life of one rank.

    Attributes:
        progress: How far it is.
        phase: What it is at.
        is_waiting: It waits for the driver's answer to a call.
        where: The line it is at, in words.
        memory_bytes: Private memory of its process.
    """

    run_id: int
    rank: int
    progress: Progress
    is_waiting: bool
    where: str
    memory_bytes: int
    phase: Phase = Phase.OBJECTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Where a rank's time went, in seconds."""

    probing_s: float = 0.0
    profiling_s: float = 0.0
    data_wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One rank left the objective, at `time_s` of the machine's monotonic clock.

    `value` is packed. `is_last`: its process serves no more runs and ends. `has_device_failed`: by
    an error of the device itself, which `error` describes. `holds`: its process has the state of
    the run in memory, until it begins another run. A checkpoint of it is written, or will be:
    `CheckpointSaved` or `CheckpointFailed` tells.
    """

    run_id: int
    rank: int
    device: int
    time_s: float
    ending: Ending
    value: bytes = b""
    error: Raised | None = None
    progress: Progress = field(default_factory=Progress)
    usage: Usage = field(default_factory=Usage)
    is_last: bool = False
    has_device_failed: bool = False
    holds: bool = False
