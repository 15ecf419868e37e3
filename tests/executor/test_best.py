"""A trial's best value, and the weights behind it: the same wherever the trial was meanwhile."""

from __future__ import annotations

import functools
import io
import math
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet import Checkpoints, FleetConfigError, FleetExecutor, load_best_model
from optuna_fleet.checkpoints.folder import StudyFolder
from optuna_fleet.exceptions import TrialError
from tests.fleets import Leg, fleet_of, small_model, small_pipeline

VALUES = [math.nan, 0.75, 0.25, 0.5, 0.375, 0.625, 0.125]
ALONE, ON_THREE = [Leg((0,))], [Leg((0, 1, 2))]
MOVED_TWICE = [Leg((0,), 2), Leg((1, 2), 4), Leg((0,))]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def keeping(root: Path) -> Iterator[Any]:
    """Three CPU slots; a checkpoint after each epoch; the best trial leaves its weights."""
    with fleet_of(devices=3, checkpoints=Checkpoints(root, interval_s=0.0)) as executor:
        yield executor


def fly(fleet: Any, objective: Any, legs: Sequence[Leg] | None, direction: str) -> optuna.Study:
    study = optuna.create_study(direction=direction)
    fleet.script = None if legs is None else {0: legs}
    study.optimize(objective, n_trials=1, executor=fleet)
    return study


# -- the value -----------------------------------------------------------------------------------


def lives_once(trial: Any, flag: Path, *, until: bool) -> None:
    """Have each epoch checkpointed, and die once: in that of which `until` is true."""
    trial._training.saver.finish()  # or the next checkpoint would be passed over
    if until and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def stops_early(trial: Any, values: Sequence[float] = VALUES, dies: Path | None = None) -> Any:
    model = small_model()
    trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = trial.state.setdefault("seen", [])
    for epoch in trial.epochs(len(values)):
        seen.append(trial.best_value)
        trial.report(values[epoch], epoch)
        if dies is not None:
            lives_once(trial, dies, until=epoch == 2)
        if trial.should_stop(patience=3):
            break
    trial.set_user_attr("seen", seen)
    return trial.sum(trial.best_value) / trial.world_size


SEEN = [None, None, 0.75, 0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    ("legs", "direction"),
    [(ALONE, "minimize"), (ON_THREE, "maximize"), (MOVED_TWICE, "minimize")],
)
def test_the_best_value_and_early_stopping_survive_moves(
    keeping: Any, legs: Sequence[Leg], direction: str
) -> None:
    sign = 1.0 if direction == "minimize" else -1.0
    objective = functools.partial(stops_early, values=[sign * value for value in VALUES])
    (trial,) = fly(keeping, objective, legs, direction).trials
    assert trial.user_attrs["seen"] == [value and sign * value for value in SEEN]
    assert trial.value == sign * 0.25


def test_what_was_reported_in_an_epoch_that_is_repeated_does_not_count_yet(
    keeping: Any, tmp_path: Path
) -> None:
    objective = functools.partial(stops_early, dies=tmp_path / "died")
    (trial,) = fly(keeping, objective, None, "minimize").trials
    assert (tmp_path / "died").exists()
    assert (trial.user_attrs["seen"], trial.value) == (SEEN, 0.25)


def test_inline_too() -> None:
    inline = FleetExecutor(small_pipeline(), cluster="inline")
    (trial,) = fly(inline, stops_early, None, "minimize").trials
    assert (trial.user_attrs["seen"], trial.value) == (SEEN, 0.25)


def reports_nothing(trial: Any) -> bool:
    assert trial.best_value is None
    return trial.should_stop(patience=2)  # type: ignore[no-any-return]


def has_no_patience(trial: Any) -> bool:
    trial.report(1.0, 0)
    return trial.should_stop(patience=0)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("objective", "directions", "error", "words"),
    [
        (reports_nothing, 1, TrialError, r"call trial.report\(value, step\) first"),
        (has_no_patience, 1, FleetConfigError, "`patience` is 0, but must be"),
        (reports_nothing, 2, NotImplementedError, "best_value is not supported for multi"),
        (lambda trial: trial.should_stop(1), 2, NotImplementedError, "should_stop is not supp"),
    ],
)
def test_what_can_not_be_told_is_refused(
    objective: Any, directions: int, error: type[Exception], words: str
) -> None:
    study = optuna.create_study(directions=["minimize"] * directions)
    with pytest.raises(error, match=words):
        study.optimize(objective, n_trials=1, executor=FleetExecutor(cluster="inline"))


# -- its weights ---------------------------------------------------------------------------------


def returns(trial: Any, what: str, dies: Path | None = None, *, spoils: bool = False) -> Any:
    """Weights that tell the epoch."""
    model = small_model()
    model, _ = trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in trial.epochs(len(VALUES) - 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(epoch)
        trial.report(VALUES[epoch], epoch)
        if dies is not None:
            lives_once(trial, dies, until=epoch == 4)
    if spoils:
        for path in Path(trial._session.run.folder).glob("*.best.pt"):
            os.truncate(path, 100)
    return {"best": trial.best_value, "last": VALUES[epoch], "other": 1.0}[what]


def weights_of(study: optuna.Study) -> set[float]:
    model = load_best_model(study, small_model())
    return {value for p in model.parameters() for value in p.flatten().tolist()}


def left_by(root: Path, study: optuna.Study) -> set[str]:
    return set(os.listdir(StudyFolder(root, study.study_name).path)) - {"call.json"}


@pytest.mark.parametrize(
    ("legs", "what"),
    [
        *((ON_THREE, "best"), (MOVED_TWICE, "best"), (ALONE, "last"), (MOVED_TWICE, "other")),
    ],
)
def test_the_weights_left_are_those_behind_the_value(
    keeping: Any, root: Path, legs: Sequence[Leg], what: str
) -> None:
    study = fly(keeping, functools.partial(returns, what=what), legs, "minimize")
    assert weights_of(study) == {2.0 if what == "best" else 5.0}
    assert len(load_best_model(study)) == 2  # the module's state and the optimizer's
    assert left_by(root, study) == {"trial-0.final.pt"}


@pytest.mark.parametrize(("spoils", "epoch"), [(False, 2.0), (True, 5.0)])
def test_they_survive_a_kill_and_the_last_are_left_where_they_did_not(
    keeping: Any, root: Path, tmp_path: Path, log: io.StringIO, spoils: bool, epoch: float
) -> None:
    died = tmp_path / "died"
    objective = functools.partial(returns, what="best", dies=died, spoils=spoils)
    study = fly(keeping, objective, None, "minimize")
    assert died.exists()
    assert weights_of(study) == {epoch}
    assert left_by(root, study) == {"trial-0.final.pt"}
    assert log.getvalue().count("its final checkpoint has its last weights") == spoils


def reports_and_is_pruned(trial: Any) -> Any:
    trial.prepare(small_model())
    for epoch in trial.epochs(2):
        trial.report(VALUES[epoch + 1], epoch)
    raise optuna.TrialPruned


def test_a_pruned_trial_leaves_nothing(keeping: Any, root: Path) -> None:
    study = fly(keeping, reports_and_is_pruned, None, "minimize")
    assert left_by(root, study) == set()


def reports_before_it_prepares(trial: Any) -> Any:
    trial.report(0.5, 0)
    model = trial.prepare(torch.nn.Linear(1, 1))
    for epoch in trial.epochs(1):
        torch.nn.init.constant_(model.weight, 7.0)
        trial.report(0.75, epoch + 1)
    return trial.best_value


def test_a_value_from_before_any_weights_leaves_the_last(keeping: Any) -> None:
    study = fly(keeping, reports_before_it_prepares, ON_THREE, "minimize")
    assert load_best_model(study, torch.nn.Linear(1, 1)).weight.item() == 7.0
