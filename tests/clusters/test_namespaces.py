"""The nodes that other tests are made of."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.namespaces import Node, needs_namespaces, nodes_at_a_switch

pytestmark = needs_namespaces

_LISTEN = """
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("0.0.0.0", 7000))
print("bound", flush=True)
while True:
    print(sock.recv(64).decode(), flush=True)
"""
_SAY = """
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], 7000))
"""


@pytest.fixture
def two() -> Iterator[list[Node]]:
    with nodes_at_a_switch(2) as nodes:
        yield nodes


class _Listener:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.process = node.start(sys.executable, "-c", _LISTEN, stdout=subprocess.PIPE, text=True)
        assert self.hear() == "bound"

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def is_told(self, word: str, by: Node) -> None:
        by.run(sys.executable, "-c", _SAY, self.node.address, word)

    def hears(self, word: str, by: Node) -> None:
        """It is told until it hears it: what a node is sent that has just booted may be lost."""
        self.is_told(word, by)
        while not select.select([self.process.stdout], [], [], 2.0)[0]:
            self.is_told(word, by)
        assert self.hear() == word


def test_nodes_reach_each_other_and_have_processes_of_their_own(two: list[Node]) -> None:
    here, there = two
    listener = _Listener(there)
    listener.hears("hello", by=here)
    assert [node.run("hostname").strip() for node in two] == ["node0", "node1"]
    assert here.processes() == []
    assert len(there.processes()) == 1
    assert int(there.run("sh", "-c", "echo $$")) < 50


@pytest.mark.parametrize("hears", [False, True])
def test_words_to_and_from_a_node_that_is_cut_off_vanish(two: list[Node], hears: bool) -> None:
    here, there = two
    at_here, at_there = _Listener(here), _Listener(there)
    there.cut_off(hears=hears)
    at_here.is_told("lost", by=there)
    at_there.is_told("half open", by=here)
    there.heal()
    at_here.is_told("healed", by=there)
    at_there.is_told("healed", by=here)
    assert at_here.hear() == "healed"
    assert at_there.hear() == ("half open" if hears else "healed")


def test_a_node_that_speaks_only(two: list[Node]) -> None:
    here, there = two
    at_here, at_there = _Listener(here), _Listener(there)
    there.cut_off(speaks=True)
    at_here.is_told("half open", by=there)
    at_there.is_told("lost", by=here)
    there.heal()
    at_there.is_told("healed", by=here)
    assert at_here.hear() == "half open"
    assert at_there.hear() == "healed"


def test_a_frozen_node_stands_still_and_goes_on_when_it_thaws(two: list[Node]) -> None:
    here, there = two
    listener = _Listener(there)
    there.freeze()
    states = [Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] for pid in there.processes()]
    assert states == ["T"]
    listener.is_told("asleep", by=here)
    there.thaw()
    assert listener.hear() == "asleep"


def test_a_node_that_crashed_comes_back_empty(two: list[Node]) -> None:
    here, there = two
    listener = _Listener(there)
    there.crash()
    assert listener.process.poll() is not None
    there.boot()
    assert there.processes() == []
    listener = _Listener(there)
    listener.hears("again", by=here)


def test_a_frozen_node_can_crash(two: list[Node]) -> None:
    listener = _Listener(two[1])
    two[1].freeze()
    two[1].crash()
    assert listener.process.poll() is not None
    two[1].boot()


def test_a_command_dies_with_what_started_it(two: list[Node]) -> None:
    listener = _Listener(two[0])
    [inside] = two[0].processes()
    waiting = os.pidfd_open(inside)
    listener.process.kill()
    select.select([waiting], [], [])
    os.close(waiting)


def test_a_command_that_was_frozen_ends_as_it_would_have(two: list[Node]) -> None:
    commands = [
        two[0].start("sh", "-c", "read line; exit 3", stdin=subprocess.PIPE) for _ in "123"
    ]
    for _ in range(20):
        two[0].freeze()
        two[0].thaw()
    for command in commands:
        command.communicate(b"go on\n")
    assert [command.returncode for command in commands] == [3, 3, 3]


def test_a_folder_of_its_own(two: list[Node], tmp_path: Path) -> None:
    (tmp_path / "shared").touch()
    two[1].hide(tmp_path)
    two[1].run("touch", str(tmp_path / "own"))
    assert two[0].run("ls", str(tmp_path)) == "shared\n"
    assert two[1].run("ls", str(tmp_path)) == "own\n"


def test_two_at_once(two: list[Node]) -> None:
    with nodes_at_a_switch(2) as others:
        assert [node.address for node in others] == [node.address for node in two]
        others[1].cut_off()
        listener = _Listener(two[1])
        listener.hears("hello", by=two[0])


_OWNER = """
from tests.leftovers import children
from tests.clusters.namespaces import nodes_at_a_switch
with nodes_at_a_switch(2) as nodes:
    nodes[1].start("sleep", "1000")
    while not (pids := nodes[1].processes()):
        pass
    print(*pids, *children(), flush=True)
    input()
"""


def test_all_of_it_ends_with_who_made_it_even_if_that_is_killed() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    waiting = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
    assert waiting
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    for pidfd in waiting:
        select.select([pidfd], [], [])
        os.close(pidfd)
