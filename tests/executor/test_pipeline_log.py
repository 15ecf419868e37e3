"""What a sweep's summary says of its pipeline's work."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import optuna

from optuna_fleet.executor.call.journal import DeviceLog
from optuna_fleet.executor.call.summary import FleetSummary
from optuna_fleet.executor.call.tally import Tally
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.stats import PipelineStats, PipelineUse
from tests.fleets import Leg, Noise, fleet_of, small_model, train


def stats(seconds: float, *, stalled: float = 0.25, **more: Any) -> PipelineStats:
    """Two preprocessors for so many seconds, busy for half of them; one reader."""
    use = PipelineUse(
        active_s=seconds,
        running_s=2 * seconds,
        busy_s=seconds,
        blocked_s=0.25 * seconds,
        reading_s=seconds,
        stalled_s=stalled * seconds,
        ready_s=3 * seconds,
        window_s=4 * seconds,
    )
    return PipelineStats(use=use, **more)


def summary_of(used: PipelineStats | None) -> FleetSummary:
    devices = DeviceLog(lambda spans, changed: None, list)
    return Tally(0.0).summary(devices, 1.0, trials={}, left_out={}, pipeline=used)


def test_the_summary_says_where_the_bottleneck_is() -> None:
    summary = summary_of(stats(10.0, preprocessed=10, consumed=40))
    assert (summary.preprocessed, summary.consumed, summary.sharing_factor) == (10, 40, 4.0)
    assert (
        "sharing factor 4.0; preprocessors (2.0 on average) were busy for 50% of their time and "
        "short of memory for 12%, queues were 75% full (3.0 chunks), readers waited for 25% of "
        "theirs"
    ) in str(summary)
    without = summary_of(None)
    assert (without.preprocessed, without.sharing_factor) == (0, 0.0)
    assert "preprocessors" not in str(without)


def test_what_went_wrong_in_the_pipeline_is_in_the_summary() -> None:
    before = stats(5.0, num_skipped=2, num_lost=1, repeated=30)
    used = stats(9.0, num_skipped=5, num_lost=2, repeated=70).since(before)
    summary = str(summary_of(used))
    assert (
        "; samples skipped: 3, preprocessors that died: 1, samples preprocessed again: 40"
    ) in summary
    summary = str(summary_of(before.since(before)))
    assert not any(word in summary for word in ("skipped", "died", "again"))


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
        for said in ("queues were", "there from earlier calls"):  # the second counts its own
            study = optuna.create_study()
            fleet.script = {0: [Leg((0,))], 1: [Leg((1,))]}
            study.optimize(train, n_trials=2, executor=fleet)
            use = fleet.summary.pipeline.use
            assert 0.0 < use.active_s <= fleet.summary.duration_s
            assert 0.0 < use.reading_s <= 2 * use.active_s
            assert use.num_preprocessors <= 1.0
            assert said in str(fleet.summary)
