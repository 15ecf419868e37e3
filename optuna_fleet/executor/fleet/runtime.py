"""What outlives one `optimize` call: nodes and their trainers, channels to them, the solver."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from optuna_fleet.alloc import IsolatedAllocator, RateProfile
from optuna_fleet.checkpoints.folder import StudyFolder
from optuna_fleet.checkpoints.store import private_folder, remove_all
from optuna_fleet.events import DeviceJoined, DeviceLeaving, DeviceLost, Ending, Event
from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.config import NodeSetups
from optuna_fleet.executor.cluster.engine import Departure, Engine
from optuna_fleet.executor.fleet.agents import Agents, NodeGone, Nodes
from optuna_fleet.executor.fleet.connections import AgentUnheard, Connections
from optuna_fleet.executor.fleet.faults import MOST_IN_A_ROW, Faults
from optuna_fleet.executor.fleet.pipelines import ChunkSharing, PipelineReports
from optuna_fleet.executor.fleet.trainers import Trainers
from optuna_fleet.options import Limits
from optuna_fleet.pipeline.pipeline_messages import PipelineStats
from optuna_fleet.processes import fill_standard_streams, state_in_words
from optuna_fleet.resources import Fleet
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.messages import Ended, TrainerReady
from optuna_fleet.wire.node_messages import (
    AgentFailed,
    AgentJoining,
    ChunksShared,
    NodeLost,
    NoticeGiven,
    OpenStore,
    PipelineReport,
    ReportPipeline,
    StoreLost,
    StoreReady,
    TrainerExited,
    TrainerStarted,
)
from optuna_fleet.wire.transfer import TransferServer

_REPORT_LIMIT_S = 5.0
_RESET_LIMIT_S = 10.0


class Rendezvous:
    """The store where the ranks of a trial find each other: asked for once, replaced when lost.

    Attributes:
        store: Its address, once it is open.
    """

    def __init__(self, agents: Agents, faults: Faults) -> None:
        self.store: StoreReady | None = None
        self._agents, self._faults = agents, faults
        self._asked: str | None = None

    def open(self) -> None:
        """Have it started, once."""
        node = next(iter(self._agents.nodes), None)
        if self._asked is None and node is not None:
            self._asked = node.agent
            self._agents.tell(node.agent, OpenStore())

    def void(self) -> None:
        """It is no use: the next who wants one asks again."""
        self.store = self._asked = None

    def node_lost(self, agent: str) -> bool:
        """An agent is gone, and what it has kept; return whether that was the store."""
        if self._asked != agent:
            return False
        self.void()
        return True

    def ready(self, store: StoreReady) -> None:
        """It is open."""
        if store.process.agent == self._asked:
            self.store = store
            self._faults.worked("the store")

    def lost(self, message: StoreLost) -> None:
        """Its process has ended.

        Raises:
            LaunchError: As others did before they were ready.
        """
        if message.agent != self._asked:
            return
        number = self._faults.failed("the store")
        if number >= MOST_IN_A_ROW:
            raise LaunchError(
                "The store where the ranks of a trial find each other ended "
                f"{number} times in a row before it was ready, the last time with "
                f"{message.cause}; what it printed says why."
            )
        self.void()


class Runtime:
    """The running fleet of one executor.

    Attributes:
        inbox: Whatever happens; a call takes it from there, and has `heard` say what it means.
        profiles: Measured training rates by model structure; they serve later calls too.
        rendezvous: The store where the ranks of a trial find each other.
        faults: What is left out.
        reports: What the nodes' pipelines had done when last heard of.
    """

    def __init__(
        self,
        engine: Engine,
        allocator: IsolatedAllocator,
        checkpoint_dir: Path | None,
        limits: Limits,
        setups: NodeSetups,
    ) -> None:
        self.allocator = allocator
        self.profiles: dict[str, RateProfile] = {}
        self.run_ids = itertools.count()
        self.faults = Faults()
        fill_standard_streams()
        self._checkpoint_dir = checkpoint_dir or private_folder()
        self._keeps_checkpoints = checkpoint_dir is not None
        self._owner = os.getpid()
        self._secret = secrets.token_hex()
        self.reports = PipelineReports()
        self.connections = Connections(engine.host, engine.port)
        self.inbox = self.connections.inbox
        self._setups = setups
        if not self._keeps_checkpoints:
            setups.private_folder = str(self._checkpoint_dir)
        self._transfer_server = TransferServer(self._checkpoint_dir, self._setups.data_sets)
        self.connections.on_transfer = self._transfer_server.serve
        try:
            self.agents = Agents(
                *(engine, self.connections, self.faults, self._setups.of),
                start_s=limits.start_s,
            )
        except BaseException:
            self.connections.close()
            engine.close()
            self._remove_private_folder()
            raise
        self.trainers = Trainers(self.agents, self.faults)
        self.rendezvous = Rendezvous(self.agents, self.faults)
        exchange = setups.pipeline.exchange if setups.pipeline else "local"
        self.sharing = ChunkSharing(exchange, self.agents.tell)

    @property
    def nodes(self) -> Nodes:
        """Those that are there."""
        return self.agents.nodes

    # -- what happens -----------------------------------------------------------------------------

    def heard(self, event: Any) -> Sequence[Any]:  # noqa: C901 - one arm each
        """Take what came in, and return what a call is to know of it, in order.

        Raises:
            LaunchError: There is no device left.
        """
        agents = self.agents
        news: Sequence[Any] = ()
        match event:
            case None:
                pass
            case str():
                fleet_logger.warning(event)
            case partial():  # what is due
                news = event() or ()
            case AgentJoining():
                self._joining(event)
            case AgentFailed():
                agents.failed(event)
            case Departure():
                news = agents.departs(event)
            case NoticeGiven():
                news = agents.noticed(event)
            case NodeGone() | AgentUnheard():
                news = self._lose(event)
            case TrainerStarted():
                self._trainer_started(event)
            case TrainerReady() if event.problem:
                self._trainer_is_of_no_use(event)
            case StoreReady():
                self.rendezvous.ready(event)
                news = (event,)
            case StoreLost():
                self.rendezvous.lost(event)
            case PipelineReport():
                self.reports.take(event)
                news = (event,)
            case ChunksShared():
                if self.nodes.get(event.peer.agent):  # what a dead agent has said is void
                    self.sharing.ready(event.peer)
            case _:
                news = (event,)
        return news

    # -- nodes ------------------------------------------------------------------------------------

    def _joining(self, message: AgentJoining) -> None:
        self.agents.joining(message)
        if self.nodes.get(message.agent):
            self.sharing.joined(message.agent)

    def _lose(self, event: NodeGone | AgentUnheard) -> Sequence[NodeLost]:
        """A node is gone: its trainers are dead, and why."""
        node, cause, is_replaced = self.agents.gone(event)
        if node is None:
            return ()
        self.sharing.left(node.agent)
        dead = self.trainers.node_lost(node)
        self.reports.node_lost(node.agent)
        lost = NodeLost(
            text=(
                f"Node {node.name} was lost: {cause}"
                + ("; another agent was started there." if is_replaced else ".")
            ),
            exits=tuple(TrainerExited(device=d, process=p, cause=cause) for d, p in dead.items()),
            devices=tuple(device.index for device in node.devices),
            is_replaced=is_replaced,
            had_store=self.rendezvous.node_lost(node.agent),
        )
        return (lost,)

    # -- trainers ---------------------------------------------------------------------------------

    def _trainer_started(self, message: TrainerStarted) -> None:
        if (node := self.nodes.of(message.device)) is not None:
            node.starting.discard(message.device)
            node.due = node.due if node.starting else None
        if message.process is not None:
            self.trainers.started(message.device, message.process)
            return
        fleet_logger.warning(
            f"The trainer of device {message.device} can't be started, and is tried again later: "
            f"are `ulimit -n` and `-u` too low? {message.problem}"
        )

    def _trainer_is_of_no_use(self, message: TrainerReady) -> None:
        if self.nodes.get(message.process.agent):
            self.trainers.retire(message.device, message.process)
            self.trainers.device_failed(message.device, message.problem)

    def send(self, device: int, message: Any) -> None:
        """Send to the trainer that the controller knows; the end of a dead one is told anyway."""
        process = self.trainers.process_on(device)
        channel = None if process is None else self.connections.trainers.get(process)
        self.connections.send(channel, message)

    # -- devices ----------------------------------------------------------------------------------

    def devices_at_first(self) -> Iterator[Event]:
        """What a call is told when it begins; a trainer that ends has a successor, which joins."""
        for node in self.nodes:
            for device in node.devices:
                number = device.index
                if number in self.trainers.have_served - self.faults.left_out:
                    yield DeviceJoined(device=device)
                    process = self.trainers.process_on(number)
                    if process is None or self.trainers.is_killed(number):
                        yield DeviceLost(device=number)
                    if node.is_leaving:
                        yield DeviceLeaving(device=number)

    def device_events(self, message: TrainerReady | TrainerExited) -> list[Event]:
        """Translate trainers' coming and going; a successor is only announced after the loss.

        Raises:
            LaunchError: Trainers keep dying before they are ready, and no other device is left.
        """
        device, process = message.device, message.process
        if isinstance(message, TrainerExited):
            return self.trainers.ended(device, process, message.cause)
        node = self.nodes.get(process.agent)
        if node is None:
            return []  # it died with its agent
        node.has_worked = True
        events = self.trainers.ready(device, process)
        if events and node.is_leaving:
            events.append(DeviceLeaving(device=device))
        return events

    def rank_ended(self, message: Ended) -> None:
        """Note what the end of a rank says of its trainer and its device."""
        if message.has_device_failed:
            problem = message.error.description if message.error is not None else ""
            self.trainers.device_failed(message.device, problem)
        elif message.ending in (Ending.RETURNED, Ending.YIELDED, Ending.RAISED):
            self.faults.worked(f"device {message.device}")
        if message.is_last and (process := self.trainers.process_on(message.device)) is not None:
            self.trainers.retire(message.device, process)

    def kill(self, device: int) -> None:
        """Kill the trainer of a device; its successor announces itself."""
        self.trainers.kill(device)

    @property
    def may_grow(self) -> bool:
        """Whether devices may join that were never there, or are lost with their node."""
        awaited = self.nodes.devices.keys() - self.trainers.have_served - self.faults.left_out
        return bool(awaited) or self.agents.awaits_nodes

    def most_devices(self, *, spans_types: bool) -> int:
        """Most that a trial can have, of one type unless it spans types.

        Without those that are left out; any number where nodes may join that were never there.
        """
        if self.agents.awaits_nodes:
            return sys.maxsize
        there = self.nodes.devices.items()
        fleet = Fleet(devices=tuple(d for n, d in there if n not in self.faults.left_out))
        return len(fleet) if spans_types else fleet.widest

    def process_state(self, device: int) -> str:
        """What keeps the trainer of a device from running, in words; "" if nothing does."""
        return state_in_words(self.nodes.pid_of(self.trainers.process_on(device)))

    # -- trials -----------------------------------------------------------------------------------

    def prepare_groups(self) -> None:
        """A trial trains: soon there will be plans, and ranks that have to find each other."""
        with contextlib.suppress(OSError, LaunchError):  # it is tried again with the first plan
            self.allocator.start()
        self.rendezvous.open()

    def replace_store(self) -> str:
        """Have another store started, since nobody finds anybody at this one; say so."""
        store = self.rendezvous.store
        state = state_in_words(self.nodes.pid_of(store.process)) if store else "not ready"
        self.rendezvous.void()
        self.rendezvous.open()
        return "the store where ranks find each other is replaced" + (f" ({state})" * bool(state))

    def group_name(self, run_id: int) -> str:
        """Name of a run's process group, which other users of this machine can't guess."""
        return f"{self._secret}-{run_id}"

    def folder_of(self, study_name: str) -> StudyFolder:
        """Where the checkpoints of a study's trials are."""
        return StudyFolder(self._checkpoint_dir, study_name)

    # -- calls ------------------------------------------------------------------------------------

    def reset(self, devices: set[int], check: Callable[[], None]) -> bool:
        """Replace the trainers of these devices; return whether their successors are ready.

        It raises no LaunchError, for who resets has an error of its own to tell; but what `check`
        raises, which is called at each message.
        """
        wanted = {d: process for d, process in self.trainers.live.items() if d in devices}
        for device in wanted:
            self.kill(device)

        def is_reset() -> bool:
            there = self.nodes.devices
            now = {d: self.trainers.process_on(d) for d in wanted if d in there}
            return all(process not in (None, wanted[d]) for d, process in now.items())

        try:
            return self._wait_until(is_reset, _RESET_LIMIT_S, check)
        except LaunchError:
            return False

    def _wait_until(
        self, is_so: Any, limit_s: float, check: Callable[[], None] = lambda: None
    ) -> bool:
        """Handle messages between two calls until something is so; return whether it is."""
        deadline = time.monotonic() + limit_s
        while not is_so():
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            event = self.inbox.get(left_s)
            check()
            for message in self.heard(event):
                for heard in (message, *getattr(message, "exits", ())):  # of a lost node
                    if isinstance(heard, TrainerReady | TrainerExited):
                        self.device_events(heard)
        return True

    def pipeline_stats(self) -> PipelineStats | None:
        """Ask the pipelines what they have done by now."""
        asked = [node.agent for node in self.nodes]
        self.reports.ask()
        for agent in asked:
            self.agents.tell(agent, ReportPipeline())

        def have_answered() -> bool:
            return self.reports.have_answered(a for a in asked if self.nodes.get(a))

        self._wait_until(have_answered, _REPORT_LIMIT_S)
        return self.reports.total if self.reports.are_there else None

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that started the fleet, and no fork of it."""
        return os.getpid() == self._owner

    def close(self) -> None:
        """End every process and remove what is ours; in a fork of ours nothing is."""
        if self.is_ours:
            self.allocator.close()
            self.agents.close()
            self._transfer_server.close()
            self._setups.close()
            self._remove_private_folder()

    def _remove_private_folder(self) -> None:
        if not self._keeps_checkpoints:
            remove_all(self._checkpoint_dir)
