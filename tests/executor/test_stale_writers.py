"""A run that was given up, frozen say, writes late: it changes nothing."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet import Checkpoints, load_best_model
from optuna_fleet.checkpoints.folder import StudyFolder
from optuna_fleet.trainer import checkpoint
from optuna_fleet.trainer.saving import Saver
from optuna_fleet.trainer.session import Session
from tests.fleets import fleet_of, small_model, train


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def keeping(root: Path) -> Iterator[Any]:
    """A checkpoint after each epoch; the best trial leaves its weights."""
    with fleet_of(devices=2, checkpoints=Checkpoints(root, interval_s=0.0)) as executor:
        yield executor


def write_late(run: Any) -> None:
    """What a run writes that goes on when nobody expects it to any more; nothing of it is good."""
    saver = Saver(Session(None, run))
    with torch.random.fork_rng():  # the trial's own random numbers are none of its business
        nothing = {name: value * torch.nan for name, value in small_model().state_dict().items()}
    content = checkpoint.Checkpoint(
        loop=1, epoch=3, objects=[nothing], state={}, rng=[], history={0: 0.0}, modules=[0]
    )
    copy = checkpoint.captured(content)
    for position, kind in ((copy.position, ""), (copy.position, "best"), ((), "final")):
        saver._files.write(position, kind, copy)


class Stale:
    """Trains; dies in its third epoch, and in its fourth when the first run has written again."""

    def __init__(self, folder: Path) -> None:
        self.first, self.second = folder / "first", folder / "second"

    def __call__(self, trial: Any) -> float:
        own_epochs = trial.epochs

        def epochs(number: int) -> Iterator[int]:
            for epoch in own_epochs(number):
                trial._training.saver.finish()  # or the next one would be passed over
                if epoch == 2 and not self.first.exists():
                    self.first.write_bytes(pickle.dumps(trial._session.run))
                    os.kill(os.getpid(), signal.SIGKILL)
                if epoch == 3 and not self.second.exists():
                    write_late(pickle.loads(self.first.read_bytes()))
                    self.second.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if epoch == 4:
                    write_late(pickle.loads(self.first.read_bytes()))
                yield epoch

        trial.epochs = epochs
        return train(trial, epochs=6)


def test_what_a_stale_run_writes_changes_nothing(
    keeping: Any, root: Path, fleet: Any, tmp_path: Path
) -> None:
    undisturbed, study = optuna.create_study(), optuna.create_study()
    undisturbed.optimize(train, n_trials=1, executor=fleet)
    study.optimize(Stale(tmp_path), n_trials=1, executor=keeping)
    assert (tmp_path / "second").exists()
    # It may be run again on both devices.
    attributes = undisturbed.trials[0].user_attrs.items()
    right = {name: pytest.approx(values, rel=1e-10) for name, values in attributes}
    assert study.trials[0].user_attrs == right
    assert study.trials[0].intermediate_values == undisturbed.trials[0].intermediate_values
    folder = StudyFolder(root, study.study_name)
    assert set(os.listdir(folder.path)) == {"call.json", "trial-0.final.pt"}
    (state, *_) = load_best_model(study)
    assert all(value.isfinite().all() for value in state.values())


def returns_once(trial: Any) -> float:
    trial.prepare(small_model())
    for _ in trial.epochs(1):
        pass
    return float(trial.number)


def test_what_it_writes_when_its_trial_is_done_goes_with_the_next_call(
    keeping: Any, root: Path
) -> None:
    study = optuna.create_study()
    study.optimize(returns_once, n_trials=1, executor=keeping)
    folder = StudyFolder(root, study.study_name)
    for name in ("1-1.0123abcd-0.pt", "1-1.0123abcd-0.best.pt", "0123abcd-0.final.pt"):
        (folder.path / f"trial-0.{name}").touch()
    (folder.path / ".trial-0.1-1.0123abcd-0.pt.abc").touch()
    before = folder.final(0).read_bytes()
    study.optimize(returns_once, n_trials=1, executor=keeping)
    assert set(os.listdir(folder.path)) == {"call.json", "trial-0.final.pt"}
    assert folder.final(0).read_bytes() == before
