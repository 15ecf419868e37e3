"""What a sweep keeps of its pipeline's work: spans in the study, words in the summary."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_fleet.executor.call.journal import MIN_SPAN_S, DeviceLog, PipelineLog, Tally
from optuna_fleet.executor.call.summary import FleetSummary
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.stats import PipelineStats, PipelineUse
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.records import PIPELINE_PREFIX, PipelineSpan
from optuna_fleet.visualization import plot_timeline
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
    tally = Tally(0.0, lambda decision: None)
    return tally.summary(devices, 1.0, trials={}, left_out={}, pipeline=used)


def test_a_span_is_what_came_since_the_last_one() -> None:
    spans: list[PipelineSpan] = []
    log = PipelineLog(spans.append, stats(100.0), began=1000.0)
    log.note(stats(101.0), 1001.0)  # too early
    log.note(stats(104.0), 1004.0)
    log.finish(stats(104.5), 1005.0)
    assert [(s.start, s.end) for s in spans] == [(1000.0, 1004.0), (1004.0, 1005.0)]
    for span in spans:
        assert (span.num_preprocessors, span.busy, span.blocked) == (2.0, 0.5, 0.125)
        assert (span.stalled, span.queue) == (0.25, 0.75)


@pytest.mark.parametrize(("hours", "most"), [(0.01, 32), (10, 450), (100, 650)])
def test_long_sweeps_have_few_spans(hours: float, most: int) -> None:
    spans: list[PipelineSpan] = []
    log = PipelineLog(spans.append, PipelineStats(), began=0.0)
    now = 0.0
    while now < 3600 * hours:
        now += MIN_SPAN_S
        log.note(stats(now), now)
    assert 0.01 * most < len(spans) <= most
    assert all(a.end == b.start for a, b in itertools.pairwise(spans))


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
    log = PipelineLog(lambda span: None, before, began=0.0)
    used = log.finish(stats(9.0, num_skipped=5, num_lost=2, repeated=70), 9.0)
    summary = str(summary_of(used))
    assert (
        "; samples skipped: 3, preprocessors that died: 1, samples preprocessed again: 40"
    ) in summary
    summary = str(summary_of(log.finish(before, 9.0)))
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


def test_a_sweep_leaves_its_pipelines_work_in_summary_study_and_timeline() -> None:
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
            spans = compat.study_records(study, PIPELINE_PREFIX).values()
            assert spans
            assert all(0.0 <= span[share] <= 1.0 for span in spans for share in SHARES)
            names = {trace.name for trace in plot_timeline(study).data}
            assert {"preprocessors busy", "trials wait for data", "queue of data"} <= names


SHARES = ("busy", "blocked", "stalled", "queue")
