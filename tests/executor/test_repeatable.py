"""Samplers that look at no history: the same seed gives the same trials, whatever the timing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeAlias

import optuna
import pytest
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    CmaEsSampler,
    GPSampler,
    GridSampler,
    NSGAIISampler,
    PartialFixedSampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from optuna_fleet import FleetExecutor
from optuna_fleet.checkpoints.folder import StudyFolder
from optuna_fleet.events import TrialProposed
from optuna_fleet.sampler_bridge.loop import Loop
from optuna_fleet.sampler_bridge.repeatable import reseed, why_not_repeatable
from optuna_fleet.wire.calls import Call
from optuna_fleet.wire.packing import pack

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

Steps: TypeAlias = Generator[tuple[Any, ...], Any, float]
DATA = ("data",)


def conditional() -> Steps:
    """Suggests one parameter in each branch, and a further one when it already trains."""
    x = yield "suggest_float", "x", 0, 1
    kind = yield "suggest_categorical", "kind", ("a", "b")
    y = yield ("suggest_int", f"y_{kind}", 1, 100)
    yield DATA
    z = yield "suggest_float", "late", 0, 1
    return float(x + y + z)


def plain() -> Steps:
    """Asks for no data."""
    x = yield "suggest_float", "x", 0, 1
    y = yield "suggest_int", "y", 1, 100
    return float(x + y)


def on_a_grid() -> Steps:
    x = yield "suggest_int", "x", 0, 3
    yield DATA
    y = yield "suggest_categorical", "y", ("a", "b", "c")
    return float(x + len(y))


class Sweep:
    """One call on a study, whose trials take their steps in an order of chance."""

    def __init__(self, loop: Loop, objective: Callable[[], Steps], width: int) -> None:
        self._loop = loop
        self._objective = objective
        self._width = width
        self._flying: dict[int, tuple[Steps, Any]] = {}
        self._is_exhausted = False

    def run(self, chance: random.Random, *, until: int | None = None) -> None:
        """Take steps until all is done, or that many."""
        num_steps = 0
        self._propose()
        while self._flying and num_steps != until:
            self._step(chance.choice(list(self._flying)))
            self._propose(again=True)
            self._propose()
            num_steps += 1

    def _propose(self, *, again: bool = False) -> None:
        while not self._is_exhausted and len(self._flying) < self._width:
            events = self._loop.proposals.next_events(again=again)
            proposed = [event.number for event in events if isinstance(event, TrialProposed)]
            if not proposed:
                return
            self._flying[proposed[0]] = self._objective(), None

    def _step(self, number: int) -> None:
        steps, answer = self._flying.pop(number)
        try:
            wanted = steps.send(answer)
        except StopIteration as end:
            self._loop.ledger.settle(number, end.value, None)
            return
        answer = None
        if wanted == DATA:
            self._loop.proposals.note_defined(number)
        else:
            name, *args = wanted
            call = Call(
                run_id=0, index=0, rank=0, target="trial", name=name, arguments=pack((args, {}))
            )
            answer = self._loop.ledger.carry_out(number, call)
        self._flying[number] = steps, answer


def loop_of(study: optuna.Study, n_trials: int, folder: Path | None = None) -> Loop:
    return Loop(
        study,
        n_trials=n_trials,
        timeout=None,
        catch=(),
        callbacks=None,
        gc_after_trial=False,
        show_progress_bar=False,
        folder=None if folder is None else StudyFolder(folder, study.study_name),
    )


def journal(folder: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(f"{folder}/journal.log"))


def params_of(study: optuna.Study) -> list[dict[str, Any]]:
    return [trial.params for trial in study.trials]


def random_sampler() -> BaseSampler:
    return RandomSampler(seed=1)


def grid() -> BaseSampler:
    return GridSampler({"x": [0, 1, 2, 3], "y": ["a", "b", "c"]}, seed=1)


def qmc() -> BaseSampler:
    return QMCSampler(seed=1, scramble=True, warn_independent_sampling=False)


def partial() -> BaseSampler:
    return PartialFixedSampler({"x": 0.25}, qmc())


CASES = [
    (random_sampler, conditional),
    (grid, on_a_grid),
    (qmc, conditional),
    (qmc, plain),
    (partial, conditional),
]


@pytest.mark.parametrize(("new", "objective"), CASES)
def test_neither_the_devices_nor_the_timing_change_the_trials(
    new: Callable[[], BaseSampler], objective: Callable[[], Steps]
) -> None:
    found = []
    for width, order in [(1, 0), *((width, order) for width in (2, 3) for order in range(4))]:
        study = optuna.create_study(sampler=new())
        for x in (2, 3):  # two cells of the grid are left to the last
            study.enqueue_trial({"x": x, "y": "a"} if new is grid else {"x": 0.5})
        with loop_of(study, 14) as loop:
            Sweep(loop, objective, width).run(random.Random(order))
        found.append(params_of(study))
    assert len({str(params) for params in found[0]}) >= 12
    assert all(params == found[0] for params in found[1:])


@pytest.mark.parametrize(("new", "objective"), CASES)
@pytest.mark.parametrize("order", range(3))
def test_nor_does_the_death_of_the_driver(
    new: Callable[[], BaseSampler], objective: Callable[[], Steps], tmp_path: Path, order: int
) -> None:
    whole = optuna.create_study(sampler=new())
    with loop_of(whole, 12) as loop:
        Sweep(loop, objective, 1).run(random.Random(0))
    study = optuna.create_study(study_name="s", storage=journal(tmp_path), sampler=new())
    dead = loop_of(study, 12, tmp_path / "checkpoints").__enter__()
    Sweep(dead, objective, 3).run(random.Random(order), until=20)
    study = optuna.load_study(study_name="s", storage=journal(tmp_path), sampler=new())
    with loop_of(study, 12, tmp_path / "checkpoints") as loop:
        Sweep(loop, objective, 2).run(random.Random(order))
    assert params_of(study) == params_of(whole)


@pytest.mark.parametrize(("new", "objective"), CASES)
def test_nor_does_a_second_call(
    new: Callable[[], BaseSampler], objective: Callable[[], Steps]
) -> None:
    studies = [optuna.create_study(sampler=new()) for _ in range(2)]
    with loop_of(studies[0], 12) as loop:
        Sweep(loop, objective, 1).run(random.Random(0))
    for n_trials, width in ((5, 3), (7, 2)):
        with loop_of(studies[1], n_trials) as loop:
            Sweep(loop, objective, width).run(random.Random(n_trials))
    assert params_of(studies[1]) == params_of(studies[0])


def test_the_users_sampler_is_left_as_it_was() -> None:
    for new, objective in CASES:
        sampler, untouched = new(), new()
        study = optuna.create_study(sampler=sampler)
        with loop_of(study, 4) as loop:
            Sweep(loop, objective, 3).run(random.Random(0))
        assert study.sampler is sampler
        assert vars(sampler).keys() == vars(untouched).keys()
    for sampler in (RandomSampler(seed=1), RandomSampler(seed=1)):
        study = optuna.create_study(sampler=sampler)
        with loop_of(study, 4) as loop:
            Sweep(loop, plain, 3).run(random.Random(0))
    alone = [optuna.create_study(sampler=s) for s in (sampler, RandomSampler(seed=1))]
    for study in alone:
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), 3)
    assert params_of(alone[0]) == params_of(alone[1])


def test_without_a_seed_each_sweep_is_another() -> None:
    studies = [optuna.create_study(sampler=RandomSampler()) for _ in range(2)]
    for study in studies:
        with loop_of(study, 2) as loop:
            Sweep(loop, plain, 2).run(random.Random(0))
    assert params_of(studies[0]) != params_of(studies[1])


def used_without_a_fleet() -> BaseSampler:
    sampler = RandomSampler()
    optuna.create_study(sampler=sampler).optimize(lambda t: t.suggest_float("x", 0, 1), 3)
    return sampler


@pytest.mark.parametrize(
    "new",
    [
        RandomSampler,
        lambda: PartialFixedSampler({"x": 0.25}, RandomSampler()),
        lambda: QMCSampler(warn_independent_sampling=False),  # what is not in its sequence
        used_without_a_fleet,
    ],
)
@pytest.mark.parametrize("is_at_once", [False, True])
def test_studies_that_share_a_sampler_without_a_seed_have_nothing_in_common(
    new: Callable[[], BaseSampler], is_at_once: bool
) -> None:
    sampler = new()
    studies = [optuna.create_study(sampler=sampler) for _ in range(2)]
    with loop_of(studies[0], 6) as one, loop_of(studies[1], 6) as other:
        sweeps = [Sweep(loop, conditional, 2) for loop in (one, other)]
        for sweep in sweeps * is_at_once:
            sweep.run(random.Random(0), until=5)
        for sweep in sweeps:
            sweep.run(random.Random(0))
    late = [[params["late"] for params in params_of(study)] for study in studies]
    assert len({*late[0], *late[1]}) == 12


def test_a_seeded_sampler_that_has_drawn_goes_on_as_in_optuna() -> None:
    studies = []
    for executor in (None, FleetExecutor(cluster="inline")):
        sampler = RandomSampler(seed=1)
        optuna.create_study(sampler=sampler).optimize(suggests_late, 3)
        studies.append(optuna.create_study(sampler=sampler))
        studies[-1].optimize(suggests_late, 3, executor=executor)
    assert params_of(studies[0]) == params_of(studies[1])


@dataclasses.dataclass  # which can't be hashed
class OfTheUsers(BaseSampler):
    low: float = 0.25

    def infer_relative_search_space(self, *_: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, *_: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, *_: Any) -> float:
        return self.low


class Incomparable(TPESampler):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise TypeError


@pytest.mark.parametrize(
    "new", [OfTheUsers, lambda: PartialFixedSampler({"x": 0.5}, OfTheUsers()), Incomparable]
)
def test_a_sampler_need_not_be_hashable(new: Callable[[], BaseSampler]) -> None:
    studies = [optuna.create_study(sampler=new()) for _ in range(2)]
    for study in studies * 2:
        study.optimize(suggests_late, 2, executor=FleetExecutor(cluster="inline"))
    assert [len(study.trials) for study in studies] == [4, 4]


@pytest.mark.parametrize("new", [TPESampler, Incomparable])
def test_samplers_are_told_apart_though_one_has_the_memory_of_another(new: Any) -> None:
    for seed in (0, None) * 5:
        sampler = new(seed=seed)
        for _ in range(2):
            assert (why_not_repeatable(sampler) is None) == (seed is None)
            sampler.reseed_rng()
        del sampler


def suggests_late(trial: Any) -> float:
    x = trial.suggest_float("x", 0, 1)
    trial.report(x, 0)
    return float(x + trial.suggest_float("late", 0, 1))


@pytest.mark.parametrize("new", [random_sampler, qmc])
def test_four_trainers_and_none_make_the_same_trials(fleet: Any, new: Any) -> None:
    studies = [optuna.create_study(sampler=new()) for _ in range(2)]
    fleet.optimize(studies[0], suggests_late, 9)
    FleetExecutor(cluster="inline").optimize(studies[1], suggests_late, 9)
    assert params_of(studies[0]) == params_of(studies[1])


@pytest.mark.parametrize(
    ("new", "is_told"),
    [
        (lambda: TPESampler(seed=1), True),
        (lambda: GPSampler(seed=1), True),
        (lambda: CmaEsSampler(seed=1), True),
        (lambda: NSGAIISampler(seed=1), True),
        (lambda: QMCSampler(seed=1, independent_sampler=TPESampler(seed=1)), True),
        (lambda: BruteForceSampler(seed=1), True),
        (lambda: TPESampler(), False),
        (lambda: RandomSampler(seed=1), False),
    ],
)
def test_the_log_says_once_what_a_seed_does_not_repeat(
    new: Callable[[], BaseSampler], is_told: bool, log: Any
) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    study = optuna.create_study(sampler=new())
    for width in (1, 3):
        assert "its seed does not" not in log.getvalue()
        with loop_of(study, 4) as loop:
            Sweep(loop, on_a_grid, width).run(random.Random(0))
    assert log.getvalue().count("its seed does not") == is_told


@pytest.mark.parametrize("seed", [None, 0])
def test_a_resumed_sweep_tells_of_a_seed_only_if_there_was_one(seed: int | None) -> None:
    sampler = TPESampler(seed=seed)
    reseed(sampler)
    assert (why_not_repeatable(sampler) is None) == (seed is None)
