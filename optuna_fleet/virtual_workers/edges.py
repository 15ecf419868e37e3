"""How messages get to stages and parameter servers that are in processes of their own.

A thread per lane receives: gloo says of nothing that it has arrived, and a send ends only when it
is received. Those of servers answer at once, whatever the stage beside is at. How many messages
are on their way is bounded by what minibatches are in flight, and by the clock distance; an
evaluation has no such bound, so what it sends is kept up to a limit.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.nested import map_tensors, to_device
from optuna_fleet.virtual_workers.parameter_server import Directory, ParameterServer
from optuna_fleet.virtual_workers.stage_messages import (
    Held,
    Inbound,
    Lane,
    Outbound,
    Pull,
    Push,
    Snapshot,
    StageAddress,
    Sums,
    Tensors,
    ToStage,
)


class Edges:
    """The ways of one process to others of the trial, and what has come by them.

    Args:
        group: All ranks of the trial, for nothing else; None if this is the only one.
        directory: Who is on which rank.
        device: Where the stage computes.
        room: Most messages of a neighbour that are kept here; more stay where they are.

    Attributes:
        is_alone: There are no others.
        is_broken: See `Pipeline`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        directory: Directory,
        device: torch.device,
        room: int,
    ) -> None:
        self._group = group  # until it is closed
        self._directory = directory
        self._rank = rank = 0 if group is None else group.rank()
        self._device = device
        self._inbox: queue.SimpleQueue[tuple[int, ToStage | Exception]] = queue.SimpleQueue()
        self._servers: Mapping[int, ParameterServer] = {}
        self._serving = threading.Lock()
        self._gone: list[Exception] = []
        self.is_alone = group is None
        self.is_broken = False
        near = directory.near(rank)
        self._room = {place: threading.Semaphore(room) for place in near}
        self._outbound: dict[tuple[Lane, int], Outbound] = {}
        self._threads: dict[Lane, list[threading.Thread]] = {}
        self._sums_to: dict[int, Outbound] = {}
        self._sums_of: dict[int, Inbound] = {}
        if group is None:
            return
        servers, clients = directory.servers_of(rank), directory.clients_of(rank)
        for lane, to, of in (
            (Lane.STAGES, near, near),
            (Lane.TO_SERVERS, servers, clients),
            (Lane.FROM_SERVERS, clients, servers),
        ):
            self._outbound |= {(lane, other): Outbound(group, other, lane) for other in to}
            inbound = {other: Inbound(group, other, lane) for other in of}
            self._threads[lane] = [
                _thread(f"{lane.name} {other}", self._listen, lane, other, its)
                for other, its in inbound.items()
            ]

    def host(self, servers: Mapping[int, ParameterServer]) -> None:
        """Have these servers, by their pieces, answer from now on; nobody may be asking any."""
        self._servers = servers

    def send(self, to: StageAddress, message: ToStage) -> None:
        """Return when the message before has arrived; this one is on its way then."""
        rank = self._directory.stages[to]
        if rank == self._rank:
            self._inbox.put((rank, message))
        else:
            lane = Lane.FROM_SERVERS if isinstance(message, Snapshot) else Lane.STAGES
            self._outbound[lane, rank].send(message)

    def ask(self, message: Push | Pull) -> None:
        """Likewise, of a parameter server."""
        rank = self._directory.hosts[message.piece]
        if rank != self._rank:
            self._outbound[Lane.TO_SERVERS, rank].send(message)
            return
        if isinstance(message, Push):
            updates = map_tensors(message.updates, Tensor.cpu)
            message = message._replace(updates=updates)
        self._serve(message)

    def receive(self) -> ToStage:
        """The next message to the stage, waiting for it; its tensors are on the device.

        Raises:
            RuntimeError: A neighbour has left, or is gone.
        """
        if (waiting := self.poll()) is not None:
            return waiting
        if self._gone:
            raise self._gone[0]
        return self._taken(*self._inbox.get())

    def poll(self) -> ToStage | None:
        """The next message, if there is one; who has left may have said all there is to say."""
        while not self._inbox.empty():
            rank, message = self._inbox.get()
            if not isinstance(message, Exception):
                return self._taken(rank, message)
            self._gone.append(message)
        return None

    def _taken(self, rank: int, message: ToStage | Exception) -> ToStage:
        if isinstance(message, Exception):
            raise message
        if not isinstance(message, Snapshot):
            self._room[rank].release()
        if self._device.type == "cpu":
            return message
        moved: ToStage = to_device(message, self._device)
        return moved

    def around(
        self,
        rings: Mapping[int, Sequence[int]],
        with_own: Callable[[int, Tensors], Tensors],
        *,
        is_step: bool = True,
    ) -> dict[int, Tensors]:
        """Sums, to which each rank of a ring adds in turn, and which then go around complete.

        Args:
            rings: By numbers, alike on all their ranks, which take them in the same order.
            with_own: A number, and the sums so far, to these with what this rank has.
            is_step: Whether the sums are those of a step: not where ranks only meet.

        Raises:
            TrialError: Other ranks do something else.
            RuntimeError: One of them is gone.
        """
        found: dict[int, Tensors] = {}
        for number, ring in rings.items():
            place = ring.index(self._rank)
            before = self._passed_on(ring[place - 1], is_step) if place > 0 else {}
            found[number] = with_own(number, before)
            if place < len(ring) - 1:
                self._pass_on(ring[place + 1], Sums(number, is_step, found[number]))
        for number, ring in rings.items():
            place = ring.index(self._rank)
            if self._rank != ring[-1]:
                found[number] = self._passed_on(ring[place - 1], is_step)
            if (following := ring[(place + 1) % len(ring)]) != ring[-1]:
                self._pass_on(following, Sums(number, is_step, found[number]))
        return found

    def _pass_on(self, rank: int, message: Sums) -> None:
        assert self._group is not None
        if rank not in self._sums_to:
            self._sums_to[rank] = Outbound(self._group, rank, Lane.SUMS)
        self._sums_to[rank].send(message)

    def _passed_on(self, rank: int, is_step: bool) -> Tensors:
        assert self._group is not None
        if rank not in self._sums_of:
            self._sums_of[rank] = Inbound(self._group, rank, Lane.SUMS)
        message = self._sums_of[rank].receive()
        if message.is_step != is_step:
            what = ("evaluates", "trains")
            raise self.parted(rank, what[message.is_step], what[is_step])
        sums: Tensors = message.sums
        return sums

    def parted(self, rank: int, does: str, own: str) -> TrialError:
        """The error for ranks that do not do the same, in words."""
        return TrialError(
            f"The ranks of the trial went different ways: rank {rank} {does}, while rank "
            f"{self._rank} {own}. All must call the pipeline's methods alike."
        )

    def gather(self, own: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """What each rank but the first gives, on that one; all must call it.

        Raises:
            FleetConfigError: It has what can't be sent.
            RuntimeError: On rank 0, if another rank could not give anything, or is gone.
        """
        assert self._group is not None
        if self._rank == 0:
            return [self._held_by(rank) for rank in range(1, self._group.size())]
        out = Outbound(self._group, 0, Lane.VALUES)
        try:
            out.send(Held(own()))
        except Exception:
            out.leave(alone=True)  # who waits for it is told
            out.finish()  # what is on its way is lost with the last reference to it
            raise
        out.wait()
        return []

    def _held_by(self, rank: int) -> dict[str, Any]:
        assert self._group is not None
        held = Inbound(self._group, rank, Lane.VALUES).receive()
        if held is None:
            raise dist.DistNetworkError(f"rank {rank} could not send what it holds")
        values: dict[str, Any] = held.values
        return values

    def close(self, *, alone: bool) -> None:
        """Say so to the others, and wait until they have done so too.

        Args:
            alone: They may never do so: don't wait.
        """
        if self._group is None:
            return
        for place in self._room:
            self._room[place].release(1000)  # for what is not read any more
        # Servers answer until all who ask them have left.
        for lane in (Lane.STAGES, Lane.TO_SERVERS, Lane.FROM_SERVERS):
            for (its, _), out in self._outbound.items():
                if its is lane:
                    out.leave(alone=alone)
            if lane is Lane.TO_SERVERS and not alone:
                self._join(lane)
        if alone:
            _thread("farewells", _finish, [*self._outbound.values()])
        else:
            self._join(Lane.STAGES)
            self._join(Lane.FROM_SERVERS)
            with suppress(RuntimeError):  # some are gone
                # Who closes its connections ends what others receive, from whomever.
                self._group.barrier().wait()
        # Connections end with the last reference. Others may be at the barrier, for ever if not.
        self._outbound.clear()
        self._sums_to.clear()
        self._sums_of.clear()
        self._gone.clear()
        self._group = None

    def _join(self, lane: Lane) -> None:
        for thread in self._threads[lane]:
            thread.join()

    def _listen(self, lane: Lane, rank: int, inbound: Inbound) -> None:
        try:
            while True:
                if lane is Lane.STAGES:
                    self._room[rank].acquire()
                if (message := inbound.receive()) is None:
                    break
                if lane is Lane.TO_SERVERS:
                    self._serve(message)
                else:
                    self._inbox.put((rank, message))
        except Exception as error:  # the stage tells of it
            self._inbox.put((rank, error.with_traceback(None)))  # which would keep the group
            return
        if self._directory.hosts and not inbound.was_left_alone:
            return  # servers go on until all have left: they may still have something to say
        names = self._directory.name_of
        gone = dist.DistNetworkError(  # as when a peer's connection breaks
            f"{names(rank)} has left the pipeline, while {names(self._rank)} waited for it"
        )
        self._inbox.put((rank, gone))

    def _serve(self, message: Push | Pull) -> None:
        with self._serving:
            self._servers[message.piece].receive(message)


def _thread(name: str, target: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(
        target=target, args=args, name=f"optuna-fleet {name.lower()}", daemon=True
    )
    thread.start()
    return thread


def _finish(outbound: list[Outbound]) -> None:
    for lane in outbound:
        lane.finish()
