"""What a sweep's summary says of its pipeline's work."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import optuna

from optuna_fleet.pipeline import SharedPipeline
from tests.fleets import Leg, Noise, fleet_of, small_model, train


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


def read_flawed(trial: Any) -> int:
    trial.prepare(small_model())
    return sum(len(labels) for _ in trial.epochs(1) for _, labels in trial.batches("val", 8))


def test_a_sweep_tells_of_samples_that_were_skipped(tmp_path: Path) -> None:
    data = SharedPipeline(val=Flawed(tmp_path), on_error="skip")
    with fleet_of(devices=1, pipeline=data) as fleet:
        study = optuna.create_study()
        study.optimize(read_flawed, n_trials=1, executor=fleet)
        assert study.trials[0].value == 20
        pipeline = fleet.summary.pipeline
        assert (pipeline.num_skipped, pipeline.num_lost) == (1, 1)
        assert "samples skipped: 1, preprocessors that died: 1" in str(fleet.summary)


def test_a_sweep_leaves_its_pipelines_work_in_the_summary() -> None:
    with fleet_of(devices=2) as fleet:
        for said in (
            "readers waited for",
            "there from earlier calls",
        ):  # the second counts its own
            study = optuna.create_study()
            fleet.script = {0: [Leg((0,))], 1: [Leg((1,))]}
            study.optimize(train, n_trials=2, executor=fleet)
            use = fleet.summary.pipeline
            assert 0.0 < use.active_s <= fleet.summary.duration_s
            assert 0.0 < use.reading_s <= 2 * use.active_s
            assert use.num_preprocessors <= 1.0
            assert said in str(fleet.summary)
