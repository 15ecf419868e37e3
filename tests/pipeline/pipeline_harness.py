"""A small agent in a forked process; readers live in the test's process and in other forks.

What tests of behaviour know of the pipeline beside its public names, they have from here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from optuna_fleet.executor.cluster.agent.chunk_giver import Sharing
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.exchange import Peers, Plan
from optuna_fleet.pipeline.pipeline_messages import PipelineStats
from optuna_fleet.pipeline.preprocessor.order import permutation
from optuna_fleet.pipeline.preprocessor.payload import PipelineSetup
from optuna_fleet.pipeline.reader.client import PipelineClient
from optuna_fleet.pipeline.reader.read_plan import shard
from optuna_fleet.pipeline.server import workers
from optuna_fleet.pipeline.server.scheduler import MAX_DEATHS
from optuna_fleet.pipeline.server.server import PipelineServer
from optuna_fleet.pipeline.spec import MIN_CHUNK_SAMPLES
from optuna_fleet.pipeline.standalone import PipelineHandle
from optuna_fleet.pipeline.wire import socket_pair

__all__ = [
    "Agent",
    "Forked",
    "MAX_DEATHS",
    "MIN_CHUNK_SAMPLES",
    "PipelineClient",
    "PipelineHandle",
    "draw",
    "everywhere",
    "labels",
    "permutation",
    "plain",
    "samples",
    "serving",
    "shard",
    "vanish",
]

_GONE = pickle.dumps(("", None))
_TICK_S = 0.5
_PATIENCE_S = 240.0  # an agent that takes longer for an answer hangs


def draw(generator: Any) -> float:
    """Draws a number from a generator of any kind."""
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    is_old = isinstance(generator, np.random.RandomState)
    return float(generator.random_sample() if is_old else generator.random())


class Agent:
    """Handle of the forked agent: orders go over a control socket, answered one by one."""

    def __init__(
        self,
        pipeline: SharedPipeline,
        *,
        share: Callable[[_Loop, PipelineSetup], Sharing] | None = None,
        idle_s: float = workers.IDLE_S,
        **options: Any,
    ) -> None:
        setup = _setup(pipeline, **options)
        self.spec = setup.spec
        self._ends: list[socket.socket] = []
        # Ends that trainers will use exist before the fork, as they will in the real agent.
        self._pairs = [socket_pair() for _ in range(20)]
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            workers.IDLE_S = idle_s
            _exit_after(lambda: self._run(control, setup, share))
        control.close()
        self._control.settimeout(_PATIENCE_S)
        for server_end, _ in self._pairs:
            server_end.close()
        self._free = [end for _, end in self._pairs]

    def client(self) -> PipelineClient:
        return PipelineClient(self.socket(), self.spec)

    def socket(self) -> socket.socket:
        end = self._free.pop()
        self._ends.append(end)
        return end

    def stats(self) -> PipelineStats:
        return self._ask("stats")

    def pids(self) -> tuple[int, ...]:
        return self._ask("pids")

    def notices(self) -> list[str]:
        return self._ask("notices")

    def follow(self, plan: Plan) -> None:
        """From now on chunks are shared like this."""
        self._ask("plan", plan)

    def close(self) -> None:
        """Closes agent and children, and fails if one of these did not exit by itself."""
        for end in [*self._ends, *self._free]:
            end.close()
        try:
            assert self._ask("close") == 0
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            raise
        finally:
            self._control.close()
            os.waitpid(self.pid, 0)

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        yield
        for end in [*self._ends, *self._free, self._control]:
            end.close()

    def _ask(self, order: str, value: Any = None) -> Any:
        self._control.send(pickle.dumps((order, value)))
        return pickle.loads(self._control.recv(1 << 16))

    # In the agent's process

    def _run(
        self,
        control: socket.socket,
        setup: PipelineSetup,
        share: Callable[[_Loop, PipelineSetup], Sharing] | None,
    ) -> None:
        self._control.close()
        for _, end in self._pairs:
            end.close()
        loop = _Loop(control)
        if share is None:
            loop.serve(setup)
        else:
            loop.sharing = share(loop, setup)
        for number, (end, _) in enumerate(self._pairs):
            loop.server.add_reader(number, end)
        loop.run()


def _setup(
    pipeline: SharedPipeline,
    *,
    num_preprocessors: int = 2,
    memory_bytes: int = 64 << 20,
    finish_on_device: bool = False,
    is_adaptive: bool = False,
    niceness: int = 0,
    **more: Any,
) -> PipelineSetup:
    """The setup with budgets that a user can't ask for."""
    how = {"is_adaptive": is_adaptive, "niceness": niceness}
    setup = pipeline.packed().setup(num_preprocessors, finish_on_device=finish_on_device, **how)
    return replace(setup, memory_bytes=memory_bytes, **more)


class _Loop:
    """What an agent's loop has to do for the server."""

    server: PipelineServer
    sharing: Sharing | None = None

    def __init__(self, control: socket.socket) -> None:
        self.selector = selectors.DefaultSelector()
        self.control = control
        self.selector.register(control, selectors.EVENT_READ, self.ordered)
        self.wakeup, wakeup_end = os.pipe()
        os.set_blocking(wakeup_end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_end)
        self.selector.register(self.wakeup, selectors.EVENT_READ, self.reap)
        self.running = True
        self.notices: list[str] = []

    def serve(self, setup: PipelineSetup, peers: Peers | None = None) -> PipelineServer:
        self.server = PipelineServer(
            setup,
            spawn=self.spawn,
            selector=self.selector,
            notify=self.notices.append,
            peers=peers,
        )
        return self.server

    def run(self) -> None:
        while self.running:
            # Orders come last: they are answered after all that was sent before them.
            for key, mask in sorted(self.selector.select(_TICK_S), key=self.is_order):
                key.data(mask)
            self.server.resume()

    def is_order(self, event: tuple[selectors.SelectorKey, int]) -> bool:
        return event[0].fileobj is self.control

    def spawn(self, main: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
        ours, theirs = socket_pair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self.control.close()
            signal.set_wakeup_fd(-1)
            _exit_after(lambda: main(theirs))
        theirs.close()
        return pid, ours

    def reap(self, _: int) -> None:
        os.read(self.wakeup, 4096)
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
                if self.sharing is None or not self.sharing.exited(pid):
                    self.server.child_died(pid)

    def ordered(self, _: int) -> None:
        order, value = pickle.loads(self.control.recv(1 << 16) or _GONE)
        match order:
            case "stats":
                self.control.send(pickle.dumps(self.server.stats()))
            case "pids":
                self.control.send(pickle.dumps(self.server.preprocessor_pids))
            case "notices":
                self.control.send(pickle.dumps(self.notices))
            case "plan":
                assert self.sharing is not None
                self.sharing.act(value)
                self.control.send(pickle.dumps(None))
            case "close":
                self.control.send(pickle.dumps(self._close()))
            case _:  # the test ended without closing
                self.running = False

    def _close(self) -> int:
        self.running = False
        pids = self.server.preprocessor_pids
        if self.sharing is not None and self.sharing.pid is not None:
            pids += (self.sharing.pid,)
        self.server.close()
        return sum(os.waitpid(pid, 0)[1] for pid in pids)


def labels(client: PipelineClient, name: str = "train", **arguments: Any) -> list[int]:
    """The second leaf of every batch, in order."""
    batches = client.read(name, **{"epoch": 0, "batch_size": 7, **arguments})
    return [label for batch in batches for label in batch.data[1].tolist()]


def samples(
    client: Any, name: str = "train", epoch: int = 0, batch_size: int = 7, **more: Any
) -> list[Any]:
    """Those of an epoch, where batches are lists of them, as plain numbers and tuples."""
    batches = client.read(name, epoch=epoch, batch_size=batch_size, **more)
    return [plain(sample) for batch in batches if batch.local_size for sample in batch.data]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(map(plain, value)) if isinstance(value, (tuple, list)) else value


def everywhere(data: dict[str, Any], epochs: Any = range(2), **options: Any) -> dict[str, Any]:
    """By data set, what its epochs are, which may not depend on processes, chunks and batches."""

    def all_of(client: Any, batch_size: int = 7) -> dict[str, Any]:
        return {name: [samples(client, name, e, batch_size) for e in epochs] for name in data}

    options = {"collate_fn": list, **options}
    wanted = all_of(SharedPipeline(**data, **options).inline())
    for number, chunk_bytes, batch_size in ((1, 1 << 20, 64), (2, 300, 7)):
        pipeline = SharedPipeline(**data, **options)
        with serving(pipeline, num_preprocessors=number, chunk_bytes=chunk_bytes) as agent:
            found = all_of(agent.client(), batch_size)
            assert {name for name in data if found[name] != wanted[name]} == set()
    return wanted


def vanish(client: PipelineClient) -> None:
    """As if the reader's process was killed."""
    client._sock.close()


@contextlib.contextmanager
def serving(pipeline: SharedPipeline, **options: Any) -> Iterator[Agent]:
    agent = Agent(pipeline, **options)
    try:
        yield agent
    finally:
        agent.close()


class Forked:
    """Runs a function in a forked process; ``result()`` waits for what it returned."""

    def __init__(self, function: Callable[[], Any]) -> None:
        receiving, sending = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(receiving)
            _exit_after(lambda: _write(sending, pickle.dumps(function())))
        os.close(sending)
        self._receiving = receiving

    def result(self) -> Any:
        with os.fdopen(self._receiving, "rb") as stream:
            data = stream.read()
        _, status = os.waitpid(self.pid, 0)
        assert status == 0, f"the forked process ended with status {status}"
        return pickle.loads(data)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._receiving)


def _write(fd: int, data: bytes) -> None:
    with os.fdopen(fd, "wb") as stream:
        stream.write(data)


def _exit_after(action: Callable[[], None]) -> None:
    status = 1
    torch.set_num_threads(1)  # forked from a process whose threads it does not have
    try:
        action()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
