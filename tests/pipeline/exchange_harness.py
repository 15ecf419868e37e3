"""Several nodes on one machine: an agent each, with trainers of its own."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pipeline_harness import Agent, Forked

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.exchange import ExchangeConfig

SECRET = b"the secret of one sweep."


def config(node: int, num_nodes: int, port: int, **options: Any) -> ExchangeConfig:
    options = {"host": "127.0.0.1", "secret": SECRET, "scheme": "all-shared", **options}
    return ExchangeConfig(node=node, num_nodes=num_nodes, port=port, **options)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@contextlib.contextmanager
def nodes(
    pipeline: SharedPipeline, num_nodes: int, *, agent_options: Any = None, **options: Any
) -> Iterator[list[Agent]]:
    """Starts so many agents that exchange chunks; closes those that the test left."""
    port = free_port()
    agent_options = {"chunk_bytes": 1000, **(agent_options or {})}
    with contextlib.ExitStack() as stack:
        agents = []
        for node in range(num_nodes):
            exchange = config(node, num_nodes, port, **options)
            agents.append(Agent(pipeline, exchange=exchange, **agent_options))
            stack.callback(lambda agent=agents[-1]: agent in agents and agent.close())
        yield agents


def labels(client: Any, name: str = "train", **arguments: Any) -> list[int]:
    """The second leaf of every batch, in order."""
    batches = client.read(name, **{"epoch": 0, "batch_size": 7, **arguments})
    return [label for batch in batches for label in batch.data[1].tolist()]


def read_everywhere(agents: list[Agent], epochs: range, sizes: tuple[int, ...]) -> list[Any]:
    """Each node's trials read the epochs at batch sizes of their own, all at a time."""
    readers = [
        Forked(partial(_read, agent.client(), epochs, size)) for agent in agents for size in sizes
    ]
    return [reader.result() for reader in readers]


def _read(client: Any, epochs: range, size: int) -> list[list[int]]:
    return [labels(client, epoch=epoch, batch_size=size) for epoch in epochs]


@contextlib.contextmanager
def pidfd(pid: int) -> Iterator[Callable[[], object]]:
    """Gives a function that waits until the process has ended, be it our child or not."""
    fd = os.pidfd_open(pid)
    try:
        yield lambda: select.select([fd], [], [])
    finally:
        os.close(fd)
