"""What outlives one `optimize` call: the agent, its trainers, the channels to them, the solver."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna_fleet.alloc import IsolatedAllocator, RateProfile
from optuna_fleet.checkpoints.folder import StudyFolder, private_folder
from optuna_fleet.events import Ending, Event
from optuna_fleet.executor.agents import AgentKeeper
from optuna_fleet.executor.cluster.config import agent_config
from optuna_fleet.executor.cluster.protocol import StartAgent
from optuna_fleet.executor.connections import Connections, Readable
from optuna_fleet.executor.device_faults import DeviceFaults
from optuna_fleet.executor.rendezvous import Rendezvous
from optuna_fleet.executor.trainers import Trainers
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.processes import fill_standard_streams, state_in_words
from optuna_fleet.resources import Fleet
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.messages import (
    AgentLost,
    AgentReady,
    Ended,
    KillTrainer,
    LeaveOut,
    OpenStore,
    PipelineReport,
    ReportPipeline,
    StoreLost,
    StoreReady,
    TrainerExited,
    TrainerReady,
    TrainerStarted,
    TrainerUnfit,
)

_REPORT_LIMIT_S = 5.0
_RESET_LIMIT_S = 10.0


class Runtime:
    """The running fleet of one executor.

    Attributes:
        profiles: Measured training rates by model structure; they serve later calls too.
        trainers: The life of the trainers.
        rendezvous: The store where the ranks of a trial find each other.
        last_report: What the pipeline had done when it was last asked.
    """

    def __init__(
        self,
        fleet: Fleet,
        pipeline: SharedPipeline | None,
        allocator: IsolatedAllocator,
        checkpoint_dir: Path | None,
        start_agent: StartAgent,
        *,
        preload: bool,
        stuck_s: float | None = None,
        start_s: float | None = None,
    ) -> None:
        self.fleet = fleet
        self.allocator = allocator
        self.profiles: dict[str, RateProfile] = {}
        self.run_ids = itertools.count()
        self.trainers = Trainers()
        self.faults = DeviceFaults(len(fleet))
        self.rendezvous = Rendezvous(lambda: self._tell_agent(OpenStore()))
        self.last_report = PipelineReport()
        fill_standard_streams()
        self._checkpoint_dir = checkpoint_dir or private_folder()
        self._keeps_checkpoints = checkpoint_dir is not None
        self._owner = os.getpid()
        self.connections = Connections()
        try:
            config = agent_config(
                fleet,
                pipeline,
                address=(self.connections.host, self.connections.port, self.connections.secret),
                preload=preload,
                private_folder=None if self._keeps_checkpoints else str(self._checkpoint_dir),
                stuck_s=stuck_s,
            )
            self._agent = AgentKeeper(config, start_agent, start_s)
        except BaseException:
            self.connections.close()
            self._remove_private_folder()
            raise

    def _tell_agent(self, message: Any, node: int = 0) -> None:
        self.connections.send(self.connections.agents.get(node), message)

    # -- messages ---------------------------------------------------------------------------------

    def messages(self, timeout_s: float | None, *others: Readable) -> Iterator[Any]:
        """Wait for messages as `Connections` does; what is about processes is noted on the way.

        Raises:
            LaunchError: The agent ended before any trainer was ready: by itself, or killed several
                times in a row.
        """
        if not self.is_alive():
            yield from self._replace_agent()
            return
        self._end_stopped_agent()
        self._end_late()
        timeout_s = self._patience_s(timeout_s)
        for message in self.connections.messages(timeout_s, self._agent.process, *others):
            self._note(message)
            yield message

    def _note(self, message: Any) -> None:
        agent = self._agent.process.pid
        match message:  # what a dead agent said is read after its death, and void
            case AgentReady() if message.pid == agent:
                self.rendezvous.void()  # who was asked before is dead
            case TrainerStarted():
                self._trainer_started(message)
            case TrainerUnfit():
                self._agent.startup.over(message.pid)
                self.trainers.retire(message.device, message.pid)
                self._device_failed(message.device, message.problem)
            case TrainerReady() | TrainerExited():
                self._agent.startup.over(message.pid)
            case StoreReady() if message.agent == agent:
                self.rendezvous.ready(message)
            case StoreLost() if message.agent == agent:
                self.rendezvous.lost(message)

    def _trainer_started(self, message: TrainerStarted) -> None:
        self._agent.has_started(message.device)
        name = f"The trainer of device {message.device}"
        if message.pid is None:
            text = "can't be started, and is tried again later: are `ulimit -n` and `-u` too low?"
            fleet_logger.warning(f"{name} {text} {message.problem}")
        elif self.trainers.started(message.device, message.pid):
            self._agent.startup.started(message.pid, name)

    def _end_late(self) -> None:
        """Kill what was started and is not ready, because it is stopped, say."""
        for pid, problem in self._agent.startup.late():
            state = state_in_words(pid)
            problem += f" ({state})" if state else ""
            fleet_logger.warning(f"{problem}; it is killed, and another one started.")
            if pid == self._agent.process.pid:
                self._agent.kill(problem)
            else:
                self._kill(self.trainers.device_of(pid), pid)

    def _patience_s(self, timeout_s: float | None) -> float | None:
        now = time.monotonic()
        waits = [due - now for due in self.trainers.kills_due() if due > now]
        if (patience_s := self._agent.startup.patience_s()) is not None:
            waits.append(patience_s)
        return min(waits if timeout_s is None else [timeout_s, *waits], default=None)

    def _end_stopped_agent(self) -> None:
        """Kill the agent if it does not do what it was told to, because it is stopped."""
        is_late = any(time.monotonic() >= due for due in self.trainers.kills_due())
        if is_late and state_in_words(self._agent.process.pid):
            self._agent.kill()

    def _replace_agent(self) -> Iterator[Any]:
        """Start another agent; yield the news that the old one took all its processes along."""
        cause = self._agent.replace()
        self.last_report = PipelineReport()
        self.rendezvous.void()
        self.trainers.agent_ended()
        lost = self.trainers.live
        for pid in lost.values():
            yield from self.connections.last_words(pid)
        cause_of_all = f"its agent ended with {cause}"
        exits = (TrainerExited(device=d, pid=p, cause=cause_of_all) for d, p in lost.items())
        yield AgentLost(cause=cause, exits=tuple(exits))

    def send(self, device: int, message: Any) -> None:
        """Send to the trainer that the controller knows; the end of a dead one is told anyway."""
        channel = self.connections.trainers.get(self.trainers.pid_on(device) or 0)
        self.connections.send(channel, message)

    # -- devices ----------------------------------------------------------------------------------

    def device_events(self, message: TrainerReady | TrainerExited) -> list[Event]:
        """Translate trainers' coming and going; a successor is only announced after the loss.

        Raises:
            LaunchError: A device's trainers keep dying before they are ready.
        """
        device, pid = message.device, message.pid
        if device in self.faults.left_out and self.trainers.pid_on(device) is None:
            return []
        if isinstance(message, TrainerExited):
            return self.trainers.ended(device, pid, message.cause)
        if message.agent != self._agent.process.pid:
            return []  # it died with its agent
        self._agent.has_worked = True
        return self.trainers.ready(device, pid)

    def rank_ended(self, message: Ended) -> list[Event]:
        """Note what the end of a rank says of its trainer and its device.

        Raises:
            LaunchError: No device is left that works.
        """
        if message.has_device_failed:
            problem = message.error.description if message.error is not None else ""
            self._device_failed(message.device, problem)
        elif message.ending in (Ending.RETURNED, Ending.YIELDED, Ending.RAISED):
            self.faults.worked(message.device)
        pid = self.trainers.pid_on(message.device) if message.is_last else None
        return [] if pid is None else self.trainers.retire(message.device, pid)

    def _device_failed(self, device: int, problem: str) -> None:
        if self.faults.failed(device, problem):
            self.trainers.leave_out(device)
            self._tell_agent(LeaveOut(device=device), self.fleet.devices[device].node)

    def kill(self, device: int) -> None:
        """Kill the trainer of a device; its successor announces itself."""
        if (pid := self.trainers.pid_on(device)) is not None:
            self._kill(device, pid)

    def _kill(self, device: int, pid: int) -> None:
        self.trainers.kill(device, pid)
        self._tell_agent(KillTrainer(pid=pid), self.fleet.devices[device].node)

    @property
    def widest(self) -> int:
        """Most devices that a trial can have, without those that are left out."""
        devices = self.fleet.devices
        return Fleet(
            devices=tuple(d for d in devices if d.index not in self.faults.left_out)
        ).widest

    def process_state(self, device: int) -> str:
        """What keeps the trainer of a device from running, in words; "" if nothing does."""
        return state_in_words(self.trainers.pid_on(device))

    def prepare_groups(self) -> None:
        """A trial trains: soon there will be plans, and ranks that have to find each other."""
        with contextlib.suppress(OSError):  # it is tried again with the first plan
            self.allocator.start()
        self.rendezvous.open()

    def replace_store(self) -> str:
        """Have another store started, since nobody finds anybody at this one; say so."""
        store = self.rendezvous.store
        state = state_in_words(store.pid) if store is not None else "not ready"
        self.rendezvous.void()
        self.rendezvous.open()
        return "the store where ranks find each other is replaced" + (f" ({state})" * bool(state))

    def group_name(self, run_id: int) -> str:
        """Name of a run's process group, which other users of this machine can't guess."""
        return hmac.digest(self.connections.secret, f"group {run_id}".encode(), "sha256").hex()

    def folder_of(self, study_name: str) -> StudyFolder:
        """Where the checkpoints of a study's trials are."""
        return StudyFolder(self._checkpoint_dir, study_name)

    def reset(self, devices: set[int]) -> bool:
        """Replace the trainers of these devices; return whether their successors are ready."""
        wanted = {d: pid for d, pid in self.trainers.live.items() if d in devices}
        for device in wanted:
            self.kill(device)
        deadline = time.monotonic() + _RESET_LIMIT_S
        while any(self.trainers.pid_on(d) in (None, pid) for d, pid in wanted.items()):
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            for message in self.messages(left_s):
                if isinstance(message, TrainerReady | TrainerExited):
                    self.device_events(message)
        return True

    def pipeline_report(self) -> PipelineReport | None:
        """Ask the pipeline what it has done by now."""
        self._tell_agent(ReportPipeline())
        deadline = time.monotonic() + _REPORT_LIMIT_S
        while (left_s := deadline - time.monotonic()) > 0:
            for message in self.messages(left_s):
                if isinstance(message, PipelineReport) and message.is_answer:
                    self.last_report = message
                    return message
                if isinstance(message, TrainerReady | TrainerExited):
                    self.device_events(message)
        return None

    def is_alive(self) -> bool:
        """Whether the agent still runs."""
        return self._agent.process.exit_code is None

    def close_if_owner(self) -> None:
        """`close`, unless this is a fork of the process that started the fleet."""
        if os.getpid() == self._owner:
            self.close()

    def close(self) -> None:
        """End every process and remove what is ours."""
        self.allocator.close()
        knows_end = bool(self.connections.agents)
        self.connections.close()
        if knows_end:
            self._agent.process.close()
        else:
            self._agent.process.kill()  # it is still starting, and would meet with no one
        self._remove_private_folder()

    def _remove_private_folder(self) -> None:
        if not self._keeps_checkpoints:
            shutil.rmtree(self._checkpoint_dir, ignore_errors=True)
