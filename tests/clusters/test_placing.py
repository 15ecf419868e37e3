"""The threads of engines: none dies unheard."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_fleet import LocalCluster
from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster import local
from optuna_fleet.executor.cluster.engine import Engine, PlacingEngine
from optuna_fleet.executor.cluster.slurm.cluster import SlurmEngine
from optuna_fleet.processes import ModuleProcess
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation

INVITATION = Invitation(addresses=(("127.0.0.1", 1),), credentials=b"")


class Noting(PlacingEngine):
    """Notes what it is to do."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        super().__init__("Nobody")
        self.noted: list[str] = []
        self._when_it_acts = act

    def _prepare(self, invitation: Invitation) -> None:
        self.noted.append("prepare")

    def _act(self) -> float:
        self.noted.append("act")
        self._when_it_acts()
        return math.inf

    def _leave(self) -> None:
        self.noted.append("leave")

    def _is_stuck(self) -> None:
        self.noted.append("stuck")


def told_by(engine: Engine) -> str:
    """What the driver is told of an engine that can't go on."""
    with contextlib.closing(Inbox()) as inbox:
        engine.open(INVITATION, inbox)
        with pytest.raises(LaunchError) as told:
            list(iter(inbox.get, "never"))
    engine.close()
    return str(told.value)


def test_what_goes_wrong_as_a_scheduler_is_asked_is_told() -> None:
    engine = Noting(lambda: {}["nothing"])
    assert told_by(engine) == "Nobody can't place agents any more: KeyError: 'nothing'"
    assert engine.noted == ["prepare", "act", "leave"]


def test_an_srun_that_can_not_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    engine = SlurmEngine("1", ("agent",), notice_s=1.0)
    for _ in range(2):
        assert "`srun` can't be started" in told_by(engine)
        assert not engine.expected()


def test_an_agent_that_can_not_be_started_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(options: Any, threads: int) -> ModuleProcess:
        if started:
            raise LaunchError("too many processes")
        started.append(ModuleProcess("tests.clusters.stub_agent", None, environment={}))
        return started[0]

    started: list[ModuleProcess] = []
    monkeypatch.setattr(local, "AgentProcess", process)
    options: Any = SimpleNamespace(devices=1, device_type="cpu")
    engine = local.LocalEngine(LocalCluster(), options, cores=1, threads=1)
    assert "too many processes" in told_by(engine)


# -- pilots --------------------------------------------------------------------------------------
