"""A trainer's side of the pipeline."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from optuna_fleet.exceptions import FleetError
from optuna_fleet.pipeline import wire
from optuna_fleet.pipeline.pipeline_messages import ArenaOpened, OpenPass
from optuna_fleet.pipeline.reader.batches import (
    Batch,
    FromAgent,
    OpenedPass,
    agent_gone,
    read_batches,
)
from optuna_fleet.pipeline.reader.mapping import Mapping
from optuna_fleet.pipeline.reader.read_plan import Batches, planned
from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.wire.packing import unpack

_AT_ONCE = int(socket.MSG_DONTWAIT)


class PipelineClient:
    """Reads the shared data sets; for one thread of one trainer process.

    Its socket is one end of a pair whose other end the ``PipelineServer`` has.

    Attributes:
        spec: The description of the data sets.
        waited_s: Seconds spent waiting for data so far.
    """

    def __init__(self, sock: socket.socket, spec: PipelineSpec) -> None:
        sock.setblocking(True)
        self._sock = sock
        self.spec = spec
        self._numbers = count(1)
        self._passes: dict[int, OpenedPass] = {}
        self._mapping: Mapping | None = None
        self._collates: dict[str, Callable[[list[Any]], Any] | None] = {}
        self.waited_s = 0.0
        self._run_id: int | None = None
        self._at_wait: Callable[[], object] = lambda: None

    def begin(self, run_id: int, at_wait: Callable[[], object]) -> None:
        """Read for a run; `at_wait`, and nothing else, is called when a wait begins or ends."""
        self._run_id, self._at_wait = run_id, at_wait

    def read(self, name: str, **arguments: Any) -> Batches[Batch]:
        """Returns one epoch of a data set in batches; the arguments are those of `ReadPlan`."""
        return Batches(planned(self.spec, name, **arguments), partial(read_batches, self))

    def finisher(self, name: str) -> Callable[[Any], Any] | None:
        """Returns what is left to do with each batch where the trial computes; None if nothing."""
        packed = self.spec.dataset(name).finish
        return None if packed is None else unpack(packed)

    def collate_fn(self, name: str) -> Callable[[list[Any]], Any] | None:
        """Returns the user's ``collate_fn`` for a data set, if there is one."""
        if name not in self._collates:
            packed = self.spec.dataset(name).collate
            self._collates[name] = None if packed is None else unpack(packed)
        return self._collates[name]

    def open_pass(
        self, name: str, epoch: int, start: int, *, continues: bool = False
    ) -> OpenedPass:
        """Begins to read at sample ``start`` of the canonical order of an epoch."""
        number = next(self._numbers)
        opened = self._passes[number] = OpenedPass(self, number)
        try:
            self.send(
                OpenPass(
                    pass_id=number,
                    name=name,
                    epoch=epoch,
                    start=start,
                    continues=continues,
                    run_id=self._run_id,
                )
            )
            self.wait_until(lambda: opened.chunk_size > 0)
        except BaseException:
            opened.close()
            raise
        return opened

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when there is something to `hear`."""
        return self._sock.fileno()

    def hear(self) -> None:
        """Takes in what has arrived, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._receive(_AT_ONCE)

    def close(self) -> None:
        """Gives everything back; batches that were read stay valid."""
        for opened in list(self._passes.values()):
            opened.close()
        if self._mapping is not None:
            self._mapping.close()

    # For passes

    @property
    def mapping(self) -> Mapping:
        """The arena; something was received before."""
        assert self._mapping is not None
        return self._mapping

    def forget(self, number: int) -> None:
        """A pass is closed: what comes of it is of no use."""
        del self._passes[number]

    def send(self, message: object) -> None:
        """Tells the agent.

        Raises:
            PipelineLostError: It is gone.
        """
        try:
            wire.send(self._sock, message)
        except OSError as error:
            raise agent_gone() from error

    def wait_until(self, arrived: Callable[[], bool]) -> None:
        """Takes in what the agent says until something is so.

        Raises:
            PipelineLostError: It is gone.
        """
        if arrived():
            return
        begin = time.perf_counter()
        self._at_wait()
        try:
            while not arrived():
                self._receive()
        finally:
            self.waited_s += time.perf_counter() - begin
            self._at_wait()

    def _receive(self, flags: int = 0) -> None:
        try:
            if self._mapping is None:
                self._open_arena()
            # It stays the first until it is heard: Ctrl-C may come, and another pass wait for it.
            message = wire.receive(self._sock, flags | socket.MSG_PEEK)
        except EOFError:
            raise agent_gone() from None
        assert isinstance(message, FromAgent)
        if (opened := self._passes.get(message.pass_id)) is not None:
            opened.hear(message)
        self._sock.recv(1)

    def _open_arena(self) -> None:
        message, descriptors = wire.peek_first(self._sock)
        assert isinstance(message, ArenaOpened)
        if not descriptors:
            raise FleetError(
                "This process has too many open files to be given any data: close some, or raise "
                "the limit (ulimit -n)."
            )
        wire.receive(self._sock)
        self._mapping = Mapping(message.nbytes, *descriptors)
