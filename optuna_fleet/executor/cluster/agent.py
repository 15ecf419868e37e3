"""The agent of a node: starts and watches its processes, owns its shared pipeline.

It is also the mould its children are cast from: it imports what they need (torch takes seconds)
once and forks them, so it must never *use* torch or CUDA itself, and must stay single-threaded. It
ends, and all its children with it, when its driver does.
"""

from __future__ import annotations

import math
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import time
from dataclasses import replace

from optuna_fleet.executor.cluster.backoff import Backoff
from optuna_fleet.executor.cluster.config import AgentConfig
from optuna_fleet.executor.cluster.memory_kills import LOOK_EVERY_S, MemoryKills
from optuna_fleet.pipeline import PipelineServer
from optuna_fleet.processes import (
    Forks,
    cause_of_death,
    clean_up_after_parent,
    end_session,
    preload,
    run_loop,
)
from optuna_fleet.resources import Device
from optuna_fleet.wire.channel import connect
from optuna_fleet.wire.messages import (
    AgentReady,
    KillTrainer,
    LeaveOut,
    OpenStore,
    PipelineNotice,
    PipelineReport,
    Quit,
    ReportPipeline,
    StoreLost,
    StoreReady,
    TrainerExited,
    TrainerStarted,
)

_REPORT_EVERY_S = 2.0
_STORE = -1  # what `Backoff` knows it by, beside the devices
_UNSTARTED = (
    "The store where the ranks of a trial find each other can't be started, and is tried again "
    "later: are `ulimit -n` and `-u` too low? {error}"
)


class Agent:
    """The processes of one node, driven by one selector."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._selector = selectors.DefaultSelector()
        self._channel = connect(config.host, config.port, config.secret)
        self._forks = Forks(self._selector, on_exit=self._exited, in_child=self._channel.close)
        self._trainers: dict[int, Device] = {}
        self._left_out: set[int] = set()
        self._backoff = Backoff()
        self._pipeline: PipelineServer | None = None
        self._report_due = time.monotonic() + _REPORT_EVERY_S
        self._store_pid: int | None = None
        self._memory_kills = MemoryKills()

    def serve(self) -> None:
        """Start everything, then act on events until told to quit or the driver is gone."""
        self._selector.register(self._channel, selectors.EVENT_READ, self._from_driver)
        try:
            self._channel.send(AgentReady(node=self._config.node, pid=os.getpid()))
            self._open_pipeline()
            for device in self._config.devices:
                self._start_trainer(device)
            run_loop(self._selector, every_s=self._patience_s, tick=self._look_after)
        except (EOFError, ConnectionError):
            pass
        finally:
            self._forks.kill_all()
            if self._config.private_folder is not None:
                shutil.rmtree(self._config.private_folder, ignore_errors=True)

    def _from_driver(self, mask: int) -> None:
        message = self._channel.receive()
        match message:
            case KillTrainer():
                if message.pid in self._trainers:
                    os.kill(message.pid, signal.SIGKILL)
            case LeaveOut():
                self._left_out.add(message.device)
                for pid, device in self._trainers.items():
                    if device.index == message.device:
                        os.kill(pid, signal.SIGKILL)
            case OpenStore():
                self._start_store()
            case ReportPipeline():
                self._channel.send(self._report(is_answer=True))
            case Quit():
                raise EOFError

    def _patience_s(self) -> float:
        waits = [LOOK_EVERY_S, (self._config.stuck_s or math.inf) / 4]
        return min([*waits, *self._backoff.waits_s()])

    def _look_after(self) -> None:
        self._memory_kills.look()
        for index in set(self._backoff.due()) - self._left_out:
            if index == _STORE:
                self._start_store()
            else:
                self._start_trainer(next(d for d in self._config.devices if d.index == index))
        if self._pipeline is not None:
            self._pipeline.resume()
            if self._config.stuck_s is not None:
                self._pipeline.kill_stuck(self._config.stuck_s)

    # -- children ---------------------------------------------------------------------------------

    def _close_inherited(self) -> None:
        """In a child: an evicted chunk's memory is only freed once no process has it open."""
        if self._pipeline is not None:
            self._pipeline.close_in_child()

    def _exited(self, pid: int, exit_code: int) -> None:
        cause = cause_of_death(exit_code)
        device = self._trainers.pop(pid, None)
        if device is not None:
            out_of_memory = self._memory_kills.take() and exit_code == -signal.SIGKILL
            self._channel.send(
                TrainerExited(
                    device=device.index, pid=pid, cause=cause, out_of_memory=out_of_memory
                )
            )
            if self._pipeline is not None:
                self._pipeline.remove_reader(device.index)
            if device.index in self._left_out:
                return
            if exit_code == 0 or self._backoff.may_start_again(device.index):
                self._start_trainer(device)
        elif pid == self._store_pid:
            self._store_pid = None
            self._channel.send(StoreLost(cause=cause, agent=os.getpid()))
        elif self._pipeline is not None:
            self._pipeline.child_died(pid)

    # -- what the children are --------------------------------------------------------------------

    def _start_trainer(self, device: Device) -> None:
        config = self._config

        def main(sock: socket.socket) -> None:
            self._close_inherited()
            from optuna_fleet.trainer.main import trainer_main

            trainer_main(
                device,
                host=config.host,
                port=config.port,
                secret=config.secret,
                data=sock,
                spec=config.pipeline.spec if config.pipeline else None,
                num_threads=config.threads_per_slot,
            )

        try:
            pid, sock = self._forks.spawn(main)
        except OSError as error:  # too many processes, or open files
            self._backoff.failed(device.index)
            problem = TrainerStarted(device=device.index, pid=None, problem=str(error))
            self._channel.send(problem)
            return
        self._trainers[pid] = device
        self._backoff.started(device.index)
        self._channel.send(TrainerStarted(device=device.index, pid=pid))
        if self._pipeline is not None:
            self._pipeline.add_reader(device.index, sock)
        else:
            sock.close()

    def _open_pipeline(self) -> None:
        setup = self._config.pipeline
        if setup is None:
            return
        self._pipeline = PipelineServer(
            setup,
            spawn=self._forks.spawn,
            selector=self._selector,
            on_event=self._report_now_and_then,
            notify=lambda text: self._channel.send(PipelineNotice(text=text)),
        )
        # The server has the data sets in a file now: they are not to be in memory twice.
        self._config = replace(self._config, pipeline=replace(setup, payload=b""))

    def _report_now_and_then(self) -> None:
        if time.monotonic() >= self._report_due:
            self._report_due = time.monotonic() + _REPORT_EVERY_S
            self._channel.send(self._report(is_answer=False))

    def _report(self, *, is_answer: bool) -> PipelineReport:
        if self._pipeline is None:
            return PipelineReport(is_answer=is_answer)
        stats = self._pipeline.stats()
        return PipelineReport(
            preprocessed=stats.preprocessed,
            consumed=stats.consumed,
            resident_bytes=stats.resident_bytes,
            repeated=stats.repeated,
            num_skipped=stats.num_skipped,
            num_lost=stats.num_lost,
            use=stats.use,
            is_answer=is_answer,
        )

    def _start_store(self) -> None:
        """Start the process that keeps the store, so that no trainer's death takes it along."""
        if self._store_pid is not None:
            os.kill(self._store_pid, signal.SIGKILL)

        def main(sock: socket.socket) -> None:
            self._close_inherited()
            _keep_store(sock)

        try:
            pid, sock = self._forks.spawn(main)
        except OSError as error:  # too many processes, or open files
            self._backoff.failed(_STORE)
            self._channel.send(PipelineNotice(text=_UNSTARTED.format(error=error)))
            return
        self._store_pid = pid
        self._backoff.started(_STORE)

        def opened(mask: int) -> None:
            self._selector.unregister(sock)
            port = sock.recv(64)
            if port and pid == self._store_pid:
                self._store_socket = sock  # open as long as the store is wanted
                ready = StoreReady(host="127.0.0.1", port=int(port), pid=pid, agent=os.getpid())
                self._channel.send(ready)

        self._selector.register(sock, selectors.EVENT_READ, opened)


def _keep_store(sock: socket.socket) -> None:
    from optuna_fleet.trainer.groups import serve_store

    store, port = serve_store()
    sock.send(str(port).encode())
    sock.recv(1)  # until the agent ends
    del store


def main() -> None:
    """Run an agent as configured by a pickled `AgentConfig` on standard input."""
    config = pickle.loads(sys.stdin.buffer.read())  # from our parent, the driver
    sys.path[:], sys.argv[:] = config.sys_path, config.argv  # as objectives know them
    preload(config.preload)
    agent = Agent(config)
    del config  # large: the agent lets go of it when it can
    clean_up_after_parent()
    agent.serve()
    end_session()
