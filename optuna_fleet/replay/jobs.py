"""The workloads of BFTrainer's experiments for `optuna-fleet replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from optuna_fleet.replay.fields import Fields
from optuna_fleet.replay.workload import SimulatedTrial

MIXES = {"hpo": "hpo_shufflenet", "diverse": "diverse"}
"""Name on the command line -> name in the file."""

_NODES = [1, 2, 4, 8, 16, 32, 64]
_THOUSANDS_PER_S = {
    "AlexNet": [7.1, 13.1, 21.1, 40.5, 74.0, 130.8, 202.1],
    "ResNet18": [5.2, 10.6, 20.4, 39.6, 78.0, 144.8, 262.7],
    "MnasNet": [3.2, 6.0, 11.5, 23.1, 43.9, 83.5, 160.5],
    "MobileNets": [3.0, 5.9, 11.4, 22.0, 42.5, 82.3, 155.2],
    "ShuffleNet": [2.8, 5.3, 10.0, 20.4, 38.9, 74.1, 145.1],
    "VGG-16": [1.2, 2.4, 4.7, 9.3, 18.3, 36.2, 70.2],
    "DenseNet": [1.0, 2.0, 3.8, 7.6, 15.0, 28.8, 57.8],
}
"""Table 2: by number of nodes."""

_TRAINER = {
    "n_jobs": 1000,  # sections 5.1 and 5.2
    "Pmax_images": 130e6,  # section 4.2: 100 epochs
    "Jmin": 1,
    "Jmax": 64,
    # Not in the paper, but in the simulator published with it:
    "Tcup_s": 18.0,
    "Tcdw_s": 12.0,
    "spacing_s": 36.0,
}

BFTRAINER: dict[str, Any] = {
    "scaling": {
        name: {"nodes": _NODES, "images_per_s": [1000 * rate for rate in rates]}
        for name, rates in _THOUSANDS_PER_S.items()
    },
    "hpo_shufflenet": {**_TRAINER, "dnn": "ShuffleNet"},
    "diverse": {**_TRAINER, "cycle": list(_THOUSANDS_PER_S)},
}
"""What a workload file holds: of the paper's experiments, as far as it prints them."""


def load_jobs(path: Path | None, mix: str) -> tuple[SimulatedTrial, ...]:
    """The trials of a workload file.

    Args:
        path: A JSON file with `scaling` (by model: `nodes` and `images_per_s`, rates between the
            given widths are linear) and the experiments `hpo_shufflenet` (equal trials) and
            `diverse` (models taking turns, rescaling times of their own). None for those that
            the paper prints.
        mix: Which experiment, a key of `MIXES`.

    Returns:
        In order of submission. A trial is one epoch of all its samples.

    Raises:
        FleetConfigError: The file can't be read, or a field is missing or wrong.
    """
    fields = Fields.of_file(path) if path else Fields(BFTRAINER, "BFTrainer's jobs")
    jobs = fields.child(MIXES[mix])
    count, widest = jobs.whole("n_jobs"), jobs.whole("Jmax")
    if "cycle" in jobs.data:
        names = jobs.array("cycle", "a list of model names", lambda x: isinstance(x, str))
    else:
        names = [jobs.text("dnn")]
    rates = {name: _rates(fields.child("scaling").child(name), widest) for name in set(names)}
    up, down = (_seconds(jobs, name, count) for name in ("Tcup_s", "Tcdw_s"))
    samples, spacing = jobs.number("Pmax_images", is_above=True), jobs.number("spacing_s")
    least = jobs.whole("Jmin", most=widest)
    return tuple(
        SimulatedTrial(
            name=names[k % len(names)],
            rates=rates[names[k % len(names)]],
            epochs=1,
            samples_per_epoch=samples,
            submit_s=k * spacing,
            min_devices=least,
            rescale_up_s=up[k],
            rescale_down_s=down[k],
        )
        for k in range(count)
    )


def _seconds(jobs: Fields, name: str, count: int) -> list[float]:
    """One number for all, or one for each."""
    if isinstance(jobs.data.get(name), list):
        return jobs.numbers(name, count)
    return [jobs.number(name)] * count


def _rates(scaling: Fields, widest: int) -> tuple[float, ...]:
    nodes = scaling.numbers("nodes")
    rates = scaling.numbers("images_per_s", len(nodes))
    if sorted(set(nodes)) != nodes or nodes[0] > 1 or nodes[-1] < widest:
        raise scaling.refuse("nodes", f"rising, from 0 or 1 up to at least {widest}")
    if not all(rate > 0 for n, rate in zip(nodes, rates, strict=True) if n):
        raise scaling.refuse("images_per_s", "> 0 on any nodes")
    return tuple(np.interp(np.arange(1, widest + 1), nodes, rates).tolist())
