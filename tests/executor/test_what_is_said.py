"""What a sweep says of itself is true, and says what to do."""

from __future__ import annotations

import functools
import io
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet import FleetExecutor, SharedPipeline
from tests.fleets import Leg, Noise, small_model, small_pipeline, train_epoch


def quits_once(trial: Any, epoch: int, folder: Path) -> float:
    """Is killed in this epoch, the first time."""
    model = small_model()
    model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for each in trial.epochs(2):
        if each == epoch and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        train_epoch(trial, model, optimizer, [], batch_size=8)
    return 0.0


@pytest.mark.parametrize(
    ("epoch", "words"),
    [(0, "from its beginning: it had no checkpoint yet."), (1, "from its last checkpoint.")],
)
def test_where_a_trial_goes_on_after_a_death_is_told(
    fleet: Any, log: io.StringIO, tmp_path: Path, epoch: int, words: str
) -> None:
    # On a device of its own in each epoch, so that the first one leaves a checkpoint.
    fleet.script = {0: [Leg((0,), 1), Leg((1,)), Leg((2,))]}
    objective = functools.partial(quits_once, epoch=epoch, folder=tmp_path)
    study = optuna.create_study()
    study.optimize(objective, n_trials=1, executor=fleet)
    assert f". It is run again {words}" in log.getvalue()
    assert log.getvalue().count("run again") == 1


def reads(trial: Any) -> float:
    return float(sum(len(labels) for _, labels in trial.batches("val", batch_size=4)))


def test_the_summary_tells_start_up_and_data_of_earlier_calls() -> None:
    with FleetExecutor(small_pipeline(), devices=1, device_type="cpu") as fleet:
        said = []
        for _ in range(2):
            optuna.create_study().optimize(reads, n_trials=1, executor=fleet)
            assert fleet.summary is not None
            assert 0 < fleet.summary.startup_s < fleet.summary.duration_s
            said.append(str(fleet.summary))
    late = replace(fleet.summary, startup_s=1.23)  # a quick start is not worth a word
    assert "the first trial began after 1.2 s" in str(late)
    assert "sharing factor 1.0; preprocessors (" in said[0]
    assert "all 20 samples were there from earlier calls" in said[1]
    assert "sharing factor" not in said[1]


class Flawed(Noise):
    """Raises on sample 3; its first preprocessor dies of sample 7."""

    def __init__(self, folder: Path) -> None:
        super().__init__(20)
        self.flag = folder / "died"

    def __getitem__(self, index: int) -> Any:
        if index == 7 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 3:
            raise ValueError("broken image")
        return super().__getitem__(index)


def test_the_summary_tells_of_samples_that_were_skipped(tmp_path: Path) -> None:
    data, study = SharedPipeline(val=Flawed(tmp_path), on_error="skip"), optuna.create_study()
    with FleetExecutor(data, devices=1, device_type="cpu") as fleet:
        study.optimize(reads, n_trials=1, executor=fleet)
    assert study.trials[0].value == 20
    assert "samples skipped: 1, preprocessors that died: 1" in str(fleet.summary)


def stops_to_look(trial: Any) -> float:
    breakpoint()
    return 0.0


def test_a_breakpoint_in_a_trainer_names_the_cluster_that_has_a_debugger(
    fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)  # Ray sets one of its own
    with pytest.raises(Exception, match='cluster="inline"') as raised:
        optuna.create_study().optimize(stops_to_look, n_trials=1, executor=fleet)
    assert type(raised.value).__name__ == "BdbQuit"
