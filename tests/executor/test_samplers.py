"""Samplers asked for many trials at once get no more than they can bear."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    CmaEsSampler,
    GPSampler,
    GridSampler,
    NSGAIIISampler,
    NSGAIISampler,
    PartialFixedSampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet import FleetExecutor
from optuna_fleet.executor.call import call_handler
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.batching import reason_to_wait
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

COMPLETE, FAIL, PRUNED = TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED
RUNNING, WAITING = TrialState.RUNNING, TrialState.WAITING


# -- what can be borne ---------------------------------------------------------------------------


def trial_of(number: int, state: TrialState, **more: Any) -> FrozenTrial:
    params = more.pop("params", {})
    trial = optuna.create_trial(
        state=state,
        value=0.0 if state is COMPLETE else None,
        params=params,
        distributions=dict.fromkeys(params, FloatDistribution(0, 1)),
        **more,
    )
    trial.number = number
    return trial


def waits(
    sampler: BaseSampler,
    trials: Sequence[FrozenTrial],
    *,
    mine: Sequence[int] | None = None,
    defined: Sequence[int] = (),
    pruner: optuna.pruners.BasePruner | None = None,
) -> bool:
    if mine is None:
        mine = [t.number for t in trials if t.state is RUNNING]
    pruner = pruner or optuna.pruners.NopPruner()
    return reason_to_wait(sampler, pruner, trials, mine, defined) is not None


@pytest.mark.parametrize("kind", [RandomSampler, TPESampler, GPSampler])
def test_some_bear_any_number(kind: Any) -> None:
    assert not waits(kind(), [trial_of(n, RUNNING) for n in range(50)])


def test_the_first_of_qmc_is_alone_until_it_has_defined_the_space() -> None:
    sampler, first = QMCSampler(), trial_of(0, RUNNING, params={"x": 0.5})
    assert not waits(sampler, [])
    assert waits(sampler, [first])
    assert not waits(sampler, [first], defined=[0])
    assert not waits(sampler, [trial_of(0, RUNNING, intermediate_values={0: 1.0})])
    assert not waits(sampler, [trial_of(0, COMPLETE), trial_of(1, RUNNING)])
    assert waits(sampler, [trial_of(0, FAIL), trial_of(1, RUNNING)])


def generation(
    number: int, state: TrialState, of: int, key: str = "cma:generation"
) -> FrozenTrial:
    return trial_of(number, state, params={"x": 0.5}, system_attrs={key: of})


@pytest.mark.parametrize(
    ("new", "key"),
    [
        (lambda: CmaEsSampler(popsize=3), "cma:generation"),
        (lambda: NSGAIISampler(population_size=3), "NSGAIISampler:generation"),
        (lambda: NSGAIIISampler(population_size=3), "NSGAIIISampler:generation"),
        (lambda: PartialFixedSampler({}, CmaEsSampler(popsize=3)), "cma:generation"),
    ],
)
def test_a_generation_is_completed_first(new: Callable[[], BaseSampler], key: str) -> None:
    sampler, member = new(), functools.partial(generation, key=key)
    done = [member(0, COMPLETE, 0), member(1, COMPLETE, 0)]
    assert waits(sampler, [*done, member(2, RUNNING, 0)])
    assert waits(sampler, [*done, trial_of(2, RUNNING)])  # has not been sampled yet
    assert not waits(sampler, [*done, member(2, FAIL, 0), trial_of(3, COMPLETE)])
    last = [*done, member(2, COMPLETE, 0)]
    assert not waits(sampler, [*last, member(3, RUNNING, 1), trial_of(4, RUNNING)])
    assert waits(sampler, [*last, member(3, RUNNING, 1), *(trial_of(n, RUNNING) for n in (4, 5))])


def test_what_is_not_of_a_generation_does_not_fill_one() -> None:
    sampler = CmaEsSampler(popsize=3)
    at_random = [trial_of(n, RUNNING, params={"x": 0.1}) for n in range(5)]
    assert not waits(sampler, at_random)
    given = trial_of(9, WAITING, system_attrs={"fixed_params": {"x": 0.0}})
    full = [generation(n, RUNNING, 0) for n in range(3)]
    assert waits(sampler, full)
    assert not waits(sampler, [*full, given])
    assert waits(sampler, [*full, trial_of(9, WAITING)])
    assert not waits(sampler, full, mine=[])  # those of others may be dead
    assert not waits(sampler, full, pruner=optuna.pruners.HyperbandPruner())


def test_the_default_population_of_cma_es() -> None:
    params = dict.fromkeys("abc", 0.5)
    first = trial_of(0, COMPLETE, params=params)
    flying = [generation(n, RUNNING, 0) for n in range(1, 8)]
    assert not waits(CmaEsSampler(), flying)  # nothing is known of the space
    assert waits(CmaEsSampler(), [first, *flying])  # 4 + 3 ln 3
    assert not waits(CmaEsSampler(), [first, *flying[1:]])
    import cmaes
    import numpy as np

    for dim in range(1, 40):
        found = compat._default_popsize(
            [trial_of(0, COMPLETE, params={str(n): 0.5 for n in range(dim)})]
        )
        assert found == cmaes.CMA(mean=np.zeros(max(dim, 2)), sigma=1.0).population_size or dim < 2


def test_the_last_cells_of_a_grid() -> None:
    space = {"x": [0, 1, 2]}
    sampler = GridSampler(space)

    def cell(number: int, state: TrialState, of: int) -> FrozenTrial:
        return trial_of(number, state, system_attrs={"grid_id": of, "search_space": space})

    assert not waits(sampler, [cell(0, COMPLETE, 0), cell(1, RUNNING, 1)])
    assert waits(sampler, [cell(0, COMPLETE, 0), cell(1, RUNNING, 1), cell(2, RUNNING, 2)])
    assert not waits(sampler, [cell(0, FAIL, 0), cell(1, RUNNING, 1), cell(2, WAITING, 2)])
    assert not waits(sampler, [cell(n, COMPLETE, n) for n in range(3)])


def test_brute_force_chooses_one_path_at_a_time() -> None:
    def path(number: int, state: TrialState, **params: int) -> FrozenTrial:
        trial = optuna.create_trial(
            state=state,
            value=0.0 if state is COMPLETE else None,
            params=params,
            distributions=dict.fromkeys(params, IntDistribution(0, 1)),
        )
        trial.number = number
        return trial

    sampler = BruteForceSampler()
    assert waits(sampler, [path(0, RUNNING)])
    assert not waits(sampler, [path(0, RUNNING, x=0)])
    done = path(0, COMPLETE, x=0, y=0)
    assert waits(sampler, [done, path(1, RUNNING)])
    assert waits(sampler, [done, path(1, RUNNING, x=0)])
    assert not waits(sampler, [done, path(1, RUNNING, x=0, y=1)])
    assert waits(sampler, [done, path(1, RUNNING, x=0, y=1), path(2, RUNNING, x=1)])
    changed = [done, path(1, COMPLETE, z=0), path(2, RUNNING)]
    assert not waits(sampler, changed)


# -- real sweeps ---------------------------------------------------------------------------------


def study_of(sampler: BaseSampler) -> optuna.Study:
    return optuna.create_study(sampler=sampler)


def points(study: optuna.Study) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(sorted(t.params.items())) for t in study.trials if t.state is not WAITING)


def disturbed(trial: Any, folder: Path) -> None:
    """One trial fails, and the trainer of another is killed, once."""
    trial.report(0.0, 0)
    if trial.number == 2:
        raise ZeroDivisionError
    if trial.number == 3 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def on_a_grid(trial: Any, folder: Path) -> float:
    x, y = trial.suggest_int("x", 0, 3), trial.suggest_categorical("y", "abc")
    disturbed(trial, folder)
    return x + len(y)


def test_a_grid_to_the_last_cell(fleet: Any, tmp_path: Path) -> None:
    space = {"x": [0, 1, 2, 3], "y": ["a", "b", "c"]}
    study = study_of(GridSampler(space, seed=1))
    compat.return_to_queue(study, study.ask())
    objective = functools.partial(on_a_grid, folder=tmp_path)
    fleet.optimize(study, objective, catch=ZeroDivisionError)
    assert len(points(study)) == len(study.trials) == 12
    assert Counter(t.state for t in study.trials) == {COMPLETE: 11, FAIL: 1}


def test_a_trial_from_the_queue_ends_while_one_cell_is_left() -> None:
    study = study_of(GridSampler({"x": [0]}))
    study.enqueue_trial({"x": 5})
    FleetExecutor(cluster="inline").optimize(study, lambda trial: trial.suggest_int("x", 0, 9))
    assert [trial.params for trial in study.trials] == [{"x": 5}, {"x": 0}]


def test_what_else_the_hook_of_a_grid_raises_is_raised() -> None:
    class Grid(GridSampler):
        def after_trial(self, *_: Any) -> None:
            raise KeyError("another")

    with pytest.raises(KeyError, match="another"):
        FleetExecutor(cluster="inline").optimize(study_of(Grid({"x": [0]})), lambda _: 0.0)


def on_a_tree(trial: Any, folder: Path) -> float:
    """Eight combinations, whose parameters depend on each other."""
    if trial.suggest_categorical("kind", ["short", "long"]) == "short":
        x = trial.suggest_int("x", 1, 3)
    else:
        x = trial.suggest_int("low", trial.suggest_int("high", 1, 2), 3)
    disturbed(trial, folder)
    return float(x)


@pytest.mark.parametrize("seed", range(3))
def test_brute_force_to_the_last_combination(fleet: Any, tmp_path: Path, seed: int) -> None:
    study = study_of(BruteForceSampler(seed=seed))
    compat.return_to_queue(study, study.ask())
    objective = functools.partial(on_a_tree, folder=tmp_path)
    fleet.optimize(study, objective, catch=ZeroDivisionError)
    assert len(points(study)) == len(study.trials) == 8
    assert Counter(t.state for t in study.trials) == {COMPLETE: 7, FAIL: 1}


def test_a_users_stop_is_not_reconsidered(fleet: Any) -> None:
    study = study_of(BruteForceSampler(seed=1))

    def objective(trial: Any) -> float:
        x = float(trial.suggest_int("x", 0, 200))
        if trial.number == 2:
            trial.study.stop()
        until(lambda: trial.number <= 2 or trial.study.trials[2].state.is_finished())
        return x

    fleet.optimize(study, objective)
    assert 3 <= len(study.trials) < 20


def sphere(trial: Any) -> float:
    return sum(trial.suggest_float(name, -1, 1) ** 2 for name in "xyz")


def test_qmc_is_the_sequence_it_would_be_one_by_one(fleet: Any) -> None:
    study, alone = (study_of(QMCSampler(seed=1)) for _ in range(2))
    fleet.optimize(study, sphere, 9)
    alone.optimize(sphere, 9)
    # The first is drawn at random, from a generator of its own.
    assert [t.params for t in study.trials[1:]] == [t.params for t in alone.trials[1:]]


def generations(study: optuna.Study, key: str) -> list[int]:
    of = [t.system_attrs[key] for t in study.trials if key in t.system_attrs]
    assert sorted(of) == of
    return list(Counter(of).values())


def test_cma_es_wastes_no_trial(fleet: Any) -> None:
    study = study_of(CmaEsSampler(seed=1))
    fleet.optimize(study, sphere, 32)
    *whole, last = generations(study, "cma:generation")
    assert set(whole) == {7}
    assert last <= 7
    study = study_of(CmaEsSampler(seed=1, popsize=4))  # as wide as the fleet
    fleet.optimize(study, sphere, 16)
    assert set(generations(study, "cma:generation")[:-1]) == {4}


@pytest.mark.parametrize("kind", [NSGAIISampler, NSGAIIISampler])
def test_whole_generations_of_two_objectives(fleet: Any, kind: Any) -> None:
    study = optuna.create_study(
        directions=["minimize", "maximize"], sampler=kind(population_size=6, seed=1)
    )
    fleet.optimize(study, lambda trial: (sphere(trial), trial.params["x"]), 20)
    assert generations(study, f"{kind.__name__}:generation") == [6, 6, 6, 2]


@pytest.mark.parametrize("kind", [TPESampler, GPSampler])
def test_no_point_is_proposed_twice(fleet: Any, kind: Any) -> None:
    study = study_of(kind(seed=1, n_startup_trials=4))
    fleet.optimize(study, sphere, 12)
    assert len(points(study)) == 12
    assert {t.state for t in study.trials} == {COMPLETE}


class Watching(RandomSampler):
    """Looks at the trials as Optuna's samplers do: through the cache of a trial's duration."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.seen: list[dict[str, Any]] = []

    def sample_independent(self, study: Any, trial: Any, *args: Any) -> Any:
        trials = study._get_trials(deepcopy=False, use_cache=True)
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


def test_tpe_lies_about_trials_under_way_by_default() -> None:
    assert TPESampler()._constant_liar


def test_the_user_is_told_once_why_devices_wait(fleet: Any, log: Any) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    fleet.optimize(study_of(NSGAIISampler(seed=1, population_size=3)), sphere, 9)
    line = "NSGAIISampler: a generation of 3 trials is completed before the next one begins."
    assert log.getvalue().count(line) == 1


# -- a slow sampler ------------------------------------------------------------------------------


@pytest.fixture
def every_sampler_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second suggestion on."""
    monkeypatch.setattr(call_handler, "_SLOW_S", -1.0)


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
    study = study_of(sampler)
    fleet.optimize(study, sphere, 8, catch=FloatingPointError)
    assert [t.state for t in study.trials] == 4 * [COMPLETE, FAIL]
    assert len(sampler.threads) == 8  # not once more to raise it


@pytest.mark.usefixtures("every_sampler_is_slow")
def test_ctrl_c_while_the_sampler_thinks(fleet: Any) -> None:
    def think(study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number == 5:
            os.kill(os.getpid(), signal.SIGINT)

    study = study_of(Thoughtful(think))
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

    study = study_of(Thoughtful(think))
    fleet.optimize(study, with_pid, 8)
    assert {t.state for t in study.trials} == {COMPLETE}
    assert study.trials[2].user_attrs["pid"] not in killed


@pytest.mark.usefixtures("every_sampler_is_slow")
def test_thinking_changes_no_proposal() -> None:
    study, alone = (study_of(TPESampler(seed=3, n_startup_trials=3)) for _ in range(2))
    for each in (study, alone):
        each.enqueue_trial({"x": 0.5})
    alone.optimize(sphere, 12)
    with FleetExecutor(devices=1) as narrow:
        narrow.optimize(study, sphere, 12)
    assert [t.params for t in study.trials] == [t.params for t in alone.trials]
