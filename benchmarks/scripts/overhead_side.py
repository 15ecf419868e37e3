"""One side of a row of `overhead.py`, by its name; prints what it measured as JSON.

What a side does not need it does not import: starts and memory are measured too.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

NUM_SLOTS = 4


def new_study(seed: int | None = None) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))


def fleet_of(data: Any = None, devices: int = NUM_SLOTS, **more: Any) -> Any:
    from optuna_fleet import FleetExecutor, SharedPipeline

    pipeline = SharedPipeline(**data) if data else None
    return FleetExecutor(pipeline, devices=devices, device_type="cpu", **more)


def digits_data() -> Any:
    import digits

    return digits.load_datasets()[0]


# -- one trial ------------------------------------------------------------------------------------


def fleet_loop(num_trials: str) -> None:
    """One warm executor on one device: for each line `num_epochs`, optimize one trial.

    Each trial gets a data set of its own, so that no epoch is in the pipeline's memory already.
    """
    import workload

    names = [f"train{number}" for number in range(int(num_trials))]
    data = dict.fromkeys(names, digits_data())
    with fleet_of({"num_preprocessors": 1, **data}, devices=1) as fleet:
        for name, line in zip(names, sys.stdin, strict=False):
            objective = partial(workload.train, num_epochs=int(line), data=name)
            study, began = new_study(), time.perf_counter()
            study.optimize(objective, n_trials=1, executor=fleet)
            print(json.dumps(time.perf_counter() - began), flush=True)


def bare_loop() -> None:
    """A warm bare training loop with a DataLoader: for each line `num_epochs`, train one model."""
    import torch
    import workload
    from plain_trial import PlainTrial, loader

    data = loader(digits_data(), workload.BATCH_SIZE, shuffle=True, num_workers=1)
    for line in sys.stdin:
        torch.manual_seed(0)
        num_epochs, began = int(line), time.perf_counter()
        workload.train(PlainTrial(None, {"train": data}, num_epochs), num_epochs=num_epochs)
        print(json.dumps(time.perf_counter() - began), flush=True)


# -- trials that return at once -------------------------------------------------------------------


def instant(num_rounds: str, num_trials: str) -> list[float]:
    """Extra seconds per trial over plain Optuna, in alternation."""

    def per_trial_s(number: int, **options: Any) -> float:
        study, began = new_study(seed=0), time.perf_counter()
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=number, **options)
        return (time.perf_counter() - began) / number

    with fleet_of(devices=1) as fleet:
        per_trial_s(1, executor=fleet)
        rounds, number = range(int(num_rounds)), int(num_trials)
        return [per_trial_s(number, executor=fleet) - per_trial_s(number) for _ in rounds]


# -- starts ---------------------------------------------------------------------------------------


def cold_plain() -> float:
    """Seconds from `optimize` to the first line of an objective that needs no torch."""
    study = new_study()
    with fleet_of() as fleet:
        began = time.time()
        study.optimize(lambda trial: time.time(), n_trials=NUM_SLOTS, executor=fleet)
    return float(study.best_value) - began


def cold_training() -> float:
    """Seconds from `optimize` to the first step of the first of four CPU slots."""
    import workload

    study = new_study()
    with fleet_of({"train": digits_data()}) as fleet:
        began = time.time()
        study.optimize(workload.first_step, n_trials=NUM_SLOTS, executor=fleet)
    return min(float(trial.user_attrs["first_step"]) for trial in study.trials) - began


def import_torch() -> float:
    """When torch and torchvision were imported."""
    import torch  # noqa: F401
    import torchvision  # noqa: F401

    return time.time()


# -- moves ----------------------------------------------------------------------------------------


class Rotating:
    """Moves each trial that flies to the next device, one device each."""

    name = "rotating"

    def allocate(self, problem: Any) -> Any:
        """Flying trials first, then those that wait while there are devices."""
        from optuna_fleet.alloc import Assignment, Flotilla, Plan

        devices, taken, flown = problem.devices, set[int](), []
        for one in sorted(problem.by_number.values(), key=lambda c: (not c.devices, c.number)):
            origin = devices.index(one.devices[0]) if one.devices else 0
            order = [*devices[origin + 1 :], *devices[: origin + 1]]
            if (device := next((d for d in order if d not in taken), None)) is None:
                break
            taken.add(device)
            flown.append(Assignment(number=one.number, devices=(device,), rate=one.rate(1)))
        told = {"allocator": self.name, "status": "heuristic", "reason": "all move on by one"}
        return Plan(flotillas=(Flotilla(assignments=tuple(flown)),), **told)


def moves(num_trials: str, long_epochs: str) -> list[float]:
    """Seconds from the end of a round to the next step of each trial that it moves.

    Two long trials rotate over four devices; each short one that ends, ends a round. It is over
    when the trial and its new devices have both done their last step: before, the devices are
    still at work for another trial.
    """
    import workload

    from optuna_fleet import policies
    from optuna_fleet.sampler_bridge.records import flights_of

    study, epochs = new_study(), {"long_epochs": int(long_epochs), "short_epochs": 2}
    objective = partial(workload.train_timed, **epochs, num_long=2)
    policy = policies.Own(allocator=Rotating(), alpha=1.0, rate_spread=math.inf)
    # Unchecked: a trial notes in its state how often it has moved.
    with fleet_of({"train": digits_data()}, policy=policy, preflight=False) as fleet:
        study.optimize(objective, n_trials=int(num_trials), executor=fleet)
    flown = flights_of(study)
    flights = [
        [
            (set(flight["devices"]), *span)
            for flight, span in zip(flown[t.number], t.user_attrs["spans"], strict=True)
        ]
        for t in study.trials
    ]
    everything = [one for own in flights for one in own]
    return [
        resumed - max(stop, *(end for d, _, end in everything if end < resumed and d & devices), 0)
        for own in flights
        for (_, _, stop), (devices, resumed, _) in pairwise(own)
    ]


# -- the driver -----------------------------------------------------------------------------------


def driver_cost(seconds: str) -> dict[str, float]:
    """What it costs while four trials train: share of a core, memory beyond the script's."""
    import optuna  # noqa: F401 - what a script has anyway
    import sklearn.datasets
    import sklearn.model_selection  # noqa: F401
    import torchvision.transforms.v2  # noqa: F401
    import workload

    before_mb = resident_mb()
    with fleet_of({"train": digits_data()}) as fleet:
        warm = partial(workload.train, num_epochs=1)
        new_study().optimize(warm, n_trials=NUM_SLOTS, executor=fleet)
        cpu_s, began = time.process_time(), time.perf_counter()
        objective = partial(workload.train, num_epochs=10**6, stop_after_s=float(seconds))
        new_study().optimize(objective, n_trials=NUM_SLOTS, executor=fleet)
        share = (time.process_time() - cpu_s) / (time.perf_counter() - began)
        return {"share": share, "memory_mb": resident_mb() - before_mb}


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


SIDES: list[Callable[..., Any]] = [
    *(fleet_loop, bare_loop, instant, cold_plain, cold_training, import_torch, moves, driver_cost)
]

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    answer = {side.__name__: side for side in SIDES}[name](*arguments)
    if answer is not None:
        print(json.dumps(answer))
