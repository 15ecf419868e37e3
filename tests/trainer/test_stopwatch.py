"""How many batches a trial's rate is measured over (FLEET B.3: no more than 48)."""

from __future__ import annotations

import pytest

from optuna_fleet.alloc.rates import PROFILE_BATCHES
from optuna_fleet.trainer import stopwatch
from optuna_fleet.trainer.stopwatch import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("batch_s", "num_batches"), [(0.001, PROFILE_BATCHES), (0.02, 24), (0.1, 12), (2.0, 6)]
)
def test_fast_models_take_48_batches_and_slow_ones_as_many_as_are_clear(
    monkeypatch: pytest.MonkeyPatch, batch_s: float, num_batches: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    watch = Stopwatch(active=True)
    taken, rate = 0, None
    while rate is None:
        watch.start()
        clock.now_s += batch_s + 1.0
        rate = watch.stop(samples=8, waited_s=1.0)  # waiting for data says nothing of the model
        taken += 1
    assert taken == num_batches
    assert rate == pytest.approx(8 / batch_s)
    assert not watch.active
    assert watch.total_s == pytest.approx(taken * batch_s)
