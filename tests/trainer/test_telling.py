"""How a trial's rate is measured (FLEET B.3: over no more than 48 batches)."""

from __future__ import annotations

import pytest
import torch

from optuna_fleet.alloc.rates import PROFILE_BATCHES
from optuna_fleet.trainer.data import telling
from optuna_fleet.trainer.data.telling import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Gpu:
    """A stream that works behind a host; all that can be done with its events."""

    def __init__(self) -> None:
        self.host_s = self.busy_until_s = 0.0
        self.num_waited_for = 0

    def run(self, kernel_s: float) -> None:
        self.busy_until_s = max(self.busy_until_s, self.host_s) + kernel_s

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.reached_s = max(self.gpu.busy_until_s, self.gpu.host_s)

    def query(self) -> bool:
        return self.reached_s <= self.gpu.host_s

    def synchronize(self) -> None:
        self.gpu.num_waited_for += not self.query()
        self.gpu.host_s = max(self.gpu.host_s, self.reached_s)

    def elapsed_time(self, end: Event) -> float:
        assert self.query(), "torch raises: the event was not reached yet"
        assert end.query(), "torch raises: the event was not reached yet"
        return 1e3 * (end.reached_s - self.reached_s)


@pytest.mark.parametrize(
    ("batch_s", "num_batches"), [(0.001, PROFILE_BATCHES), (0.02, 24), (0.1, 12), (2.0, 6)]
)
def test_fast_models_take_48_batches_and_slow_ones_as_many_as_are_clear(
    monkeypatch: pytest.MonkeyPatch, batch_s: float, num_batches: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(telling, "time", clock)
    watch = Stopwatch(True, torch.device("cpu"))
    taken, rate = 0, None
    while rate is None:
        watch.start()
        watch.wait()
        clock.now_s += 1.0  # waiting for data says nothing of the model
        watch.wait()
        clock.now_s += batch_s
        rate = watch.stop(samples=8)
        taken += 1
    assert taken == num_batches
    assert rate == pytest.approx(8 / batch_s)
    assert not watch.active
    assert watch.total_s == pytest.approx(taken * batch_s)


@pytest.mark.parametrize("launch_s", [0.0001, 0.002])
@pytest.mark.parametrize("waited_s", [0.0, 0.0005, 0.05])
@pytest.mark.parametrize("kernels_s", [0.0008, 0.03, 4.0])
def test_a_gpus_rate_is_that_of_its_stream_and_it_is_waited_for_at_most_once(
    monkeypatch: pytest.MonkeyPatch, launch_s: float, waited_s: float, kernels_s: float
) -> None:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    watch = Stopwatch(True, torch.device("cuda", 0))
    rate = None
    while rate is None:
        watch.start()
        watch.wait()
        gpu.host_s += waited_s
        watch.wait()
        gpu.host_s += launch_s
        gpu.run(kernels_s)
        rate = watch.stop(samples=8)
    fastest_s, slowest_s = max(kernels_s, launch_s), kernels_s + launch_s  # what data may allow
    assert 0.99 / slowest_s <= rate / 8 <= 1.01 / fastest_s
    if waited_s == 0:
        assert rate == pytest.approx(8 / fastest_s, rel=0.01)
    assert gpu.num_waited_for <= 1
