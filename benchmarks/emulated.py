"""The executor on emulated devices, beside what its simulation says of the same ensemble.

python benchmarks/emulated.py                             # about 50 minutes on an idle machine
python benchmarks/emulated.py --policies elastic --seeds 12

Real processes, messages and decisions; only the devices are emulated: a step on m of them sleeps
as long as it would take at r(m) = m r(1) f^(m-1). Steps are so long that 16 processes share two
cores. The fleet is up before the time is taken. The simulation proposes, probes and measures rates
as the executor does; moves and decisions cost what they were measured to cost in the real sweep.
A percent on a rate decides which trials train together, so it is the mean of several simulations
whose rates differ by that much.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import optuna
import torch

from optuna_fleet import FleetExecutor, SharedPipeline
from optuna_fleet.executor.call.summary import FleetSummary
from optuna_fleet.policies import POLICIES
from optuna_fleet.replay.scenarios import EnsembleScenario, lower_bound_s
from optuna_fleet.replay.workload import Rules, SimulatedTrial

NUM_TRIALS, NUM_DEVICES = 24, 16
BATCH, STEPS = 16, 12
MOST_EPOCHS = 40  # that a trial says it may take
EPOCH_S = (0.3, 5.0)
LATE_S = 0.02  # by which a step may be late by chance: no more, or moves would cost nothing
PROFILED_STEPS = 12  # 6 to 24, by their length
NUM_SIMULATIONS = 12
NOISE = 0.01  # by which rates differ between them


def ensemble(seed: int) -> list[SimulatedTrial]:
    """Trials of unlike speed, scaling and length."""
    generator = np.random.default_rng(seed)
    trials = []
    for number in range(NUM_TRIALS):
        rate = BATCH * STEPS / generator.uniform(*EPOCH_S)
        scaling = generator.uniform(0.86, 0.97)
        trials.append(
            SimulatedTrial(
                name=str(number),
                rates=tuple(m * rate * scaling ** (m - 1) for m in range(1, BATCH + 1)),
                epochs=max(1, round(generator.normal(14, 3))),
                samples_per_epoch=float(BATCH * STEPS),
                max_epochs=MOST_EPOCHS,
            )
        )
    return trials


class Pace:
    """Has each step last as long as it would, what the last one was late by chance taken off."""

    def __init__(self, late_s: float = LATE_S) -> None:
        self._due = time.perf_counter()
        self._late_s = late_s

    def keep(self, step_s: float) -> None:
        """Sleep for what is left of a step."""
        self._due = max(self._due + step_s, time.perf_counter() - self._late_s)
        time.sleep(max(0.0, self._due - time.perf_counter()))


def objective(trial: Any, trials: list[SimulatedTrial]) -> float:
    """Trains next to nothing, and sleeps."""
    torch.set_num_threads(1)
    spec = trials[trial.number % NUM_TRIALS]
    model = torch.nn.Linear(1, 1 + trial.number % NUM_TRIALS)  # a structure, so a rate, of its own
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = trial.prepare(model, optimizer)
    pace = Pace()
    for epoch in trial.epochs(MOST_EPOCHS):
        for (x,) in trial.batches("train", batch_size=BATCH, movable=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            pace.keep(BATCH / spec.rates[trial.world_size - 1])
        if epoch + 1 == spec.epochs:
            break
    return 0.0


def swept(trials: list[SimulatedTrial], policy: str) -> FleetSummary:
    """What the executor says of a sweep."""
    data = torch.utils.data.TensorDataset(torch.ones(BATCH * STEPS, 1))
    pipeline = SharedPipeline(train=data, num_preprocessors=1)
    with FleetExecutor(pipeline, devices=NUM_DEVICES, device_type="cpu", policy=policy) as fleet:
        warm_up = optuna.create_study()
        warm_up.optimize(lambda trial: time.sleep(1.0) or 0.0, 2 * NUM_DEVICES, executor=fleet)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        study.optimize(partial(objective, trials=trials), NUM_TRIALS, executor=fleet)
        assert fleet.summary is not None
        return fleet.summary


def simulated_s(trials: list[SimulatedTrial], policy: str, real: FleetSummary) -> float:
    """The makespan that the simulation expects."""
    decision_s = [plan.solve_time_s for plan in real.decisions]
    rules = Rules(
        profile_samples=PROFILED_STEPS * BATCH,
        decision_s=statistics.fmean(decision_s) if decision_s else 0.0,
    )
    generator = np.random.default_rng(0)
    scenarios = (
        EnsembleScenario(
            trials=[varied(trial, generator, real.move_s) for trial in trials],
            num_devices=NUM_DEVICES,
            devices_per_node=NUM_DEVICES,
            policy=policy,
            widest_known=0,
            lookahead=0,
            movable=True,
            rules=rules,
        )
        for _ in range(NUM_SIMULATIONS)
    )
    return statistics.fmean(scenario.run().end_s for scenario in scenarios)


def varied(trial: SimulatedTrial, generator: np.random.Generator, move_s: float) -> SimulatedTrial:
    """The trial with slightly other rates, and moves that take so long."""
    factors = np.exp(NOISE * generator.standard_normal(len(trial.rates)))
    rates = tuple((factors * trial.rates).tolist())
    return replace(trial, rates=rates, rescale_up_s=move_s, rescale_down_s=move_s)


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=list(POLICIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print("| seed | policy | real / bound | simulated / bound | real / simulated |", flush=True)
    print("|---|---|---|---|---|", flush=True)
    for seed in arguments.seeds:
        trials = ensemble(seed)
        bound_s = lower_bound_s(trials, NUM_DEVICES)
        for policy in arguments.policies:
            real = swept(trials, policy)
            expected_s = simulated_s(trials, policy, real)
            real_s = real.duration_s
            ratios = (real_s / bound_s, expected_s / bound_s, real_s / expected_s)
            shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {seed} | `{policy}` | {shown} |", flush=True)


if __name__ == "__main__":
    main()
