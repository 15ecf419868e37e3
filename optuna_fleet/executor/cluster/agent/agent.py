"""The agent of a node: starts and watches its processes, owns its shared pipeline.

It is also the mould its children are cast from: it imports what they need (torch takes seconds)
once and forks them, so it must never *use* torch or CUDA itself, and must stay single-threaded. It
ends, and all its children with it, when its driver does, or is silent for too long.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import selectors
import signal
import socket
import time
from typing import Any

from optuna_fleet.checkpoints.store import remove_all
from optuna_fleet.executor.cluster.agent.checking import Checking
from optuna_fleet.executor.cluster.agent.children import (
    LOOK_EVERY_S,
    Kept,
    MemoryKills,
    heed_notice,
)
from optuna_fleet.executor.cluster.agent.chunk_giver import Sharing
from optuna_fleet.executor.cluster.config import NodeSetup
from optuna_fleet.pipeline.exchange import Peers, Plan
from optuna_fleet.pipeline.server.server import PipelineServer
from optuna_fleet.processes import Forks, cause_of_death, run_loop
from optuna_fleet.resources import Device
from optuna_fleet.wire.channel import Channel
from optuna_fleet.wire.invitation import Invitation
from optuna_fleet.wire.node_messages import (
    SIGN_EVERY_S,
    CheckObjective,
    EndCheck,
    KeepObjective,
    KillTrainer,
    NoticeGiven,
    ObjectiveKept,
    OpenStore,
    PipelineReport,
    ProcessId,
    Quit,
    ReportPipeline,
    ShareChunks,
    SignOfLife,
    StoreLost,
    StoreReady,
    TrainerExited,
    TrainerStarted,
)

_END_LIMIT_S = 2.0
_REPORT_EVERY_S = 2.0
_UNSTARTED = (
    "The store where the ranks of a trial find each other can't be started, and is tried again "
    "later: are `ulimit -n` and `-u` too low? {error}"
)


class Agent:
    """The processes of one node, driven by one selector.

    Args:
        name: This incarnation of the agent.
        host: Address under which other nodes reach this one.
        notice_s: Seconds that the node is left after a SIGTERM; None if that ends the agent.
    """

    def __init__(
        self,
        channel: Channel,
        invitation: Invitation,
        name: str,
        host: str,
        setup: NodeSetup,
        notice_s: float | None = None,
    ) -> None:
        self._channel = channel
        self._invitation = invitation
        self._name = name
        self._host = host
        self._setup = setup
        self._notice_s = notice_s
        self._selector = selectors.DefaultSelector()
        self._forks = Forks(self._selector, on_exit=self._exited, in_child=self._in_child)
        spawn, say = self._forks.spawn, channel.send
        self._checking = Checking(setup, spawn, self._close_inherited, say)
        self._trainers: dict[int, Kept] = {}  # by device
        self._store = Kept(lambda: spawn(self._keep_store), self._store_started, self._unstarted)
        self._pipeline: PipelineServer | None = None
        self._sharing: Sharing | None = None
        self._report_due = time.monotonic() + _REPORT_EVERY_S
        self._objective = -1
        self._memory_kills = MemoryKills()
        self._heard = self._said = self._looked = time.monotonic()

    def serve(self) -> None:
        """Start everything, then act on events until told to quit.

        Raises:
            EOFError: The driver is gone, or has given this node up.
            OSError: The same; or it has been silent for too long.
        """
        self._selector.register(self._channel, selectors.EVENT_READ, self._from_driver)
        if (notice_s := self._notice_s) is not None:
            notice = NoticeGiven(agent=self._name, in_s=notice_s)
            heed_notice(self._selector, lambda: self._channel.send(notice))
        is_told = False
        try:
            self._open_pipeline()
            for device in self._setup.devices:
                self._start_trainer(device)
            run_loop(self._selector, every_s=self._patience_s, tick=self._look_after)
        except _ToldToQuitError:
            is_told = True
        except (EOFError, OSError):
            if not (is_told := self._is_told_to_quit()):
                raise
        finally:
            self._forks.kill_all()
            if not is_told and _has_ended(self._setup.driver_pid):
                remove_all(self._setup.private_folder or "")

    def _is_told_to_quit(self) -> bool:
        """Whether the driver's last word was that: it may have hung up since."""
        with contextlib.suppress(EOFError, OSError):
            while self._channel.has_message():
                if isinstance(self._channel.receive(), Quit):
                    return True
        return False

    def _from_driver(self, mask: int) -> None:
        while self._channel.has_message():
            self._heard = time.monotonic()
            self._act(self._channel.receive())

    def _act(self, message: Any) -> None:
        match message:
            case KeepObjective():
                self._keep_objective(message)
            case KillTrainer():
                trainer = self._trainers[message.device]
                if message.pid is None:
                    trainer.is_wanted = False
                if message.pid in (None, trainer.pid):
                    trainer.kill()
            case CheckObjective() | EndCheck():
                self._checking.act(message)
            case OpenStore():
                self._store.kill()
                self._store.start()
            case ShareChunks() | Plan() if self._sharing is not None:
                self._sharing.act(message)
            case ReportPipeline():
                self._report(is_answer=True)
            case Quit():
                raise _ToldToQuitError

    def _keep_objective(self, message: KeepObjective) -> None:
        """Keep it in memory that ends with this process, and has a path."""
        if self._objective >= 0:
            os.close(self._objective)
        self._objective = os.memfd_create("objective")
        with open(self._objective, "wb", closefd=False) as file:
            pickle.dump(message, file)
        path = f"/proc/{os.getpid()}/fd/{self._objective}"
        kept = ObjectiveKept(agent=self._name, objective_id=message.objective_id, path=path)
        self._channel.send(kept)

    def _patience_s(self) -> float:
        waits = [LOOK_EVERY_S, (self._setup.stuck_s or math.inf) / 4]
        if self._setup.silence_s is not None:
            waits.append(max(0.0, self._said + SIGN_EVERY_S - time.monotonic()))
        return min([*waits, *(kept.wait_s for kept in self._kept())])

    def _device_of(self, pid: int) -> int | None:
        """The device of a trainer, if that is one."""
        return next((index for index, one in self._trainers.items() if one.pid == pid), None)

    def _kept(self) -> list[Kept]:
        sharing = [] if self._sharing is None else [self._sharing.process]
        return [*self._trainers.values(), self._store, *sharing]

    def _keep_lease(self) -> None:
        """Give a sign of life; end if the driver has given none: it has given this node up."""
        now, before, silence_s = time.monotonic(), self._looked, self._setup.silence_s
        self._looked = now
        if silence_s is None:
            return
        # While we could not listen, as in a job that was suspended, the driver was not silent.
        self._heard = min(now, self._heard + max(0.0, now - before - silence_s / 4))
        if now - self._heard > silence_s:
            raise TimeoutError(f"nothing was heard of it for {silence_s:g} s")
        if now - self._said >= SIGN_EVERY_S:
            self._said = now
            self._channel.send(SignOfLife())

    def _look_after(self) -> None:
        self._keep_lease()
        self._memory_kills.look()
        for kept in self._kept():
            kept.start_due()
        if self._pipeline is not None:
            self._pipeline.resume()
            if self._setup.stuck_s is not None:
                self._pipeline.kill_stuck(self._setup.stuck_s)
            if time.monotonic() >= self._report_due:
                self._report_due = time.monotonic() + _REPORT_EVERY_S
                self._report()

    # -- children ---------------------------------------------------------------------------------

    def _in_child(self) -> None:
        """In a child, first of all: a Ctrl-C at the agent's terminal would fail its trial."""
        if self._notice_s is not None:
            os.setpgrp()
        self._channel.close()

    def _close_inherited(self) -> None:
        """In a child: an evicted chunk's memory is only freed once no process has it open."""
        if self._objective >= 0:
            os.close(self._objective)
        if self._pipeline is not None:
            self._pipeline.close_in_child()

    def _exited(self, pid: int, exit_code: int) -> None:
        if (index := self._device_of(pid)) is not None:
            self._trainer_exited(index, pid, exit_code)
        elif pid == self._store.pid:
            self._store.pid = None
            self._channel.send(StoreLost(cause=cause_of_death(exit_code), agent=self._name))
        elif self._checking.exited(pid, exit_code):
            pass
        elif self._sharing is not None and self._sharing.exited(pid):
            self._sharing.process.start_again()
        elif self._pipeline is not None:
            self._pipeline.child_died(pid)

    def _trainer_exited(self, index: int, pid: int, exit_code: int) -> None:
        out_of_memory = self._memory_kills.take() and exit_code == -signal.SIGKILL
        self._channel.send(
            TrainerExited(
                device=index,
                process=ProcessId(self._name, pid),
                cause=cause_of_death(exit_code),
                out_of_memory=out_of_memory,
            )
        )
        if self._pipeline is not None:
            self._pipeline.remove_reader(index)
        trainer = self._trainers[index]
        trainer.pid = None
        trainer.start_again(was_meant=exit_code == 0)

    # -- what the children are --------------------------------------------------------------------

    def _start_trainer(self, device: Device) -> None:
        setup = self._setup

        def main(sock: socket.socket) -> None:
            self._close_inherited()
            from optuna_fleet.trainer.main import trainer_main

            trainer_main(
                device,
                agent=self._name,
                invitation=self._invitation,
                data=sock,
                spec=setup.pipeline.spec if setup.pipeline else None,
                num_threads=setup.threads_per_slot,
            )

        def started(sock: socket.socket) -> None:
            assert trainer.pid is not None
            process = ProcessId(self._name, trainer.pid)
            self._channel.send(TrainerStarted(device=device.index, process=process))
            if self._pipeline is not None:
                self._pipeline.add_reader(device.index, sock)
            else:
                sock.close()

        def failed(error: OSError) -> None:
            told = TrainerStarted(device=device.index, process=None, problem=str(error))
            self._channel.send(told)

        trainer = Kept(lambda: self._forks.spawn(main), started, failed)
        self._trainers[device.index] = trainer
        trainer.start()

    def _open_pipeline(self) -> None:
        setup = self._setup.pipeline
        if setup is None:
            return
        peers = Peers(self._name, self._invitation.credentials, setup.spec)
        self._pipeline = PipelineServer(
            setup,
            spawn=self._forks.spawn,
            selector=self._selector,
            notify=self._channel.send,
            peers=peers,
        )
        self._sharing = Sharing(
            peers,
            self._pipeline,
            host=self._host,
            look_ahead=2 * setup.num_preprocessors + 2,
            spawn=self._forks.spawn,
            selector=self._selector,
            close_inherited=self._close_inherited,
            say=self._channel.send,
        )

    def _report(self, *, is_answer: bool = False) -> None:
        """Tell what the pipeline has done; who has none is not asked."""
        if self._pipeline is not None and self._setup.pipeline is not None:
            report = PipelineReport(
                agent=self._name,
                stats=self._pipeline.stats(),
                num_most=self._setup.pipeline.num_preprocessors,
                is_answer=is_answer,
            )
            self._channel.send(report)

    def _keep_store(self, sock: socket.socket) -> None:
        """In a process of its own, so that no trainer's death takes the store along."""
        self._close_inherited()
        from optuna_fleet.trainer.groups import serve_store

        store, port = serve_store(self._host)
        sock.send(str(port).encode())
        sock.recv(1)  # until the agent ends
        del store

    def _unstarted(self, error: OSError) -> None:
        self._channel.send(_UNSTARTED.format(error=error))

    def _store_started(self, sock: socket.socket) -> None:
        pid = self._store.pid

        def opened(mask: int) -> None:
            self._selector.unregister(sock)
            port = sock.recv(64)
            if port and pid is not None and pid == self._store.pid:
                self._store_socket = sock  # open as long as the store is wanted
                process = ProcessId(self._name, pid)
                self._channel.send(StoreReady(host=self._host, port=int(port), process=process))

        self._selector.register(sock, selectors.EVENT_READ, opened)


class _ToldToQuitError(Exception):
    """The driver has ended, in good order."""


def _has_ended(pid: int | None) -> bool:
    """Whether a process has ended, or does in a moment: its connections end first."""
    if pid is None:
        return False
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return bool(select.select([process], [], [], _END_LIMIT_S)[0])
    finally:
        os.close(process)
