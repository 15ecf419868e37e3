"""Network namespaces joined by a switch (a bridge and veth pairs), for benchmarks."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class NotPermittedError(Exception):
    """This machine lets us make no network namespaces."""


class Switch:
    """Puts this process, which must be a fork of one thread, into namespaces of its own.

    Args:
        num_nodes: Nodes at the switch, each in a namespace of its own.
        mbit_per_s: What each node can send, and receive.
    """

    def __init__(self, num_nodes: int, mbit_per_s: float | None = None) -> None:
        if shutil.which("ip") is None:
            raise NotPermittedError("there is no `ip` command")
        _unshare(_NEW_NET if os.geteuid() == 0 else _NEW_USER | _NEW_NET)
        self._connections = _namespace()
        _run("ip link add br0 type bridge")
        _run("ip link set br0 up")
        self._nodes = []
        gate, self._gate = os.pipe()  # it opens when this process ends
        self._retention = os.fork()  # `ip` names a namespace by a process in it
        if self._retention == 0:
            os.close(self._gate)
            os.read(gate, 1)
            os._exit(0)
        os.close(gate)
        for node in range(num_nodes):
            self._plug_in(node, mbit_per_s)

    @staticmethod
    def address(node: int) -> str:
        """That of a node."""
        return f"10.77.0.{node + 1}"

    def at(self, node: int, action: Callable[[], Any]) -> Any:
        """Does something at a node: what is forked there stays there."""
        _enter(self._nodes[node])
        return action()

    def close(self) -> None:
        """End all of it."""
        for fd in (self._gate, self._connections, *self._nodes):
            os.close(fd)
        os.waitpid(self._retention, 0)

    def _plug_in(self, node: int, mbit_per_s: float | None) -> None:
        _unshare(_NEW_NET)
        self._nodes.append(_namespace())
        _run("ip link set lo up")
        _run(f"ip link add v type veth peer name h{node} netns {self._retention}")
        _run(f"ip addr add {self.address(node)}/24 dev v")
        _run("ip link set v up")
        _limit("v", mbit_per_s)
        _enter(self._connections)
        _run(f"ip link set h{node} master br0")
        _run(f"ip link set h{node} up")
        _limit(f"h{node}", mbit_per_s)


def _limit(device: str, mbit_per_s: float | None) -> None:
    if mbit_per_s is not None:
        bucket = f"rate {mbit_per_s}mbit burst 64kb latency 50ms"
        _run(f"tc qdisc add dev {device} root tbf {bucket}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise NotPermittedError(f"`{command}`: {done.stderr.strip()}")


def _namespace() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _unshare(flags: int) -> None:
    if _libc.unshare(flags):
        raise NotPermittedError(os.strerror(ctypes.get_errno()))


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _NEW_NET):
        raise OSError(ctypes.get_errno(), "setns")
