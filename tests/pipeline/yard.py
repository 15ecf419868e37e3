"""A server in the test's own process, in a time that the test makes: who is slow is decided."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from pipeline_datasets import Counted

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.reader.client import PipelineClient
from optuna_fleet.pipeline.server.server import PipelineServer
from optuna_fleet.pipeline.server.workers import IDLE_S, MAKER
from optuna_fleet.pipeline.wire import Port
from optuna_fleet.processes import Forks

__all__ = ["IDLE_S", "Yard", "epochs", "small", "yard"]


class Yard:
    """Preprocessors and readers are processes; the loop hears whom it wants to hear.

    Attributes:
        now_s: The server's time.
        numbers: How many preprocessors there were, each time that changed.
        exits: Exit codes of the preprocessors that ended.
    """

    def __init__(
        self, pipeline: SharedPipeline, limit: int, memory_bytes: int, **how: Any
    ) -> None:
        self.now_s = 0.0
        self.numbers: list[int] = []
        self.exits: list[int] = []
        self.selector = selectors.DefaultSelector()
        self.spec = pipeline.spec()
        self.forks = Forks(self.selector, on_exit=self._exited, in_child=lambda: None)
        setup = pipeline.packed().setup(limit, **how)
        self.server = PipelineServer(
            replace(setup, chunk_bytes=700, memory_bytes=memory_bytes),
            spawn=self.forks.spawn,
            selector=self.selector,
            clock=lambda: self.now_s,
        )
        self.readers: dict[int, int] = {}
        self._chunk_s: Callable[[int], float] = lambda number: 0.0
        deliver, self._pool.on_message = self._pool.on_message, self._delivered
        self._deliver = deliver

    def read(self, function: Callable[[PipelineClient], None]) -> None:
        """Starts a process that reads."""

        def main(sock: socket.socket) -> None:
            self.server.close_in_child()
            function(PipelineClient(sock, self.spec))

        pid, sock = self.forks.spawn(main)
        self.readers[pid] = len(self.readers)
        self.server.add_reader(pid, sock)

    def starve(self, chunk_s: Callable[[int], float]) -> None:
        """Runs until all readers are done; they are so fast that they always wait for data.

        Args:
            chunk_s: Time from one chunk to the next, of so many preprocessors.
        """
        self._chunk_s = chunk_s
        while self.readers:
            waits = self._num_stalled() >= len(self.readers)
            for key in self._ready(waits, not waits):
                self._handle(key)
                break  # what others said may have to wait now

    def feed(self, message_s: float) -> None:
        """Runs until all readers are done; they are so slow that all preprocessors are idle.

        Args:
            message_s: Time from one message of a reader to the next.
        """
        self._chunk_s = lambda number: 0.0
        while self.readers:
            works = self._pool.num_busy(MAKER) > 0
            for key in self._ready(works, not works):
                if not self._is_preprocessor(key):
                    self.now_s += message_s
                self._handle(key)
                break

    def see_exits(self, number: int) -> None:
        """Runs until so many preprocessors have ended."""
        while len(self.exits) < number:
            for key in self._ready(True, True):
                self._handle(key)

    def _delivered(self, message: object) -> None:
        # A chunk that was heard together with one that a reader waited for takes no time itself.
        if self._num_stalled():
            self.now_s += self._chunk_s(len(self.server.preprocessor_pids))
        self._deliver(message)

    def _num_stalled(self) -> int:
        """How many passes wait for data, or for their first answer."""
        return len(self.server._scheduler.stalled) + len(self.server._unopened)

    @property
    def _pool(self) -> Any:
        return self.server._making.workers

    def _is_preprocessor(self, key: selectors.SelectorKey) -> bool:
        return key.data in [worker.port for worker in self._pool._workers.values()]

    def _ready(self, preprocessors: bool, readers: bool) -> list[selectors.SelectorKey]:
        """Waits for something of these, or the end of a child."""
        wanted = {
            key.fd: key
            for key in self.selector.get_map().values()
            if not isinstance(key.data, Port)
            or (preprocessors if self._is_preprocessor(key) else readers)
        }
        writing = [fd for fd, key in wanted.items() if key.events & selectors.EVENT_WRITE]
        readable, writable, _ = select.select(list(wanted), writing, [])
        # Messages first: a reader's end is seen when all it said has been heard.
        fds = sorted({*readable, *writable}, key=lambda fd: not isinstance(wanted[fd].data, Port))
        return [wanted[fd] for fd in fds]

    def _handle(self, key: selectors.SelectorKey) -> None:
        key.data(selectors.EVENT_READ | (key.events & selectors.EVENT_WRITE))
        if (number := len(self.server.preprocessor_pids)) != (self.numbers or [None])[-1]:
            self.numbers.append(number)

    def _exited(self, pid: int, exit_code: int) -> None:
        if self.readers.pop(pid, None) is not None:
            assert exit_code == 0
            self.server.remove_reader(pid)
        else:
            self.exits.append(exit_code)
            self.server.child_died(pid)


@contextlib.contextmanager
def yard(
    pipeline: SharedPipeline, limit: int = 4, memory_bytes: int = 1 << 24, **how: Any
) -> Iterator[Yard]:
    here = Yard(pipeline, limit, memory_bytes, **how)
    try:
        yield here
    finally:
        here.server.close()
        here.forks.kill_all()
        for key in [*here.selector.get_map().values()]:
            here.selector.unregister(key.fileobj)
        here.selector.close()


def small(dataset: Any, **more: Any) -> SharedPipeline:
    return SharedPipeline(train=dataset, val=Counted(64), **more)


def epochs(*numbers: int, name: str = "train", size: int = 150) -> Any:
    def read(client: Any) -> None:
        for epoch in numbers:
            batches = client.read(name, epoch=epoch, batch_size=7)
            labels = torch.cat([batch.data[1] for batch in batches])
            assert sorted(labels.tolist()) == list(range(size))

    return read
