"""What travels between driver, agents and trainers on the control channel.

What a user's code made (objectives, values, exceptions) travels as cloudpickle inside of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from optuna_fleet.events import Ending
from optuna_fleet.pipeline.stats import PipelineUse
from optuna_fleet.settings import Settings
from optuna_fleet.wire.packing import Raised

# -- hello ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReady:
    """First message of an agent: the node is up."""

    node: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReady:
    """First message of a trainer; `agent` is the process id of the agent that started it."""

    device: int
    pid: int
    agent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerUnfit:
    """In the place of `TrainerReady`: its device does not work, and its process ends."""

    device: int
    pid: int
    problem: str


# -- driver to agent ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KillTrainer:
    """Kill a trainer if it still lives; the agent starts a new one in its place."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOut:
    """Have no trainer for this device any more."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStore:
    """Start the store where the ranks of a trial find each other; answer with `StoreReady`.

    It takes the place of one that there may be.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPipeline:
    """Answer with `PipelineReport`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit:
    """End the process (agent: and all its children)."""


# -- agent to driver ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStarted:
    """A trainer was forked, or could not be: then `problem` says why, and there is no `pid`."""

    device: int
    pid: int | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerExited:
    """A trainer process ended; `cause` is its exit code or signal in words.

    `out_of_memory` if the kernel killed it for want of memory.
    """

    device: int
    pid: int
    cause: str
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """The agent died, and all it had started with it; another one takes its place.

    Nobody sends it: the driver makes it when the agent has ended.
    """

    cause: str
    exits: tuple[TrainerExited, ...]

    @property
    def text(self) -> str:
        """What the user should know of it."""
        return (
            f"The fleet's agent process ended with {self.cause}; another one was started. The "
            "trials that flew are run again from their last checkpoints."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReady:
    """The store accepts connections at this address; `pid` keeps it, and `agent` started that."""

    host: str
    port: int
    pid: int
    agent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLost:
    """The store's process, kept by `agent`, ended; `cause` is its code or signal in words."""

    cause: str
    agent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineNotice:
    """Something about the node that the user should know, as a sentence."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """What the node's shared pipeline has done since its start.

    Sent when asked for, and by itself now and then while trials read.

    Attributes:
        preprocessed: Samples preprocessed.
        consumed: Samples delivered to trials.
        resident_bytes: Bytes of preprocessed data in memory now.
        repeated: Samples of ``preprocessed`` that had been preprocessed before and dropped.
        num_skipped: Samples that raised and whose place others took, in all epochs.
        num_lost: Preprocessors that died.
        use: How preprocessors and readers spent their time, and how full the queues were.
        is_answer: It was asked for.
    """

    preprocessed: int = 0
    consumed: int = 0
    resident_bytes: int = 0
    repeated: int = 0
    num_skipped: int = 0
    num_lost: int = 0
    use: PipelineUse = field(default_factory=PipelineUse)
    is_answer: bool = False

    def since(self, last: PipelineReport) -> PipelineReport:
        """What came after `last`."""
        return replace(
            self,
            preprocessed=self.preprocessed - last.preprocessed,
            consumed=self.consumed - last.consumed,
            repeated=self.repeated - last.repeated,
            num_skipped=self.num_skipped - last.num_skipped,
            num_lost=self.num_lost - last.num_lost,
            use=self.use.since(last.use),
        )


# -- driver to trainer ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrial:
    """Run the objective as one rank of a trial.

    Attributes:
        objective: cloudpickle of the objective; None if this trainer already has `objective_id`.
        settings: What the script's process is set to; comes with the objective.
        measure: Measure the training rate over the first batches.
        group: Name of the run's process group in the store; not used by any other run.
        store: Where the ranks find each other; needed for more than one.
        study_name: Name of the study, which checkpoints carry.
        shares_gpu: Whether several ranks are on one GPU.
        parameters: What the study has suggested to the trial so far, where it is to be resumed.
        checkpoint: Path of the checkpoint to resume from, or None.
        checkpoint_to: Path to write checkpoints to while it trains.
        maximize: Whether larger values are better; None where there are several objectives.
        final_to: Path to write the checkpoint to that it leaves when it is done; None for none.
        best_to: Path for what its best report so far would leave, until then; None for none.
        heartbeat_s: Seconds between two `Heartbeat` messages; None for none.
        collective_s: Seconds after which a collective, or the rendezvous before, gives up.
        num_devices: Most devices that the trial could have in this fleet.
    """

    run_id: int
    number: int
    trial_id: int
    rank: int
    world_size: int
    seed: int
    objective_id: int
    objective: bytes | None
    measure: bool
    group: str
    store: StoreReady | None
    checkpoint: str | None
    checkpoint_to: str
    gc_after_trial: bool
    maximize: bool | None
    settings: Settings = field(default_factory=Settings)
    final_to: str | None = None
    best_to: str | None = None
    heartbeat_s: float | None = None
    collective_s: float = 600.0
    num_devices: int = 1
    study_name: str = ""
    shares_gpu: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)


# -- trainer to driver ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBatchRequested:
    """The run reached its first request for data; again if its next loop has other epochs."""

    run_id: int
    structure: str
    resumable: bool
    batch_size: int
    samples_per_epoch: int
    max_epochs: int | None = None
    min_devices: int = 1
    max_devices: int | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a rank is in its objective.

    Attributes:
        num_batches: Batches that it has asked for.
        num_calls: Calls that it has made.
        collectives: The last that it has begun, of gradients, BatchNorms, sums and means: the
            running number of each, from 1, and what it is for.
        epoch: The epoch that it is in.
        is_ordered: Its calls come from the thread that trains, so that their order among the
            collectives is the same on all ranks.
    """

    num_batches: int = 0
    num_calls: int = 0
    collectives: tuple[tuple[int, str], ...] = ()
    epoch: int = 0
    is_ordered: bool = True

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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    an error of the device itself, which `error` describes.
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
