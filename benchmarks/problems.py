"""Problems for allocators, made up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optuna_fleet.alloc import AllocationProblem, Candidate
from optuna_fleet.replay.workload import SimulatedTrial


def random_problem(
    trials: Sequence[SimulatedTrial], num_devices: int, seed: int
) -> AllocationProblem:
    """The trials on random devices: widths as they come about, a tenth of the devices idle."""
    generator = np.random.default_rng(seed)
    shares = generator.dirichlet(np.ones(len(trials))) * 0.9 * num_devices
    widest = [len(trial.rates) for trial in trials]
    widths = np.minimum(shares.astype(int), widest).tolist()
    ends = np.cumsum(widths).tolist()
    return AllocationProblem(
        candidates=tuple(
            Candidate(
                number=number,
                rates=trial.rates,
                devices=tuple(range(end - width, end)),
                min_devices=trial.min_devices,
                rescale_up_s=trial.rescale_up_s,
                rescale_down_s=trial.rescale_down_s,
            )
            for number, (trial, width, end) in enumerate(zip(trials, widths, ends, strict=True))
        ),
        nodes=tuple((device,) for device in range(num_devices)),
    )
