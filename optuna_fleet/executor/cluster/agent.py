"""The agent of a node: starts and watches its processes, owns its shared pipeline.

It is also the mould its children are cast from: it imports what they need (torch takes seconds)
once and forks them, so it must never *use* torch or CUDA itself, and must stay single-threaded. It
ends, and all its children with it, when its driver does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from optuna_fleet.channel import connect
from optuna_fleet.messages import (
    AgentConfig,
    AgentReady,
    KillTrainer,
    OpenStore,
    PipelineReport,
    Quit,
    ReportPipeline,
    StoreLost,
    StoreReady,
    TrainerExited,
)
from optuna_fleet.pipeline import PipelineServer
from optuna_fleet.resources import Device

_PR_SET_PDEATHSIG = 1
_HINTS: dict[int, str] = {
    signal.SIGKILL: " (killed by someone, or the machine ran out of memory)",
    signal.SIGSEGV: " (segmentation fault in native code)",
    signal.SIGABRT: " (native code aborted)",
    signal.SIGBUS: " (bus error: shared memory or a mapped file went away)",
}


class Agent:
    """The processes of one node, driven by one selector."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._selector = selectors.DefaultSelector()
        self._channel = connect(config.host, config.port, config.secret)
        self._trainers: dict[int, Device] = {}
        self._children: dict[int, int] = {}
        self._pipeline: PipelineServer | None = None
        self._store_pid: int | None = None

    def serve(self) -> None:
        """Start everything, then act on events until told to quit or the driver is gone."""
        self._selector.register(self._channel, selectors.EVENT_READ, self._from_driver)
        try:
            self._channel.send(AgentReady(node=self._config.node, pid=os.getpid()))
            self._open_pipeline()
            for device in self._config.devices:
                self._start_trainer(device)
            while True:
                for key, mask in self._selector.select():
                    if key.fd in self._selector.get_map():  # not closed by an earlier one
                        key.data(mask)
        except (EOFError, ConnectionError):
            pass
        finally:
            self._end_children()
            if self._config.private_folder is not None:
                shutil.rmtree(self._config.private_folder, ignore_errors=True)

    def _from_driver(self, mask: int) -> None:
        message = self._channel.receive()
        match message:
            case KillTrainer():
                if message.pid in self._trainers:
                    os.kill(message.pid, signal.SIGKILL)
            case OpenStore():
                self._start_store()
            case ReportPipeline():
                self._channel.send(self._report())
            case Quit():
                raise EOFError

    # -- children ---------------------------------------------------------------------------------

    def spawn(self, main: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
        """Fork a child running `main` on one end of a socket pair; return its pid and our end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        agent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._become_child(agent_pid, main, theirs)
        theirs.close()
        self._children[pid] = pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda mask: self._reap(pid))
        return pid, ours

    def _become_child(
        self, agent_pid: int, main: Callable[[socket.socket], None], sock: socket.socket
    ) -> NoReturn:
        # Whatever happens, this process must not run on into the agent's code.
        code = 1
        try:
            _die_with(agent_pid)
            self._channel.close()
            main(sock)
            code = 0
        except SystemExit:
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _close_inherited(self) -> None:
        """In a child: an evicted chunk's memory is only freed once no process has it open."""
        if self._pipeline is not None:
            self._pipeline.close_in_child()

    def _reap(self, pid: int) -> None:
        pidfd = self._children.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        device = self._trainers.pop(pid, None)
        if device is not None:
            self._channel.send(TrainerExited(device=device.index, pid=pid, cause=_cause(status)))
            if self._pipeline is not None:
                self._pipeline.remove_reader(device.index)
            self._start_trainer(device)
        elif pid == self._store_pid:
            self._channel.send(StoreLost(cause=_cause(status)))
        elif self._pipeline is not None:
            self._pipeline.child_died(pid)

    def _end_children(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)

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

        pid, sock = self.spawn(main)
        self._trainers[pid] = device
        if self._pipeline is not None:
            self._pipeline.add_reader(device.index, sock)
        else:
            sock.close()

    def _open_pipeline(self) -> None:
        setup = self._config.pipeline
        if setup is None:
            return
        self._pipeline = PipelineServer(
            payload=setup.payload,
            spec=setup.spec,
            memory_bytes=setup.memory_bytes,
            num_preprocessors=setup.num_preprocessors,
            spawn=self.spawn,
            selector=self._selector,
        )

    def _report(self) -> PipelineReport:
        if self._pipeline is None:
            return PipelineReport(preprocessed=0, consumed=0, resident_bytes=0)
        stats = self._pipeline.stats()
        return PipelineReport(
            preprocessed=stats.preprocessed,
            consumed=stats.consumed,
            resident_bytes=stats.resident_bytes,
        )

    def _start_store(self) -> None:
        """Start the process that keeps the store, so that no trainer's death takes it along."""

        def main(sock: socket.socket) -> None:
            self._close_inherited()
            _keep_store(sock)

        self._store_pid, sock = self.spawn(main)

        def opened(mask: int) -> None:
            self._selector.unregister(sock)
            port = sock.recv(64)
            self._store_socket = sock  # open as long as the store is wanted
            if port:
                self._channel.send(StoreReady(host="127.0.0.1", port=int(port)))

        self._selector.register(sock, selectors.EVENT_READ, opened)


def _keep_store(sock: socket.socket) -> None:
    from optuna_fleet.trainer.groups import serve_store

    store, port = serve_store()
    sock.send(str(port).encode())
    sock.recv(1)  # until the agent ends
    del store


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:  # a real-time signal
            name = str(number)
        return f"signal {name}{_HINTS.get(number, '')}"
    return f"exit code {os.WEXITSTATUS(status)}"


def main() -> None:
    """Run an agent as configured by a pickled `AgentConfig` on standard input."""
    config = pickle.loads(sys.stdin.buffer.read())  # from our parent, the driver
    sys.path[:] = config.sys_path
    for name in config.preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that the children's collectors leave the shared pages alone
    Agent(config).serve()
    # Its modules were imported to be forked, not to be taken down in order.
    sys.stderr.flush()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # and with it what trainers have started
    os._exit(0)
