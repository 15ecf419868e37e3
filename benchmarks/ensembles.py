"""FLEET's ensemble of 100 networks, reconstructed, for simulated sweeps.

python benchmarks/ensembles.py --story A --seed 0 --write ensemble.json
optuna-fleet simulate ensemble.json --devices 40 --policy elastic

The rates and lengths of FLEET's networks were never published, so this is a *reconstruction*: a
hundred synthetic trials that agree with what is known of them.

Published (FLEET, MLSys 2020): 100 networks of 21 to 176 images/s on one GPU; epochs of 30,606
images (Caltech256); on one GPU each a network takes 10,372 s on average (Table 3). Inferred: the
longest takes 22,700 s, if 1.92 is FLEET-G's speed-up on 160 GPUs (1.92 x 11,825 s, Table 4), and
changing a flotilla costs 34 s (the overheads of Table 4 are all multiples of it).

Assumed: seconds per image are uniform between these rates; a further device leaves 1 - 0.03 of
the rate per device up to 8 devices, the two nodes that FLEET profiles, and 1 - 0.07 beyond (the
form is Eq. 5, the numbers are fitted by eye to FLEET-G's published times); epochs are drawn from a
normal distribution. In story "A" nearly all networks take as many (13.5 +- 1.6), in story "B" they
differ (17 +- 4.6); "B-normal" and "B-lognormal" are story B with lengths that spread widely
(17 +- 5.1; log-normal of mean 17, 0.5 in the logarithm). Costs are then raised to a power that
makes their mean and maximum as above; rates follow from cost and epochs: a few of them lie
outside the published range (in stories A and B 19 to 361 over seeds 0 to 19).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optuna_fleet.replay.workload import SimulatedTrial

NUM_TRIALS = 100
SAMPLES_PER_EPOCH = 30606
RESCALE_S = 34.0
"""What one change of a flotilla costs in FLEET's Table 4."""

STORIES = {
    "A": (13.5, 1.62, 10, 17),
    "B": (17.0, 4.6, 8, 27),
    "B-normal": (17.0, 5.1, 2, 200),
    "B-lognormal": (17.0, 0.5, 2, 200),
}
"""Epochs: mean, standard deviation (of the logarithm, if log-normal), fewest, most."""

_MEAN_COST_S, _MAX_COST_S = 10372.0, 22700.0
_SLOWEST, _FASTEST = 21, 176  # images/s, before costs are bent
_LOSS, _LOSS_BEYOND, _PROFILED = 0.03, 0.07, 8
_WIDEST = 64  # far beyond the peak of r(m), at 14 devices
_POWERS = (0.05, 20.0)
_NUM_HALVINGS = 200

FloatArray = NDArray[np.float64]


def ensemble(
    story: str, seed: int, num_devices: int, rescale_s: float = RESCALE_S
) -> tuple[SimulatedTrial, ...]:
    """The trials of one ensemble.

    Args:
        story: A key of `STORIES`.
        seed: Of the only random generator.
        num_devices: Widest rate wanted; no more than 64 are given.
        rescale_s: What a move costs, in seconds of training.
    """
    r1, epochs = rates_and_epochs(story, seed)
    width = np.arange(1, min(num_devices, _WIDEST) + 1)
    return tuple(
        SimulatedTrial(
            name=f"t{number:03d}",
            rates=tuple((rate * _scaling(width)).tolist()),
            epochs=int(length),
            samples_per_epoch=float(SAMPLES_PER_EPOCH),
            rescale_up_s=rescale_s,
            rescale_down_s=rescale_s,
        )
        for number, (rate, length) in enumerate(zip(r1, epochs, strict=True))
    )


def rates_and_epochs(story: str, seed: int) -> tuple[FloatArray, NDArray[np.int64]]:
    """Samples/s on one device, and epochs until each trial ends."""
    generator = np.random.default_rng(seed)
    mean, spread, fewest, most = STORIES[story]
    if story == "B-lognormal":
        drawn = mean * np.exp(generator.normal(-(spread**2) / 2, spread, NUM_TRIALS))
    else:
        drawn = generator.normal(mean, spread, NUM_TRIALS)
    epochs = np.clip(np.round(drawn), fewest, most).astype(int)
    seconds_per_sample = generator.uniform(1 / _FASTEST, 1 / _SLOWEST, NUM_TRIALS)
    cost_s = _bent(epochs * SAMPLES_PER_EPOCH * seconds_per_sample)
    return epochs * SAMPLES_PER_EPOCH / cost_s, epochs


def _bent(cost: FloatArray) -> FloatArray:
    """Costs to the power that makes their maximum and mean as published."""
    low, high = _POWERS  # maximum / mean rises with the power
    for _ in range(_NUM_HALVINGS):
        power = (low + high) / 2
        bent: FloatArray = cost**power
        if bent.max() / bent.mean() > _MAX_COST_S / _MEAN_COST_S:
            high = power
        else:
            low = power
    bent = cost**power
    scaled: FloatArray = bent * (_MEAN_COST_S / bent.mean())
    return scaled


def _scaling(width: NDArray[np.int64]) -> FloatArray:
    """r(m) / r(1)."""
    near, beyond = np.minimum(width, _PROFILED) - 1.0, np.maximum(width - _PROFILED, 0.0)
    scaling: FloatArray = width * (1 - _LOSS) ** near * (1 - _LOSS_BEYOND) ** beyond
    return scaling


def write_ensemble(path: Path, story: str, seed: int) -> None:
    """Write a file for `optuna-fleet simulate`."""
    trials = [
        {
            "name": trial.name,
            "rates": {str(m): rate for m, rate in enumerate(trial.rates, 1)},
            "epochs": trial.epochs,
        }
        for trial in ensemble(story, seed, _WIDEST)
    ]
    content = {"samples_per_epoch": SAMPLES_PER_EPOCH, "rescale_s": RESCALE_S, "trials": trials}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--story", choices=STORIES, default="A")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, required=True, metavar="FILE.json")
    arguments = parser.parse_args()
    write_ensemble(arguments.write, arguments.story, arguments.seed)


if __name__ == "__main__":
    main()
