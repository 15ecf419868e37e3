"""Checkpoints as users meet them: kept, loaded, listed; and disks that fail."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import ANY

import optuna
import pytest
import torch

from optuna_fleet import CheckpointError, Checkpoints, FleetConfigError, load_best_model
from optuna_fleet.checkpoints import store as checkpoint_store
from optuna_fleet.checkpoints.file import Owner
from optuna_fleet.checkpoints.folder import CallRecord, FileName, StudyFolder, newest_first
from optuna_fleet.events import MoveRefused
from optuna_fleet.sampler_bridge.retention import CheckpointRetention
from optuna_fleet.trainer import checkpoint
from tests.fleets import Leg, fleet_of, small_model, train, write_checkpoint


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def keeping(root: Path) -> Iterator[Any]:
    """Two CPU slots; the best two trials leave checkpoints; one is made after each epoch."""
    options = {"checkpoints": Checkpoints(root, interval_s=0.0, keep=2)}
    with fleet_of(devices=2, **options) as executor:
        yield executor


def kept(root: Path, study: optuna.Study) -> set[str]:
    return set(os.listdir(StudyFolder(root, study.study_name).path)) - {"call.json"}


# -- the best model ------------------------------------------------------------------------------


def valued(trial: Any, values: list[float | None]) -> float:
    """Weights that tell the trial's number, whatever they were."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = trial.prepare(model, optimizer)
    for _ in trial.epochs(2):
        pass
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(trial.number)
    value = values[trial.number]
    if value is None:
        raise optuna.TrialPruned
    return value


def test_the_best_trials_leave_their_weights(keeping: Any, root: Path) -> None:
    study = optuna.create_study(direction="maximize")
    objective = functools.partial(valued, values=[0.1, None, 0.9, 0.3, float("nan"), 0.5])
    study.optimize(objective, n_trials=6, executor=keeping)
    assert kept(root, study) == {"trial-2.final.pt", "trial-5.final.pt"}
    model = load_best_model(study, small_model())
    assert {value.item() for p in model.parameters() for value in p.flatten()} == {2.0}
    states = load_best_model(study, trial=5)
    assert len(states) == 2  # the module's and the optimizer's
    assert set(states[0]["0.weight"].flatten().tolist()) == {5.0}
    modes = {path.stat().st_mode for path in root.rglob("*") if path.is_file()}
    assert {stat.S_IMODE(mode) for mode in modes} == {0o600}


def test_what_left_no_weights_is_explained(keeping: Any, root: Path, tmp_path: Path) -> None:
    study = optuna.create_study()
    study.optimize(functools.partial(valued, values=[3.0, 1.0, 2.0]), n_trials=3, executor=keeping)
    with pytest.raises(FleetConfigError, match=r"Trial 0 has no checkpoint.*Checkpoints\(keep="):
        load_best_model(study, trial=0)
    for number in (-1, 3):
        with pytest.raises(FleetConfigError, match=f"`trial` is {number}, but the study has 3"):
            load_best_model(study, trial=number)
    with pytest.raises(FleetConfigError, match="`folder=`"):
        load_best_model(study, folder=tmp_path)
    with pytest.raises(RuntimeError, match="state_dict"):
        load_best_model(study, torch.nn.Linear(1, 1))
    flip(StudyFolder(root, study.study_name).final(1))
    with pytest.raises(CheckpointError, match="corrupt"):
        load_best_model(study)
    plain = optuna.create_study()
    plain.optimize(lambda trial: 1.0, n_trials=1)
    with pytest.raises(FleetConfigError, match="ran without a folder"):
        load_best_model(plain)


def averages(trial: Any) -> float:
    model = small_model()
    ema = torch.optim.swa_utils.AveragedModel(model)
    twin = small_model()
    if trial.number == 0:
        trial.prepare(ema, model)
    else:
        trial.prepare(model, twin, ema=ema)
    for _ in trial.epochs(1):
        pass
    with torch.no_grad():
        for thing, value in ((model, 1.0), (twin, 2.0), (ema, 3.0)):
            for parameter in thing.parameters():
                parameter.fill_(value)
    return float(trial.number)


def weights_of(model: Any) -> set[float]:
    return {value.item() for p in model.parameters() for value in p.flatten()}


def test_which_of_several_modules_is_meant_is_said(keeping: Any) -> None:
    study = optuna.create_study()
    study.optimize(averages, n_trials=2, executor=keeping)

    def averaged() -> Any:
        return torch.optim.swa_utils.AveragedModel(small_model())

    # By the names of their types, where they have no others.
    kind = type(small_model()).__name__
    assert weights_of(load_best_model(study, small_model(), name=kind)) == {1.0}
    assert weights_of(load_best_model(study, averaged(), name="AveragedModel")) == {3.0}
    with pytest.raises(FleetConfigError, match=r"2 modules \(`AveragedModel`, `.*name="):
        load_best_model(study, small_model())
    with pytest.raises(FleetConfigError, match="no object of that name: `AveragedModel`, "):
        load_best_model(study, averaged(), name="ema")
    # By those that they were prepared under, where they have them.
    assert weights_of(load_best_model(study, averaged(), name="ema", trial=1)) == {3.0}
    assert "n_averaged" in load_best_model(study, name="ema", trial=1)
    with pytest.raises(FleetConfigError, match="several objects of that name"):
        load_best_model(study, small_model(), name=kind, trial=1)


def compiles(trial: Any) -> float:
    model = trial.prepare(torch.compile(small_model(), backend="eager"))
    for _ in trial.epochs(2):
        for images, _ in trial.batches("train", batch_size=41):
            model(images)
    total = sum(parameter.sum() for parameter in model.parameters())
    trial.set_user_attr("total", total.item())
    return 0.0


def test_a_compiled_models_weights_fit_any(keeping: Any) -> None:
    study = optuna.create_study()
    study.optimize(compiles, n_trials=1, executor=keeping)
    assert list(load_best_model(study)[0]) == list(small_model().state_dict())
    for model in (small_model(), torch.compile(small_model(), backend="eager")):
        loaded = load_best_model(study, model)
        total = sum(parameter.sum() for parameter in loaded.parameters())
        assert total.item() == study.best_trial.user_attrs["total"]


def unfinished(folder: StudyFolder, number: int, epoch: int, **more: Any) -> Path:
    """Where a run writes its checkpoint."""
    run = {"run": "0123abcd-1"} | more
    return folder.at(FileName(trial=number, position=(1, epoch), **run))


def leave(
    retention: CheckpointRetention, study: optuna.Study, values: list[float], size: int = 0
) -> None:
    """A trial that has just been told, and the checkpoint that it has left."""
    trial, folder, run = study.ask(), retention.folder, "0123abcd-1"
    folder.path.mkdir(exist_ok=True)
    folder.at(FileName(trial=trial.number, run=run, kind="final")).write_bytes(bytes(size))
    retention.left(trial.number, run)
    study.tell(trial, values)


def test_the_pareto_front_keeps_its_weights(root: Path) -> None:
    study = optuna.create_study(directions=["minimize", "maximize"])
    folder = StudyFolder(root, study.study_name)
    retention = CheckpointRetention(study, folder, 2)
    assert retention.is_among_best([1.0, 1.0])
    for number, values in enumerate([[1, 1], [2, 5], [3, 2], [9, 4]]):
        leave(retention, study, values)
        retention.settled(number)
    assert folder.finals() == {0, 1}


def test_the_worst_of_the_best_make_room(root: Path, log: io.StringIO) -> None:
    study = optuna.create_study()
    folder = StudyFolder(root, study.study_name)
    retention = CheckpointRetention(study, folder, 3, max_bytes=1000)

    def leave_bytes(value: float, size: int) -> set[int]:
        leave(retention, study, [value], size)
        number = study.trials[-1].number
        unfinished(folder, 99, 1).write_bytes(bytes(5000))  # of one under way: does not count
        retention.settled(number)
        assert 99 in folder.unfinished()
        return folder.finals()

    assert leave_bytes(5.0, 400) == {0}
    assert leave_bytes(4.0, 600) == {0, 1}
    assert leave_bytes(3.0, 300) == {1, 2}
    assert leave_bytes(6.0, 100) == {1, 2, 3}
    assert log.getvalue() == ""
    for number in (4, 5):  # the best, and too large by themselves
        assert leave_bytes(6.0 - number, 1001) == {1, 2}
    assert log.getvalue().count("`max_bytes` is 1000") == 1
    assert leave_bytes(0.5, 900) == {6}


# -- disks that fail -----------------------------------------------------------------------------


@contextlib.contextmanager
def full(path: Path) -> Iterator[None]:
    raise OSError(errno.ENOSPC, "No space left on device")
    yield


def on_a_full_disk(trial: Any) -> float:
    """Train where no file can be written; then there is space again."""
    with mock.patch.object(checkpoint_store, "replacing", full):
        value = train(trial, epochs=4)
        trial.set_user_attr("devices", trial.world_size)
        return value


@pytest.fixture(scope="module")
def undisturbed(fleet: Any) -> dict[str, Any]:
    study = optuna.create_study()
    study.optimize(functools.partial(train, epochs=4), n_trials=1, executor=fleet)
    return study.trials[0].user_attrs


def with_odd_state(trial: Any) -> float:
    trial.state["lambda"] = lambda: 0
    return train(trial, epochs=4)


@pytest.mark.parametrize(
    ("objective", "words", "left"),
    [
        (on_a_full_disk, "No space left.*has space", {"trial-0.final.pt"}),
        (with_odd_state, r"trial\.state\['lambda'\] is a function", set()),
    ],
)
def test_what_can_not_be_saved_costs_nothing_but_the_checkpoints(
    keeping: Any,
    root: Path,
    undisturbed: dict[str, Any],
    log: io.StringIO,
    objective: Any,
    words: str,
    left: set[str],
) -> None:
    study = optuna.create_study()
    study.optimize(objective, n_trials=1, executor=keeping)
    assert study.trials[0].user_attrs.items() >= undisturbed.items()
    assert kept(root, study) == left
    assert re.search(words, log.getvalue())
    assert log.getvalue().count("goes on without a new checkpoint") == 1


def test_a_trial_that_can_not_be_checkpointed_keeps_its_devices(
    keeping: Any, root: Path, undisturbed: dict[str, Any], log: io.StringIO
) -> None:
    study = optuna.create_study()
    keeping.script = {0: [Leg((0, 1), 2), Leg((1,))]}
    study.optimize(on_a_full_disk, n_trials=1, executor=keeping)
    attributes = study.trials[0].user_attrs
    assert attributes["devices"] == 2
    assert [e for e in keeping.events if isinstance(e, MoveRefused)] == [MoveRefused(run_id=ANY)]
    assert attributes["losses"] == pytest.approx(undisturbed["losses"], rel=1e-12)
    assert log.getvalue().count("goes on without a new checkpoint") == 1


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_by_a_strangers(path: Path) -> None:
    content = checkpoint.Checkpoint(loop=1, epoch=3, objects=[], state={}, rng=[], history={})
    write_checkpoint(path, content, Owner(study="another", trial=0))


class Dying:
    """Trains; after the third epoch, once, damages what the disk has of it and dies.

    Of its checkpoints, the newest first, each gets one of the damages.
    """

    def __init__(self, folder: Path, damages: list[Any], flag: Path) -> None:
        self.folder, self.damages, self.flag = folder, damages, flag

    def __call__(self, trial: Any) -> float:
        own_epochs = trial.epochs

        def epochs(number: int) -> Iterator[int]:
            for epoch in own_epochs(number):
                trial._training.saver.finish()  # or the next one would be passed over
                if epoch == 3 and not self.flag.exists():
                    self._die(trial)
                yield epoch

        trial.epochs = epochs
        return train(trial, epochs=4)

    def _die(self, trial: Any) -> None:
        self.flag.touch()
        found = [FileName.parse(path.name) for path in self.folder.iterdir()]
        names = newest_first(name for name in found if name and not name.kind)
        assert names[0].position == (1, 3)
        for name, damage in zip(names, self.damages, strict=False):
            damage(self.folder / str(name))
        os.kill(os.getpid(), signal.SIGKILL)


def test_damaged_checkpoints_cost_nothing_but_time(
    keeping: Any, root: Path, tmp_path: Path, undisturbed: dict[str, Any], log: io.StringIO
) -> None:
    study = optuna.create_study()
    folder = StudyFolder(root, study.study_name)
    objective = Dying(folder.path, [replace_by_a_strangers, flip], tmp_path / "died")
    study.optimize(objective, n_trials=1, executor=keeping)
    assert (tmp_path / "died").exists()
    # It may be run again on both devices.
    right = {name: pytest.approx(values, rel=1e-10) for name, values in undisturbed.items()}
    assert study.trials[0].user_attrs == right
    assert len(study.trials[0].intermediate_values) == 4
    assert log.getvalue().count("is corrupt, or not of trial 0 of study") == 2
    assert kept(root, study) == {"trial-0.final.pt"}


# -- what is in a folder -------------------------------------------------------------------------


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path, "a study/with a name")
    folder.record_call(CallRecord(study=folder.study_name, id="1", n_trials=9, timeout=None))
    mine = {"best-trial-3.final.pt", "trial-3.final.pt.bak", "trial-3.pt", "my-trial-notes"}
    left = {
        folder.final(3).name,
        unfinished(folder, 12, 7).name,
        unfinished(folder, 12, 5, kind="best").name,
        ".trial-12.1-8.0123abcd-1.pt.abc",  # its writer was killed
        ".trial-12.1-8.0123abcd-1.best.pt.abc",
        ".call.json.abc",
    }
    for name in (*mine, *left):
        (folder.path / name).touch()
    (folder.path / "trial-5.final.pt").mkdir()
    folder.drop_all_but(unfinished={12}, finals={3})
    assert set(os.listdir(folder.path)) == mine | left - {".call.json.abc"} | {
        "call.json",
        "trial-5.final.pt",
    }
    folder.drop(3)
    folder.drop_all_but(unfinished=set(), finals=set())
    assert set(os.listdir(folder.path)) == mine | {"call.json", "trial-5.final.pt"}
