"""What outlives one `optimize` call: the agent, its trainers, the channels to them, the solver."""

from __future__ import annotations

import hmac
import itertools
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna_fleet.alloc import IsolatedAllocator, RateProfile
from optuna_fleet.checkpoints.folder import StudyFolder, private_folder
from optuna_fleet.events import DeviceJoined, DeviceLost, Ending, Event
from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.local import AgentProcess, agent_config
from optuna_fleet.executor.connections import Connections, Readable
from optuna_fleet.executor.device_faults import DeviceFaults
from optuna_fleet.executor.startup import Startup
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.processes import cause_of_death, fill_standard_streams, state_in_words
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

_MAX_STILLBORN = 3
_REPORT_LIMIT_S = 5.0
_RESET_LIMIT_S = 10.0
_KILL_LIMIT_S = 10.0


class Runtime:
    """The running fleet of one executor.

    Attributes:
        profiles: Measured training rates by model structure; they serve later calls too.
        live: Process id of the ready trainer of each device.
        store: Address of the store where ranks rendezvous, once it is open.
        last_report: What the pipeline had done when it was last asked.
    """

    def __init__(
        self,
        fleet: Fleet,
        pipeline: SharedPipeline | None,
        allocator: IsolatedAllocator,
        checkpoint_dir: Path | None,
        *,
        preload: bool,
        stuck_s: float | None = None,
        start_s: float | None = None,
    ) -> None:
        self.fleet = fleet
        self.allocator = allocator
        self.profiles: dict[str, RateProfile] = {}
        self.run_ids = itertools.count()
        self.live: dict[int, int] = {}
        self.store: StoreReady | None = None
        self._killed: dict[int, float] = {}  # by when they should be gone
        self._store_asked = False
        self._stores_lost = 0  # in a row, without one that was ready
        self._failed_agents = 0
        self._has_worked = False
        self.last_report = PipelineReport()
        self._newcomers: dict[int, int] = {}
        self._dead: set[int] = set()
        self._retired: set[int] = set()
        self.faults = DeviceFaults(len(fleet))
        self._failed_starts: dict[int, int] = {}
        fill_standard_streams()
        self._checkpoint_dir = checkpoint_dir or private_folder()
        self._keeps_checkpoints = checkpoint_dir is not None
        self._owner = os.getpid()
        self.connections = Connections()
        try:
            self._config = agent_config(
                fleet,
                pipeline,
                address=(self.connections.host, self.connections.port, self.connections.secret),
                preload=preload,
                private_folder=None if self._keeps_checkpoints else str(self._checkpoint_dir),
                stuck_s=stuck_s,
            )
            self._start_s = start_s
            self._start_agent()
        except BaseException:
            self.connections.close()
            self._remove_private_folder()
            raise

    def _start_agent(self) -> None:
        self._agent = AgentProcess(self._config)
        self._startup = Startup(self._start_s)
        self._startup.started(self._agent.pid, "The fleet's agent process")
        self._unheard = {device.index for device in self.fleet.devices}
        self._why_killed = ""

    # -- messages ---------------------------------------------------------------------------------

    def messages(self, timeout_s: float | None, *others: Readable) -> Iterator[Any]:
        """Wait for messages as `Connections` does; what is about processes is noted on the way.

        Raises:
            LaunchError: The agent ended before any trainer was ready: by itself, or killed several
                times in a row.
        """
        if not self._agent.is_alive():
            yield from self._replace_agent()
            return
        self._end_stopped_agent()
        self._end_late()
        timeout_s = self._patience_s(timeout_s)
        for message in self.connections.messages(timeout_s, self._agent, *others):
            self._note(message)
            yield message

    def _note(self, message: Any) -> None:
        match message:  # what a dead agent said is read after its death, and void
            case AgentReady() if message.pid == self._agent.pid:
                self._store_asked = False  # who was asked before is dead
            case TrainerStarted():
                self._trainer_started(message)
            case TrainerUnfit():
                self._startup.ready(message.pid)
                self._retired.add(message.pid)
                self._device_failed(message.device, message.problem)
            case TrainerReady():
                self._startup.ready(message.pid)
            case TrainerExited():
                self._startup.ended(message.pid)
            case StoreReady() if message.agent == self._agent.pid:
                self.store, self._stores_lost = message, 0
            case StoreLost() if message.agent == self._agent.pid:
                self._store_lost(message)

    def _trainer_started(self, message: TrainerStarted) -> None:
        self._unheard.discard(message.device)
        if not self._unheard:
            self._startup.ready(self._agent.pid)
        name = f"The trainer of device {message.device}"
        if message.pid is not None:
            self._startup.started(message.pid, name)
        else:
            text = "can't be started, and is tried again later: are `ulimit -n` and `-u` too low?"
            fleet_logger.warning(f"{name} {text} {message.problem}")

    def _end_late(self) -> None:
        """Kill what was started and is not ready, because it is stopped, say."""
        for pid, problem in self._startup.late():
            state = state_in_words(pid)
            problem += f" ({state})" if state else ""
            fleet_logger.warning(f"{problem}; it is killed, and another one started.")
            if pid == self._agent.pid:
                self._why_killed = problem
                os.kill(pid, signal.SIGKILL)
            else:
                self._kill(pid, node=0)

    def _patience_s(self, timeout_s: float | None) -> float | None:
        now = time.monotonic()
        waits = [due - now for due in self._killed.values() if due > now]
        if (patience_s := self._startup.patience_s()) is not None:
            waits.append(patience_s)
        return min(waits if timeout_s is None else [timeout_s, *waits], default=None)

    def _end_stopped_agent(self) -> None:
        """Kill the agent if it does not do what it was told to, because it is stopped."""
        is_late = any(time.monotonic() >= due for due in self._killed.values())
        if is_late and state_in_words(self._agent.pid):
            os.kill(self._agent.pid, signal.SIGKILL)

    def _replace_agent(self) -> Iterator[Any]:
        """Start another agent; yield the news that the old one took all its processes along."""
        exit_code = self._agent.exit_code or 0
        cause = cause_of_death(exit_code)
        self._agent.close()
        self._failed_agents = 0 if self._has_worked else self._failed_agents + 1
        # One that was killed is tried again; one that ended by itself would do so again.
        if self._failed_agents >= (_MAX_STILLBORN if exit_code < 0 else 1):
            raise LaunchError(
                f"The fleet's agent process ended with {cause} before any trainer was ready, "
                f"{self._failed_agents} times in a row; "
                + (f"{self._why_killed}." if self._why_killed else "what it printed says why.")
            )
        self.last_report = PipelineReport()
        self.store, self._store_asked, self._has_worked = None, False, False
        self._newcomers.clear()
        lost = dict(self.live)
        self._start_agent()
        yield AgentLost(cause=cause)
        for device, pid in lost.items():
            yield from self.connections.last_words(pid)
            yield TrainerExited(device=device, pid=pid, cause=f"its agent ended with {cause}")

    def send(self, device: int, message: Any) -> None:
        """Send to the trainer that the controller knows; the end of a dead one is told anyway."""
        self.connections.send(self.connections.trainers.get(self.live.get(device, 0)), message)

    def _store_lost(self, message: StoreLost) -> None:
        self._stores_lost += 1
        if self._stores_lost >= _MAX_STILLBORN:
            raise LaunchError(
                "The store where the ranks of a trial find each other ended "
                f"{self._stores_lost} times in a row before it was ready, the last time with "
                f"{message.cause}; what it printed says why."
            )
        self.store, self._store_asked = None, False

    def device_events(self, message: TrainerReady | TrainerExited) -> list[Event]:
        """Translate trainers' coming and going; a successor is only announced after the loss.

        Raises:
            LaunchError: A device's trainers keep dying before they are ready.
        """
        device, pid = message.device, message.pid
        if device in self.faults.left_out and device not in self.live:
            return []
        if isinstance(message, TrainerReady):
            if message.agent != self._agent.pid:
                return []  # it died with its agent
            self._has_worked = True
            if pid in self._dead:  # its hello was overtaken by the news of its death
                self._dead.remove(pid)
                return []
            self._failed_starts[device] = 0
            if device in self.live:
                self._newcomers[device] = pid
                return []
            self.live[device] = pid
            return [DeviceJoined(device=device)]
        if pid in self._retired:
            self._retired.remove(pid)
            return []
        if self.live.get(device) != pid:
            if self._newcomers.get(device) == pid:
                del self._newcomers[device]
            else:
                self._dead.add(pid)
            self._killed.pop(pid, None)
            self._note_failed_starts(message)
            return []
        del self.live[device]
        by_order = pid in self._killed
        self._killed.pop(pid, None)
        events: list[Event] = [DeviceLost(device=device, by_order=by_order)]
        if device in self._newcomers:
            self.live[device] = self._newcomers.pop(device)
            events.append(DeviceJoined(device=device))
        return events

    def rank_ended(self, message: Ended) -> None:
        """Note what the end of a rank says of its trainer and its device.

        Raises:
            LaunchError: No device is left that works.
        """
        if message.is_last:
            self.retire(message.device)
        if message.has_device_failed:
            problem = message.error.description if message.error is not None else ""
            self._device_failed(message.device, problem)
        elif message.ending in (Ending.RETURNED, Ending.YIELDED, Ending.RAISED):
            self.faults.worked(message.device)

    def _device_failed(self, device: int, problem: str) -> None:
        if self.faults.failed(device, problem):
            self._newcomers.pop(device, None)
            node = self.fleet.devices[device].node
            self.connections.send(self.connections.agents.get(node), LeaveOut(device=device))

    def retire(self, device: int) -> None:
        """The trainer of a device has said that it ends; its successor announces itself."""
        if (pid := self.live.pop(device, None)) is not None:
            self._retired.add(pid)

    def _note_failed_starts(self, message: TrainerExited) -> None:
        number = self._failed_starts[message.device] = (
            self._failed_starts.get(message.device, 0) + 1
        )
        if number >= _MAX_STILLBORN:
            raise LaunchError(
                f"The trainer of device {message.device} ended {number} times in a row before it "
                f"was ready, the last time with {message.cause}; what it printed says why."
            )

    def kill(self, device: int) -> None:
        """Kill the trainer of a device; its successor announces itself."""
        pid = self.live.get(device)
        if pid is not None:
            self._kill(pid, node=self.fleet.devices[device].node)

    def _kill(self, pid: int, *, node: int) -> None:
        self._killed[pid] = time.monotonic() + _KILL_LIMIT_S
        self.connections.send(self.connections.agents.get(node), KillTrainer(pid=pid))

    @property
    def widest(self) -> int:
        """Most devices that a trial can have, without those that are left out."""
        devices = self.fleet.devices
        return Fleet(
            devices=tuple(d for d in devices if d.index not in self.faults.left_out)
        ).widest

    def process_state(self, device: int) -> str:
        """What keeps the trainer of a device from running, in words; "" if nothing does."""
        return state_in_words(self.live.get(device))

    def open_store(self) -> None:
        """Have the store started where the ranks of a trial find each other, once."""
        if not self._store_asked:
            self._store_asked = True
            self.connections.send(self.connections.agents.get(0), OpenStore())

    def replace_store(self) -> str:
        """Have another store started, since nobody finds anybody at this one; say so."""
        state = state_in_words(self.store.pid) if self.store is not None else "not ready"
        self.store, self._store_asked = None, False
        self.open_store()
        return "the store where ranks find each other is replaced" + (f" ({state})" * bool(state))

    def group_name(self, run_id: int) -> str:
        """Name of a run's process group, which other users of this machine can't guess."""
        return hmac.digest(self.connections.secret, f"group {run_id}".encode(), "sha256").hex()

    def folder_of(self, study_name: str) -> StudyFolder:
        """Where the checkpoints of a study's trials are."""
        return StudyFolder(self._checkpoint_dir, study_name)

    def reset(self, devices: set[int]) -> bool:
        """Replace the trainers of these devices; return whether their successors are ready."""
        wanted = {device: self.live[device] for device in devices if device in self.live}
        for device in wanted:
            self.kill(device)
        deadline = time.monotonic() + _RESET_LIMIT_S
        while any(self.live.get(device) in (None, pid) for device, pid in wanted.items()):
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            for message in self.messages(left_s):
                if isinstance(message, TrainerReady | TrainerExited):
                    self.device_events(message)
        return True

    def pipeline_report(self) -> PipelineReport | None:
        """Ask the pipeline what it has done by now."""
        self.connections.send(self.connections.agents.get(0), ReportPipeline())
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
        return self._agent.is_alive()

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
            self._agent.close()
        else:
            self._agent.kill()  # it is still starting, and would meet with no one
        self._remove_private_folder()

    def _remove_private_folder(self) -> None:
        if not self._keeps_checkpoints:
            shutil.rmtree(self._checkpoint_dir, ignore_errors=True)
