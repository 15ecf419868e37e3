"""Sweeps whose driver and nodes reach each other through a network only, and what befalls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_allclose

from tests.clusters.namespaces import Node, needs_namespaces, nodes_at_a_switch
from tests.clusters.sweep import WORDS, fleet_on, losses
from tests.nursery import Forked, Nursery

pytestmark = needs_namespaces

NUM_AGENTS = 5
# All that passes this node, by interface, until the word that is its last argument.
_CAPTURE = """
import socket, sys
from pathlib import Path
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
sock.setsockopt(socket.SOL_SOCKET, 33, 1 << 28)  # SO_RCVBUFFORCE: nothing is to be missed
print("listening", flush=True)
last = b""
while sys.argv[2].encode() not in last:
    last, (interface, *_) = sock.recvfrom(1 << 17)
    with Path(sys.argv[1], interface).open("ab") as file:
        file.write(last)
"""
_SAY = """
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], 7000))
"""


class Sweep:
    """A driver on the first node, and an agent of one device on each of the others."""

    def __init__(self, nodes: list[Node], folder: Path, nursery: Nursery) -> None:
        self.nodes = nodes
        self._nursery = nursery
        self._file, self._log = folder / "join", folder / "log"
        with self._log.open("w") as log:
            files = (str(self._file), f"{self._file}-here")
            script = (sys.executable, "-m", "tests.clusters.sweep", *files)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.driver = nodes[0].start(*script, stderr=log, **pipes)
        self.agents = {node.name: self.join(node) for node in nodes[1:]}
        self.agents["here"] = self.join(nodes[0], "-here")

    def join(self, node: Node, suffix: str = "") -> Forked:
        options = (f"{self._file}{suffix}", "--devices", "1", "--name", node.name)
        with self._file.with_name(f"log-{node.name}").open("a") as log:
            return node.fork(self._nursery, "tests.joining", *options, log=log)

    def losses(self, midway: Callable[[], Any]) -> list[Any]:
        """What it records, if something is done in its midst."""
        assert self.driver.stdin is not None
        assert self.driver.stdout is not None
        assert self.driver.stdout.readline() == "here\n", self.log
        midway()
        self.driver.stdin.write("go on\n")
        self.driver.stdin.flush()
        said, _ = self.driver.communicate()
        found: list[Any] = json.loads(said)
        return found

    @property
    def log(self) -> str:
        return self._log.read_text()


def give_notice(agent: Forked) -> None:
    """A first SIGTERM, to the process on the other side that it waits for."""
    (there,) = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    os.kill(int(there), signal.SIGTERM)


class Capture:
    """Collects what passes a node."""

    def __init__(self, node: Node, folder: Path) -> None:
        self._node, self._folder = node, folder
        command = (sys.executable, "-c", _CAPTURE, str(folder), "the end")
        self._process = node.start(*command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "listening\n"

    def end(self, other: Node) -> dict[str, bytes]:
        """All frames until now, by interface; the last is one that another node sends."""
        other.run(sys.executable, "-c", _SAY, self._node.address, "the end")
        self._process.wait()
        return {path.name: path.read_bytes() for path in self._folder.iterdir()}


def test_no_fault_of_nodes_costs_a_result_and_nobody_can_listen(
    tmp_path_factory: pytest.TempPathFactory, nursery: Nursery
) -> None:
    """In the midst of a sweep two are cut off, one crashes, one is told that it is to leave."""
    with fleet_on(devices=2, device_type="cpu") as fleet:
        undisturbed = losses(fleet, NUM_AGENTS)
    with nodes_at_a_switch(1 + NUM_AGENTS) as nodes:
        capture = Capture(nodes[0], tmp_path_factory.mktemp("frames"))
        sweep = Sweep(nodes, tmp_path_factory.mktemp("sweep"), nursery)
        _, stays, leaves, hears, speaks, crashes = nodes

        def strike() -> None:
            give_notice(sweep.agents[leaves.name])
            hears.cut_off(hears=True)
            speaks.cut_off(speaks=True)
            crashes.crash()

        struck = sweep.losses(strike)
        frames = capture.end(stays)
        assert_allclose(struck, undisturbed, rtol=1e-10)
        for node in (hears, speaks, crashes):
            assert f"Node {node.name} was lost" in sweep.log
        assert f"Node {leaves.name} leaves at" in sweep.log
        by_themselves = (stays, leaves, hears, speaks)
        assert [sweep.agents[node.name].wait() for node in by_themselves] == [0, 0, 1, 1]
        sweep.agents["here"].wait()
        assert [node.processes() for node in nodes[:-1]] == [[]] * 5
    sweep.agents[crashes.name].wait()
    assert b"the end" in frames["eth0"]
    assert not any(word in frames[name] for word in WORDS for name in ("eth0", "lo"))
