"""Several nodes on one machine: an agent each, with trainers of its own."""

from __future__ import annotations

import contextlib
import pickle
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

from pipeline_harness import Agent, Forked, labels

from optuna_fleet.executor.cluster.agent.chunk_giver import Sharing
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.exchange import PATIENCE_S, Peers, Plan
from optuna_fleet.wire.invitation import make_credentials

CREDENTIALS, OTHERS = make_credentials(), make_credentials()


class Node(Agent):
    """An agent that gives chunks to others."""

    def __init__(
        self,
        pipeline: SharedPipeline,
        name: str,
        *,
        host: str = "127.0.0.1",
        credentials: bytes = CREDENTIALS,
        patience_s: float = PATIENCE_S,
        **options: Any,
    ) -> None:
        said, say = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def share(loop: Any, setup: Any) -> Sharing:
            peers = Peers(name, credentials, setup.spec, patience_s)
            sharing = Sharing(
                peers,
                loop.serve(setup, peers),
                host=host,
                look_ahead=4,
                spawn=loop.spawn,
                selector=loop.selector,
                close_inherited=loop.server.close_in_child,
                say=lambda message: say.send(pickle.dumps((loop.sharing.pid, message.peer))),
            )
            sharing.start()
            return sharing

        super().__init__(pipeline, share=share, **{"chunk_bytes": 1000, **options})
        say.close()
        with said:
            self.giver, self.peer = pickle.loads(said.recv(4096))


@contextlib.contextmanager
def nodes(
    pipeline: SharedPipeline, count: int, *, scheme: str = "all-shared", **options: Any
) -> Iterator[list[Node]]:
    """Starts so many nodes that share chunks; closes those that the test left in the list."""
    with contextlib.ExitStack() as stack:
        found: list[Node] = []
        for number in range(count):
            node = Node(pipeline, f"node {number}", **options)
            found.append(node)
            stack.callback(lambda node=node: node in found and node.close())
        agree(found, scheme)
        yield found


def agree(found: list[Node], scheme: str = "all-shared", **more: Any) -> Plan:
    """All nodes follow a plan with these in it."""
    plan = Plan(scheme=scheme, peers=tuple(node.peer for node in found), **more)  # type: ignore
    for node in found:
        node.follow(plan)
    return plan


def read_everywhere(found: list[Node], epochs: range, sizes: tuple[int, ...]) -> list[Any]:
    """Each node's trials read the epochs at batch sizes of their own, all at a time."""
    readers = [
        Forked(partial(_read, node.client(), epochs, size)) for node in found for size in sizes
    ]
    return [reader.result() for reader in readers]


def _read(client: Any, epochs: range, size: int) -> list[list[int]]:
    return [labels(client, epoch=epoch, batch_size=size) for epoch in epochs]
