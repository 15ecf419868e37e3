"""What travels between the driver and the agents of nodes on the control channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from optuna_fleet.pipeline.exchange import Peer
from optuna_fleet.pipeline.pipeline_messages import PipelineStats
from optuna_fleet.resources import Device
from optuna_fleet.settings import Settings

SIGN_EVERY_S = 1.0
"""Seconds between two signs of life."""

# -- hello ----------------------------------------------------------------------------------------


class ProcessId(NamedTuple):
    """A process of the fleet: the incarnation of the agent that started it, and its pid there."""

    agent: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJoining:
    """First message of an agent: what its node is. Answered with `NodeSetup` or `Refused`.

    Attributes:
        agent: Its incarnation: no two agents have the same.
        node: Name of the node; the same when another agent joins from there.
        devices: Its slots, numbered within the node.
        cores: How many it may use.
        machine: What tells whether two processes see the same process ids.
        pid: Process id of the agent.
        versions: Of what has to be alike on all nodes, by name.
    """

    agent: str
    node: str
    devices: tuple[Device, ...]
    cores: int
    machine: str
    pid: int
    versions: Mapping[str, str]


# -- driver to agent ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The answer to what can't be done, as that a node takes part; `problem` says why."""

    problem: str


@dataclass(frozen=True, kw_only=True)
class SignOfLife:
    """Both ways, every second, where agents have leases: silence means that the other is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillTrainer:
    """Kill the trainer of a device, if it is still this one; another is started in its place.

    Without a `pid` it is whoever there is, and no other is started any more.
    """

    device: int
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepObjective:
    """Keep what the trainers of this node are to run, in the place of what was kept before.

    Answered with `ObjectiveKept`.
    """

    objective_id: int
    objective: bytes
    settings: Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckObjective:
    """Make a pre-flight check, in the place of one under way; answer with `Checked`.

    Attributes:
        check_id: Not used by any other check.
        order: A pickled `preflight.records.Order`, without the data sets.
        first_limit_s: What the first rehearsal may take, in seconds.
    """

    check_id: int
    order: bytes
    first_limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCheck:
    """Nobody waits for the check under way any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStore:
    """Start the store where the ranks of a trial find each other; answer with `StoreReady`.

    It takes the place of one that there may be.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareChunks:
    """There are other nodes: give them chunks. Answered with `ChunksShared`; a plan follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPipeline:
    """Answer with `PipelineReport`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit:
    """End the process (agent: and all its children)."""


# -- agent to driver; a sentence for the user is sent as it is ------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFailed:
    """Last words of an agent: it ends, by an error of its own that `problem` has in words."""

    node: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeGiven:
    """The agent was told that its node will be taken, `in_s` seconds from now."""

    agent: str
    in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveKept:
    """Trainers of this node find the `KeepObjective` at `path`, as a pickle."""

    agent: str
    objective_id: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A check is over: with a pickled `preflight.verdict.Verdict`, empty if it has died."""

    check_id: int
    verdict: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStarted:
    """A trainer was forked, or could not be: then `problem` says why; there is no `process`."""

    device: int
    process: ProcessId | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerExited:
    """A trainer process ended; `cause` is its exit code or signal in words.

    `out_of_memory` if the kernel killed it for want of memory.
    """

    device: int
    process: ProcessId
    cause: str
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeaving:
    """A node will be gone soon, as its engine says: nobody sends it."""

    text: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node is gone, with all processes on it.

    Nobody sends it: the driver makes it of what it is told, or not told any more.

    Attributes:
        text: What the user should know of it.
        exits: The trainers that were there.
        devices: The node's devices.
        is_replaced: Another agent is started there: its devices come back.
        had_store: It kept the store where the ranks of a trial find each other.
    """

    text: str
    exits: tuple[TrainerExited, ...]
    devices: tuple[int, ...]
    is_replaced: bool
    had_store: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReady:
    """The store accepts connections at this address; `process` keeps it."""

    host: str
    port: int
    process: ProcessId


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLost:
    """The store's process, kept by `agent`, ended; `cause` is its code or signal in words."""

    cause: str
    agent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksShared:
    """This node gives its chunks to others who connect there."""

    peer: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """What the node's shared pipeline has done since its start.

    Sent when asked for, and by itself now and then while trials read.

    Attributes:
        stats: That.
        num_most: Preprocessors that there may be.
        is_answer: It was asked for.
        agent: Who sends it.
    """

    agent: str
    stats: PipelineStats = field(default_factory=PipelineStats)
    num_most: int = 0
    is_answer: bool = False
