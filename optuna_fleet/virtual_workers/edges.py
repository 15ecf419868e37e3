"""How messages get to stages and parameter servers that are in processes of their own.

A thread per lane receives: gloo says of nothing that it has arrived, and a send ends only when it
is received. Servers answer on a thread of theirs, whatever the stage beside them is at. How many
messages are on their way is bounded by what minibatches are in flight, and by the clock distance;
an evaluation has no such bound, so what it sends is kept up to a limit.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optuna_fleet.trainer.nested import map_tensors, to_device
from optuna_fleet.virtual_workers.directory import Directory
from optuna_fleet.virtual_workers.parameter_server import ParameterServer
from optuna_fleet.virtual_workers.stage_messages import (
    Activations,
    Address,
    Gradients,
    Inbound,
    Lane,
    Message,
    Outbound,
    Push,
    ServerAddress,
    Snapshot,
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
        self._inbox: queue.SimpleQueue[tuple[int, Message | Exception]] = queue.SimpleQueue()
        self._for_servers: queue.SimpleQueue[tuple[int, Message] | None] = queue.SimpleQueue()
        self._servers: Mapping[int, ParameterServer] = {}
        self._gone: list[Exception] = []
        self.is_alone = group is None
        self.is_broken = False
        if group is None:
            return
        near, servers = directory.near(rank), directory.servers_of(rank)
        clients = directory.clients_of(rank)
        outbound = [(Lane.STAGES, near), (Lane.TO_SERVERS, servers), (Lane.FROM_SERVERS, clients)]
        inbound = [(Lane.STAGES, near), (Lane.FROM_SERVERS, servers), (Lane.TO_SERVERS, clients)]
        self._outbound = {
            (lane, to): Outbound(group, to, lane) for lane, ranks in outbound for to in ranks
        }
        self._room = {place: threading.Semaphore(room) for place in near}
        self._threads = {
            lane: [
                self._thread(f"{lane.name} {of}", self._listen, lane, of, Inbound(group, of, lane))
                for of in ranks
            ]
            for lane, ranks in inbound
        }
        self._serving = self._thread("servers", self._serve)

    @staticmethod
    def _thread(name: str, target: Any, *args: Any) -> threading.Thread:
        thread = threading.Thread(
            target=target, args=args, name=f"optuna-fleet {name.lower()}", daemon=True
        )
        thread.start()
        return thread

    def host(self, servers: Mapping[int, ParameterServer]) -> None:
        """Have these servers, by their pieces, answer from now on; nobody may be asking any."""
        self._servers = servers

    def send(self, sender: Address, to: Address, message: Message) -> None:
        """Return when the message before has arrived; this one is on its way then."""
        if isinstance(to, ServerAddress):
            lane, rank = Lane.TO_SERVERS, self._directory.hosts[to.piece]
        else:
            is_server = isinstance(sender, ServerAddress)
            lane = Lane.FROM_SERVERS if is_server else Lane.STAGES
            rank = self._directory.stages[to]
        if rank != self._rank:
            self._outbound[lane, rank].send(to, message)
        elif isinstance(to, ServerAddress):
            if isinstance(message, Push):
                message = replace(message, updates=map_tensors(message.updates, Tensor.cpu))
            self._for_servers.put((to.piece, message))
        else:
            self._inbox.put((rank, message))

    def receive(self) -> Message:
        """The next message to the stage, waiting for it; its tensors are on the device.

        Raises:
            RuntimeError: A neighbour has left, or is gone.
        """
        if (waiting := self.poll()) is not None:
            return waiting
        if self._gone:
            raise self._gone[0]
        return self._taken(*self._inbox.get())

    def poll(self) -> Message | None:
        """The next message, if there is one; who has left may have said all there is to say."""
        while not self._inbox.empty():
            rank, message = self._inbox.get()
            if not isinstance(message, Exception):
                return self._taken(rank, message)
            self._gone.append(message)
        return None

    def _taken(self, rank: int, message: Message | Exception) -> Message:
        if isinstance(message, Exception):
            raise message
        if not isinstance(message, Snapshot):
            self._room[rank].release()
        if self._device.type == "cpu":
            return message
        match message:
            case Activations() | Gradients():
                return replace(message, values=to_device(message.values, self._device))
            case Snapshot():
                return replace(message, weights=to_device(message.weights, self._device))
        return message

    def gather(self, own: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """What each rank but the first gives, on that one; all must call it.

        Raises:
            FleetConfigError: It has what can't be sent.
            RuntimeError: On rank 0, if another rank could not give anything, or is gone.
        """
        assert self._group is not None
        if self._rank > 0:
            Outbound(self._group, 0, Lane.VALUES).send_values(own)
            return []
        group, others = self._group, range(1, self._group.size())
        return [Inbound(group, rank, Lane.VALUES).values() for rank in others]

    def close(self, *, alone: bool) -> None:
        """Say so to the others, and wait until they have done so too.

        Args:
            alone: They may never do so: don't wait.
        """
        if self._group is None:
            return
        for place in self._room:
            self._room[place].release(1000)  # for what is not read any more
        self._leave(Lane.STAGES, alone=alone)
        self._leave(Lane.TO_SERVERS, alone=alone)
        if not alone:
            self._join(Lane.TO_SERVERS)
        self._for_servers.put(None)
        if not alone:
            self._serving.join()
        self._leave(Lane.FROM_SERVERS, alone=alone)
        if alone:
            self._thread("farewells", _finish, [*self._outbound.values()])
        else:
            self._join(Lane.STAGES)
            self._join(Lane.FROM_SERVERS)
            with suppress(RuntimeError):  # some are gone
                # Who closes its connections ends what others receive, from whomever.
                self._group.barrier().wait()
        # Connections end with the last reference. Others may be at the barrier, for ever if not.
        self._outbound.clear()
        self._gone.clear()
        self._group = None

    def _leave(self, lane: Lane, *, alone: bool) -> None:
        for (its, _), out in self._outbound.items():
            if its is lane:
                out.leave(alone=alone)

    def _join(self, lane: Lane) -> None:
        for thread in self._threads[lane]:
            thread.join()

    def _listen(self, lane: Lane, rank: int, inbound: Inbound) -> None:
        try:
            while True:
                if lane is Lane.STAGES:
                    self._room[rank].acquire()
                if (received := inbound.receive()) is None:
                    break
                if lane is Lane.TO_SERVERS:
                    self._for_servers.put(received)
                else:
                    self._inbox.put((rank, received[1]))
        except Exception as error:
            self._inbox.put((rank, error.with_traceback(None)))  # which would keep the group
            return
        if self._directory.hosts and not inbound.was_left_alone:
            return  # servers go on until all have left: they may still have something to say
        names = self._directory.name_of
        gone = dist.DistNetworkError(  # as when a peer's connection breaks
            f"{names(rank)} has left the pipeline, while {names(self._rank)} waited for it"
        )
        self._inbox.put((rank, gone))

    def _serve(self) -> None:
        while (received := self._for_servers.get()) is not None:
            piece, message = received
            try:
                self._servers[piece].receive(message)
            except Exception as error:  # the stage beside tells of it
                self._inbox.put((self._rank, error))
                return


def _finish(outbound: Sequence[Outbound]) -> None:
    for lane in outbound:
        lane.finish()
