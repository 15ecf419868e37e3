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

from optuna_fleet import FleetConfigError, FleetExecutor, SharedPipeline
from tests.fleets import Leg, small_model, small_pipeline, train_epoch


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
    assert "busy for" not in said[1]


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


def test_an_open_text_file_is_named_and_does_not_travel(tmp_path: Path, fleet: Any) -> None:
    (tmp_path / "names").write_text("a\nb\n")
    with open(tmp_path / "names") as names:
        with pytest.raises(FleetConfigError, match=r"`names`, .* can't be pickled .*open file"):
            optuna.create_study().optimize(
                lambda trial: float(len(names.read())), n_trials=1, executor=fleet
            )

        class Lines(torch.utils.data.Dataset):  # type: ignore[type-arg]
            handle = names

            def __len__(self) -> int:
                return 2

            def __getitem__(self, index: int) -> int:
                return len(self.handle.readline())

        with (
            FleetExecutor(SharedPipeline(val=Lines()), devices=1, device_type="cpu") as other,
            pytest.raises(FleetConfigError, match="open file"),
        ):
            optuna.create_study().optimize(lambda trial: 0.0, n_trials=1, executor=other)
