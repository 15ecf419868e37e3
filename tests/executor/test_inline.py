"""cluster="inline": the same trials in the calling process."""

from __future__ import annotations

import os
import subprocess
import threading
from typing import Any

import optuna
import pytest
import torch
import torch.distributed as dist

from optuna_fleet import FleetConfigError, FleetExecutor, LaunchError
from optuna_fleet.executor.cluster import devices
from optuna_fleet.executor.cluster.engine import Engine
from optuna_fleet.sampler_bridge.records import device_spans_of
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation
from tests.fleets import Leg, run, small_pipeline, train


def test_gives_the_same_losses_as_a_trainer(fleet: Any) -> None:
    study = optuna.create_study()
    study.optimize(train, n_trials=1, executor=FleetExecutor(small_pipeline(), cluster="inline"))
    assert study.trials[0].user_attrs == run(fleet, train, Leg((0,))).user_attrs


def test_exceptions_arrive_as_they_were_raised() -> None:
    raised = ValueError("here")

    def objective(trial: optuna.Trial) -> float:
        trial.suggest_float("x", 0, 1)
        raise raised

    study = optuna.create_study()
    with pytest.raises(ValueError, match="here") as caught:
        study.optimize(objective, n_trials=3, executor=FleetExecutor(cluster="inline"))
    assert caught.value is raised
    assert [t.state.name for t in study.trials] == ["FAIL"]


def reduce_at_once(trial: Any) -> float:
    value = torch.tensor([trial.suggest_float("x", 1, 2)])
    dist.all_reduce(value)
    return float(value)


@pytest.mark.parametrize("has_own", [False, True])
def test_collectives_work_from_the_first_line_on_and_a_group_of_ones_own_stays(
    has_own: bool,
) -> None:
    if has_own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD if has_own else None
        study = optuna.create_study()
        study.optimize(reduce_at_once, n_trials=2, executor=FleetExecutor(cluster="inline"))
        assert [t.value for t in study.trials] == pytest.approx(
            [t.params["x"] for t in study.trials]
        )
        assert dist.is_initialized() == has_own
        assert not has_own or dist.group.WORLD is group
    finally:
        if has_own:
            dist.destroy_process_group()


def test_loops_over_epochs_within_each_other_are_refused() -> None:
    """A trial that was run again left them both after the inner one."""
    trained: list[tuple[int, int]] = []

    def objective(trial: Any) -> float:
        for fold in trial.epochs(3):
            trained.extend((fold, epoch) for epoch in trial.epochs(2))
        return 0.0

    study = optuna.create_study()
    with pytest.raises(FleetConfigError, match="has another one in it"):
        study.optimize(objective, n_trials=1, executor=FleetExecutor(cluster="inline"))
    assert trained == [(0, 0), (0, 1)]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_is_no_exception_leaves_no_running_trial(kind: type[BaseException]) -> None:
    def objective(trial: optuna.Trial) -> float:
        trial.suggest_float("x", 0, 1)
        raise kind

    study = optuna.create_study()
    fleet = FleetExecutor(cluster="inline")
    with pytest.raises(kind):
        study.optimize(objective, n_trials=3, catch=(Exception,), executor=fleet)
    assert [t.state.name for t in study.trials] == ["FAIL"]
    assert [span.end is None for span in device_spans_of(study)] == [False]
    study.optimize(lambda trial: 1.0, n_trials=1, executor=fleet)
    assert [t.state.name for t in study.trials] == ["FAIL", "COMPLETE"]


def test_a_sampler_is_asked_on_the_callers_thread_and_its_errors_come_with_its_own_frames() -> (
    None
):
    """For a debugger that looks at what went wrong."""
    threads: set[int] = set()

    class Broken(optuna.samplers.RandomSampler):
        def sample_independent(self, *_: Any) -> Any:
            threads.add(threading.get_ident())
            raise OSError("no dice")  # which is also how a channel that breaks says so

    study = optuna.create_study(sampler=Broken())
    with pytest.raises(OSError, match="no dice") as caught:
        study.optimize(
            lambda trial: trial.suggest_float("x", 0, 1),
            n_trials=1,
            executor=FleetExecutor(cluster="inline"),
        )
    assert caught.traceback[-1].name == "sample_independent"
    assert threads == {threading.get_ident()}


# -- what it is to the executor ------------------------------------------------------------------


def test_starts_no_process_and_looks_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(devices, "_gpu_names", lambda _: started.append("a look for GPUs") or [])
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **_: started.append(args))
    monkeypatch.setattr(os, "fork", lambda: started.append("a fork"))
    study = optuna.create_study()
    study.optimize(lambda _: 0.0, n_trials=1, executor=FleetExecutor(cluster="inline"))
    assert (started, study.best_value) == ([], 0.0)


def test_runs_where_agents_can_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(FleetConfigError, match=r"needs Linux 5\.3 .*cluster='inline' runs every"):
        FleetExecutor(cluster="local")
    FleetExecutor(cluster="inline").optimize(optuna.create_study(), lambda _: 0.0, n_trials=1)


class PlacesNone(Engine):
    """An engine of the user's own, which can't place agents."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def open(self, invitation: Invitation, inbox: Inbox) -> None:
        self.asked.append("open")
        inbox.put(LaunchError("there is no room"))

    def close(self) -> None:
        self.asked.append("close")


def test_an_engine_of_ones_own_opens_and_closes_and_tells_what_is_wrong() -> None:
    engine = PlacesNone()
    study = optuna.create_study()
    with FleetExecutor(cluster=engine) as executor:
        for _ in range(2):
            with pytest.raises(LaunchError, match="there is no room"):
                study.optimize(lambda _: 0.0, n_trials=1, executor=executor)
    assert engine.asked == ["open", "close"] * 2
