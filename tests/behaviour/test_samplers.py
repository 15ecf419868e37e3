"""What samplers are asked for, and what a seed repeats, with several trials under way."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    CmaEsSampler,
    GridSampler,
    NSGAIISampler,
    PartialFixedSampler,
    RandomSampler,
    TPESampler,
)
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet import FleetExecutor
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

COMPLETE, FAIL, RUNNING, WAITING = (
    TrialState.COMPLETE,
    TrialState.FAIL,
    TrialState.RUNNING,
    TrialState.WAITING,
)
GRID = {"x": [0, 1, 2, 3], "y": ["a", "b", "c"]}


def sphere(trial: Any) -> float:
    return sum(trial.suggest_float(name, -1, 1) ** 2 for name in "xyz")


def params_of(study: optuna.Study) -> list[dict[str, Any]]:
    return [trial.params for trial in study.trials]


def points(study: optuna.Study) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(sorted(t.params.items())) for t in study.trials if t.state is not WAITING)


# -- what a seed repeats -------------------------------------------------------------------------


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize(
    "new",
    [
        lambda: TPESampler(seed=1, n_startup_trials=3),
        lambda: CmaEsSampler(seed=1, popsize=4),
        lambda: NSGAIISampler(seed=1, population_size=4),
        lambda: PartialFixedSampler({"x": 0.25}, RandomSampler(seed=1)),
    ],
)
def test_one_device_gives_the_same_study_as_optuna(
    narrow: FleetExecutor, request: Any, new: Callable[[], BaseSampler], is_slow: bool
) -> None:
    if is_slow:
        request.getfixturevalue("every_sampler_is_slow")
    ours, theirs = (optuna.create_study(sampler=new()) for _ in range(2))
    for study in (ours, theirs):
        study.enqueue_trial({"y": 0.5})
    ours.optimize(sphere, n_trials=10, executor=narrow)
    theirs.optimize(sphere, n_trials=10)
    assert params_of(ours) == params_of(theirs)
    assert [trial.values for trial in ours.trials] == [trial.values for trial in theirs.trials]


def suggests_late(trial: Any) -> float:
    """One parameter in each branch, and a further one when others have begun."""
    kind = trial.suggest_categorical("kind", ["a", "b"])
    x = trial.suggest_float(f"x_{kind}", 0, 1)
    trial.report(x, 0)
    return float(x + trial.suggest_float("late", 0, 1))


def on_a_grid(trial: Any) -> float:
    return trial.suggest_int("x", 0, 3) + len(trial.suggest_categorical("y", "abc"))


@pytest.mark.parametrize(
    ("new", "objective"),
    [
        (lambda: RandomSampler(seed=1), suggests_late),
        (lambda: GridSampler(GRID, seed=1), on_a_grid),
    ],
)
def test_neither_the_devices_nor_the_timing_change_the_trials(
    fleet: Any, narrow: FleetExecutor, new: Callable[[], BaseSampler], objective: Any
) -> None:
    found = []
    for executor in (fleet, narrow, FleetExecutor(cluster="inline"), fleet):
        study = optuna.create_study(sampler=(sampler := new()))
        study.optimize(objective, 11, executor=executor)
        assert study.sampler is sampler
        found.append(params_of(study))
    assert len({str(params) for params in found[0]}) == 11
    assert all(params == found[0] for params in found[1:])


@pytest.mark.parametrize("seed", [None, 1])
def test_calls_that_share_a_random_sampler_have_nothing_in_common(seed: int | None) -> None:
    sampler, inline = RandomSampler(seed=seed), FleetExecutor(cluster="inline")
    studies = [optuna.create_study(sampler=sampler) for _ in range(2)]
    for study in studies * 2:
        study.optimize(suggests_late, 3, executor=inline)
    late = [trial.params["late"] for study in studies for trial in study.trials]
    assert len(set(late)) == 12


@dataclasses.dataclass  # which can't be hashed
class OfTheUsers(BaseSampler):
    low: float = 0.25

    def infer_relative_search_space(self, *_: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, *_: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, *_: Any) -> float:
        return self.low


def test_a_sampler_of_the_users_own_and_one_that_a_callback_chooses(fleet: Any) -> None:
    study, other = optuna.create_study(sampler=OfTheUsers()), TPESampler()
    study.optimize(sphere, 6, executor=fleet)
    assert params_of(study) == 6 * [{"x": 0.25, "y": 0.25, "z": 0.25}]

    def choose(study: optuna.Study, trial: FrozenTrial) -> None:
        study.sampler = other

    study.optimize(sphere, 3, callbacks=[choose], executor=fleet)
    assert study.sampler is other


# -- samplers that come to an end ----------------------------------------------------------------


def disturbed(trial: Any, suggests: Callable[[Any], float], folder: Path) -> float:
    """One trial fails, and the trainer of another is killed, once."""
    value = suggests(trial)
    trial.report(0.0, 0)
    if trial.number == 2:
        raise ZeroDivisionError
    if trial.number == 3 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def test_a_trial_from_the_queue_ends_while_one_cell_is_left() -> None:
    study = optuna.create_study(sampler=GridSampler({"x": [0]}))
    study.enqueue_trial({"x": 5})
    FleetExecutor(cluster="inline").optimize(study, lambda trial: trial.suggest_int("x", 0, 9))
    assert params_of(study) == [{"x": 5}, {"x": 0}]


def test_what_else_the_hook_of_a_grid_raises_is_raised() -> None:
    class Grid(GridSampler):
        def after_trial(self, *_: Any) -> None:
            raise KeyError("another")

    study = optuna.create_study(sampler=Grid({"x": [0]}))
    with pytest.raises(KeyError, match="another"):
        FleetExecutor(cluster="inline").optimize(study, lambda _: 0.0)


def on_a_tree(trial: Any) -> float:
    """Eight combinations, whose parameters depend on each other."""
    if trial.suggest_categorical("kind", ["short", "long"]) == "short":
        return float(trial.suggest_int("x", 1, 3))
    return float(trial.suggest_int("low", trial.suggest_int("high", 1, 2), 3))


@pytest.mark.parametrize(
    ("new", "suggests", "number", "twice"),
    [
        (lambda: GridSampler(GRID, seed=1), on_a_grid, 12, 0),
        (
            lambda: BruteForceSampler(seed=0),
            on_a_tree,
            8,
            3,
        ),  # each device's last but one may be twice
    ],
)
def test_each_cell_or_combination_to_the_last_whatever_happens(
    fleet: Any, tmp_path: Path, new: Any, suggests: Any, number: int, twice: int
) -> None:
    study = optuna.create_study(sampler=new())
    objective = functools.partial(disturbed, suggests=suggests, folder=tmp_path)
    fleet.optimize(study, objective, catch=ZeroDivisionError)
    assert len(points(study)) == number
    assert number <= len(study.trials) <= number + twice
    assert Counter(t.state for t in study.trials) == {COMPLETE: len(study.trials) - 1, FAIL: 1}


def test_a_users_stop_is_not_reconsidered(fleet: Any) -> None:
    study = optuna.create_study(sampler=BruteForceSampler(seed=1))

    def objective(trial: Any) -> float:
        x = float(trial.suggest_int("x", 0, 200))
        if trial.number == 2:
            trial.study.stop()
        until(lambda: trial.number <= 2 or trial.study.trials[2].state.is_finished())
        return x

    fleet.optimize(study, objective)
    assert 3 <= len(study.trials) < 20


# -- samplers that learn -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [NSGAIISampler, TPESampler])
def test_samplers_learn_from_trials_that_overlap(fleet: Any, kind: Any) -> None:
    study = optuna.create_study(sampler=kind(seed=1))
    fleet.optimize(study, sphere, 20)
    assert len(points(study)) == 20
    assert {trial.state for trial in study.trials} == {COMPLETE}


class Watching(RandomSampler):
    """Looks at the trials as Optuna's samplers do: through the cache of a trial's duration."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.seen: list[dict[str, Any]] = []

    def sample_independent(self, study: Any, trial: Any, *args: Any) -> Any:
        cached = operator.methodcaller("_get_trials", deepcopy=False, use_cache=True)
        trials = cached(study)
        self.seen += [dict(t.params) for t in trials if t.number != trial.number]
        return super().sample_independent(study, trial, *args)


def one_after_the_other(trial: Any, folder: Path) -> float:
    until(lambda: len(trial.study.trials) == 2)
    if trial.number == 1:
        until((folder / "suggested").exists)
    x = float(trial.suggest_float("x", 0, 1))
    if trial.number == 0:
        (folder / "suggested").touch()
        until(lambda: trial.study.trials[1].params)
    return x


def test_a_sampler_sees_what_trials_under_way_have_suggested(fleet: Any, tmp_path: Path) -> None:
    sampler = Watching()
    study = optuna.create_study(sampler=sampler, storage=f"sqlite:///{tmp_path}/study.db")
    fleet.optimize(study, functools.partial(one_after_the_other, folder=tmp_path), 2)
    assert sampler.seen == [{}, study.trials[0].params]


# -- a slow sampler ------------------------------------------------------------------------------


@pytest.fixture
def every_sampler_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second suggestion on."""
    monkeypatch.setattr("optuna_fleet.executor.call.call_handler._SLOW_S", -1.0)


class Thoughtful(RandomSampler):
    """Calls `think` whenever it is to propose the parameters of a trial."""

    def __init__(self, think: Callable[[optuna.Study, FrozenTrial], None]) -> None:
        super().__init__(seed=1)
        self._think = think
        self.threads: list[str] = []
        self._alone = threading.Lock()

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, space: Any) -> Any:
        assert self._alone.acquire(blocking=False)
        self.threads.append(threading.current_thread().name.partition("_")[0])
        try:
            self._think(study, trial)
        finally:
            self._alone.release()
        return {}


class Notify(optuna.pruners.NopPruner):
    def __init__(self) -> None:
        self.asked = threading.Event()

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        if trial.number == 0:
            self.asked.set()
        return False


def report_late(trial: Any, folder: Path) -> float:
    """Trial 0 is sampled first, and reports once the sampler thinks for another one."""
    if trial.number > 0:
        until((folder / "sampled").exists)
    x = float(trial.suggest_float("x", 0, 1))
    if trial.number == 0:
        (folder / "sampled").touch()
        until((folder / "thinking").exists)
    trial.report(x, 0)
    return x + trial.should_prune()


@pytest.mark.usefixtures("every_sampler_is_slow")
def test_reports_go_on_while_the_sampler_thinks(fleet: Any, tmp_path: Path) -> None:
    pruner = Notify()

    def think(study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number == 1:
            (tmp_path / "thinking").touch()
            assert pruner.asked.wait(240)

    sampler = Thoughtful(think)
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    fleet.optimize(study, functools.partial(report_late, folder=tmp_path), 8)
    assert {t.state for t in study.trials} == {COMPLETE}
    assert sampler.threads == ["MainThread"] + 7 * ["optuna-fleet-sampler"]
    assert not any("optuna-fleet-sampler" in t.name for t in threading.enumerate())


@pytest.mark.usefixtures("every_sampler_is_slow")
def test_what_a_thinking_sampler_raises_reaches_the_trial(fleet: Any) -> None:
    def think(study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number % 2:
            raise FloatingPointError(f"for {trial.number}")

    sampler = Thoughtful(think)
    study = optuna.create_study(sampler=sampler)
    fleet.optimize(study, sphere, 8, catch=FloatingPointError)
    assert [t.state for t in study.trials] == 4 * [COMPLETE, FAIL]
    assert len(sampler.threads) == 8  # not once more to raise it


@pytest.mark.usefixtures("every_sampler_is_slow")
def test_ctrl_c_while_the_sampler_thinks(fleet: Any) -> None:
    def think(study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number == 5:
            os.kill(os.getpid(), signal.SIGINT)

    study = optuna.create_study(sampler=Thoughtful(think))
    with pytest.raises(KeyboardInterrupt):
        fleet.optimize(study, sphere, 500)
    assert {RUNNING, WAITING}.isdisjoint({t.state for t in study.trials if t.params})
    assert not any("optuna-fleet-sampler" in t.name for t in threading.enumerate())


def with_pid(trial: Any) -> float:
    trial.set_user_attr("pid", os.getpid())
    return sphere(trial)


@pytest.mark.usefixtures("every_sampler_is_slow")
def test_a_trainer_killed_while_the_sampler_thinks_for_its_trial(fleet: Any) -> None:
    killed: list[int] = []

    def think(study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number == 2 and not killed:
            killed.append(study.trials[2].user_attrs["pid"])
            os.kill(killed[0], signal.SIGKILL)

    study = optuna.create_study(sampler=Thoughtful(think))
    fleet.optimize(study, with_pid, 8)
    assert {t.state for t in study.trials} == {COMPLETE}
    assert study.trials[2].user_attrs["pid"] not in killed
