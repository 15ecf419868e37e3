"""Data sets are packed once per fleet, and there once per machine, whoever joins and reads."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet import FleetExecutor, LocalCluster, SharedPipeline
from optuna_fleet.executor.cluster import config

MARK = secrets.token_bytes(32)
NBYTES = 48 << 20
"""So much that the C library gives it back when it is freed."""


class Marked(torch.utils.data.Dataset[torch.Tensor]):
    """Much data, with a mark at its beginning; counts how often it is pickled here."""

    num_pickled = 0

    def __init__(self) -> None:
        self.rows = torch.zeros(16, NBYTES // 16, dtype=torch.uint8)
        self.rows[0, : len(MARK)] = torch.frombuffer(bytearray(MARK), dtype=torch.uint8)
        self.rows[:, -1] = torch.arange(16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.rows.count_nonzero() >= 15  # whoever makes a sample has read all of it
        return self.rows[index, -1]

    def __getstate__(self) -> Any:
        Marked.num_pickled += 1
        return vars(self)


def objective(trial: Any) -> float:
    seen = [sample for _ in trial.epochs(2) for x in trial.batches("train", 8) for sample in x]
    assert sorted(map(int, seen)) == sorted([*range(16)] * 2)
    return 0.0


def sweep(fleet: FleetExecutor) -> None:
    study = optuna.create_study()
    study.optimize(objective, n_trials=4, executor=fleet)
    assert [trial.value for trial in study.trials] == [0.0] * 4


def agents(fleet: Any) -> list[int]:
    return [node.pid for node in fleet._runner._runtime.nodes]


def below(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from below(child)


def has_data(memory: bytes) -> bool:
    row = NBYTES // 16
    begins = (match.start() for match in re.finditer(re.escape(MARK), memory))
    # The mark alone is in this process too.
    return any(memory[at + row - 1 : at + NBYTES : row] == bytes(range(16)) for at in begins)


def places_of_data(pid: int) -> list[str]:
    """Where a process has all of the data: "own" memory, or the number of a memory file."""
    found = []
    line_of_maps = re.compile(r"(\w+)-(\w+) r\S+ \S+ \S+ (\d+) *(.*)")
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if (match := line_of_maps.match(line)) is None or "arena" in line or ".so" in line:
                continue  # torch's libraries take gigabytes
            begin, end = (int(number, 16) for number in match.groups()[:2])
            if end - begin < NBYTES:
                continue
            memory.seek(begin)
            if has_data(memory.read(min(end - begin, 20 * NBYTES))):
                found.append(match[3] if "optuna-fleet-data" in match[4] else "own")
    return found


def places_on(nodes: list[int]) -> set[str]:
    """Where agents and all their children have the data."""
    pids = [pid for node in nodes for pid in (node, *below(node))]
    return {place for pid in pids for place in places_of_data(pid)}


def files_of(pid: int) -> set[int]:
    """The memory files with data sets that a process has open."""
    links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return {os.stat(x).st_ino for x in links if "optuna-fleet-data" in os.readlink(x)}


def sweep_on_both(fleet: FleetExecutor) -> None:
    """One that was started anew may join when all trials are done by the other."""
    while True:
        sweep(fleet)
        with contextlib.suppress(OSError):  # of one whose end is not known yet
            if len(agents(fleet)) == 2 and all(map(files_of, agents(fleet))):
                return


class Here:
    """This process, which may have fleets of other tests."""

    def __init__(self) -> None:
        self._before = files_of(os.getpid())

    @property
    def files(self) -> set[int]:
        return files_of(os.getpid()) - self._before


@pytest.fixture
def here() -> Here:
    gc.collect()
    return Here()


@pytest.fixture
def fleet(here: Here) -> Iterator[FleetExecutor]:
    Marked.num_pickled = 0
    pipeline = SharedPipeline(train=Marked(), exchange="local")
    cluster = LocalCluster(nodes=2)
    with FleetExecutor(pipeline, devices=1, device_type="cpu", cluster=cluster) as fleet:
        yield fleet
    assert here.files == set()


def test_nodes_of_the_drivers_machine_read_one_file(fleet: FleetExecutor, here: Here) -> None:
    sweep_on_both(fleet)
    (file,) = here.files
    assert [files_of(agent) for agent in agents(fleet)] == [{file}, {file}]
    os.kill(agents(fleet)[0], signal.SIGKILL)
    sweep_on_both(fleet)
    assert places_on(agents(fleet)) == {str(file)}
    assert places_of_data(os.getpid()) == ["own"]  # the user's
    assert Marked.num_pickled == 1


def test_nodes_of_other_machines_fetch_the_same_file(
    fleet: FleetExecutor, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "machine", lambda: "another")
    sweep_on_both(fleet)
    os.kill(agents(fleet)[0], signal.SIGKILL)
    sweep_on_both(fleet)
    files = [files_of(agent) for agent in agents(fleet)]
    assert len(set.union(*files, here.files)) == 3
    for agent, (file,) in zip(agents(fleet), files, strict=True):
        assert places_on([agent]) <= {str(file)}
    assert Marked.num_pickled == 1
