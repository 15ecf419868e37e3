"""Nodes for tests: namespaces at a switch, which are cut off, or crash.

Each has an address, a host name, a root of its process ids and mounts of its own: two nodes have
processes of the same number. Nothing here has a name outside, so tests may run side by side, and
all of it ends with the process that made it, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.nursery import Forked, Nursery

_TOOLS = ("env", "ip", "nsenter", "setpriv", "tc", "unshare")
_DYING = ("setpriv", "--pdeathsig", "KILL")
_NODE = ("--net", "--uts", "--mount", "--pid")
# The first process of a node: it reaps, and the node ends with it.
_KEEP = (
    "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    "print(flush=True); sys.stdin.read()"
)


class Node:
    """A machine of its own, as far as processes at it can tell."""

    def __init__(self, number: int, switch: int) -> None:
        self.name = f"node{number}"
        self.address = f"10.77.0.{number + 1}"
        self._switch = switch
        self._commands: list[subprocess.Popen[Any]] = []
        self._keeper, self._pid = _keep(*_NODE, "--mount-proc")
        _inside(self._pid, "hostname", self.name)
        self._at_switch(f"ip link add {self.name} type veth peer name eth0 netns {self._pid}")
        self._set_up(f"ip link set eth0 address 02:00:00:00:00:{number + 1:02x}")
        self._set_up(f"ip addr add {self.address}/24 dev eth0; ip link set lo up")
        peers = (  # or a node that is cut off would be known as unreachable
            f"ip neigh replace 10.77.0.{n} lladdr 02:00:00:00:00:{n:02x} dev eth0 nud permanent"
            for n in range(1, _MOST + 1)
        )
        self._set_up("; ".join(["ip link set eth0 up", *peers]))
        self._at_switch(f"ip link set {self.name} master switch up")

    def start(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command there; killing what is returned kills it.

        Args:
            command: Program and arguments.
            options: For `subprocess.Popen`.
        """
        folder = str(options.pop("cwd", os.getcwd()))
        process = subprocess.Popen(
            [*_DYING, *_enter(self._pid), *_DYING, "env", "-C", folder, *command],
            **options,
        )
        self._commands.append(process)
        return process

    def fork(self, nursery: Nursery, module: str, *arguments: str, log: IO[Any]) -> Forked:
        """Run a module there, which the nursery has imported before."""
        return nursery.start([module, *arguments], os.environ, log, log, inside=self._pid)

    def run(self, *command: str) -> str:
        """Run a command there; return what it prints."""
        return _inside(self._pid, *command)

    def processes(self) -> list[int]:
        """What runs there, by the process ids of this side."""
        return [pid for pid in _processes_in(_pid_namespace(self._pid)) if pid != self._pid]

    def cut_off(self, *, hears: bool = False, speaks: bool = False) -> None:
        """From now on packets vanish, and nobody is told.

        Args:
            hears: Packets still arrive there.
            speaks: Packets still come from there.
        """
        if not hears:
            self._at_switch(f"tc qdisc replace dev {self.name} root blackhole")
        if not speaks:
            self._set_up("tc qdisc replace dev eth0 root blackhole")

    def crash(self) -> None:
        """Cut the power: nothing that runs there can say another word."""
        self.cut_off()
        self.close()

    def close(self) -> None:
        """End all that runs there. May be called again."""
        if self._keeper.returncode is None:
            _end(self._keeper)
            for command in self._commands:
                command.kill()
                command.communicate()

    def _set_up(self, command: str) -> None:
        _inside(self._pid, "sh", "-ec", command, kinds=("--net",))

    def _at_switch(self, command: str) -> None:
        _inside(self._switch, "sh", "-ec", command, kinds=("--net",))


_MOST = 16


@contextlib.contextmanager
def nodes_at_a_switch(count: int) -> Iterator[list[Node]]:
    """So many nodes that reach each other."""
    assert count <= _MOST
    with contextlib.ExitStack() as undo:
        keeper, switch = _keep("--net")
        undo.callback(_end, keeper)
        for command in ("ip link add switch type bridge", "ip link set switch up"):
            _inside(switch, *command.split(), kinds=("--net",))
        nodes = []
        for number in range(count):
            nodes.append(Node(number, switch))
            undo.callback(nodes[-1].close)
        yield nodes


def _why_not() -> str:
    """Why this machine can have no such nodes, or ""."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"there is no {', '.join(missing)} (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces with processes of their own need root"
    tried = subprocess.run(["unshare", *_NODE, "--fork", "true"], capture_output=True, text=True)
    return tried.stderr.strip()


needs_namespaces = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


def _keep(*kinds: str) -> tuple[subprocess.Popen[str], int]:
    """New namespaces: what ends them when it is killed, and the pid of a process in them."""
    keeper = subprocess.Popen(
        ["unshare", *kinds, "--fork", "--kill-child", sys.executable, "-I", "-S", "-c", _KEEP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "\n"
    children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text()
    return keeper, int(children)


def _end(keeper: subprocess.Popen[str]) -> None:
    keeper.kill()
    keeper.communicate()


def _enter(pid: int, kinds: tuple[str, ...] = _NODE) -> list[str]:
    return ["nsenter", "--target", str(pid), *kinds, "--"]


def _inside(pid: int, *command: str, kinds: tuple[str, ...] = _NODE) -> str:
    done = subprocess.run([*_enter(pid, kinds), *command], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def _pid_namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def _processes_in(namespace: str) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                if _pid_namespace(int(folder.name)) == namespace:
                    yield int(folder.name)
