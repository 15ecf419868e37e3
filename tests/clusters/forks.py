"""Has the nursery fork what schedulers start: an agent that starts afresh takes 4 s of CPU."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optuna_fleet.executor.cluster import ray
from optuna_fleet.executor.cluster.slurm import cluster, harvest
from tests.clusters.forked import FORKED, SOCKET
from tests.nursery import Nursery


@contextlib.contextmanager
def forking(nursery: Nursery) -> Iterator[None]:
    """`FORKED` works, in all that inherits the environment."""
    name = f"optuna-fleet-tests-forks-{os.getpid()}"
    nursery.begin()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + name)
        listener.listen(64)
        server = threading.Thread(target=_serve, args=(listener, nursery))
        server.start()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(SOCKET, name)
                yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            server.join()


def _serve(listener: socket.socket, nursery: Nursery) -> None:
    with contextlib.suppress(OSError):  # it was shut down
        while True:
            way, _ = listener.accept()
            threading.Thread(target=_fork, args=(way, nursery)).start()


def _fork(way: socket.socket, nursery: Nursery) -> None:
    """Do one order, and end with who gave it."""
    with way:
        order, fds, _, _ = socket.recv_fds(way, 1 << 20, 2)
        if not order:  # it was killed at once
            return
        argv, environment, folder = json.loads(order)
        with os.fdopen(fds[0], "wb") as out, os.fdopen(fds[1], "wb") as err:
            forked = nursery.start(argv, environment, out, err, Path(folder))
        with contextlib.suppress(ConnectionError):
            way.send(b"%d" % forked.pid)
        ready, _, _ = select.select([forked, way], [], [])
        if forked not in ready:
            os.kill(forked.pid, signal.SIGKILL)
        code = forked.wait()
        with contextlib.suppress(ConnectionError):
            way.send(b"%d" % code)


@contextlib.contextmanager
def agents_are_forked() -> Iterator[None]:
    """Slurm and Ray start `FORKED` where they would have started ``python -m``."""
    command, engine = cluster.agent_command, ray.RayEngine

    def agent_command(*given: Any) -> list[str]:
        agent = command(*given)
        assert agent[:2] == [sys.executable, "-m"]
        return [*FORKED, *agent[2:]]

    def ray_engine(of: Any, agent: Any, device_type: Any) -> Any:
        assert agent[0] == "-m"
        return engine(of, [*FORKED[1:], *agent[1:]], device_type)

    with pytest.MonkeyPatch.context() as patch:
        for module in (cluster, harvest):
            patch.setattr(module, "agent_command", agent_command)
        patch.setattr(ray, "RayEngine", ray_engine)
        yield
