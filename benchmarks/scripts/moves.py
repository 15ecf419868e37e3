"""Trials that change devices at every round: seconds from one step to the next across a move.

Two long trials rotate over four devices; each short one that ends, ends a round.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import digits
import optuna
import workload

from optuna_fleet import FleetExecutor, SharedPipeline, policies
from optuna_fleet.alloc import AllocationProblem, Assignment, Flotilla, Plan
from optuna_fleet.sampler_bridge.records import flights_of

NUM_SLOTS = 4
NUM_LONG = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatingAllocator:
    """Moves each trial that flies to the next device, one device each."""

    name: str = field(default="rotating", init=False)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Flying trials first, then those that wait while there are devices."""
        devices = problem.devices
        taken: set[int] = set()
        flotillas = []
        candidates = sorted(problem.by_number.values(), key=lambda c: (not c.devices, c.number))
        for candidate in candidates:
            origin = devices.index(candidate.devices[0]) if candidate.devices else 0
            order = [*devices[origin + 1 :], *devices[: origin + 1]]
            device = next((d for d in order if d not in taken), None)
            if device is None:
                break
            taken.add(device)
            flown = Assignment(number=candidate.number, devices=(device,), rate=candidate.rate(1))
            flotillas.append(Flotilla(assignments=(flown,)))
        return Plan(
            flotillas=tuple(flotillas),
            allocator=self.name,
            reason="every trial moves on by one device",
            status="heuristic",
        )


def pauses(study: optuna.Study) -> tuple[list[float], list[float]]:
    """Seconds from the last step to the first after a move: the trial's, and its devices' too.

    The second starts when the trial and its new devices have both done their last step: before,
    the devices are still at work for another trial.
    """
    flown = flights_of(study)
    spans = {trial.number: _flights(trial, flown[trial.number]) for trial in study.trials}
    everything = [span for flights in spans.values() for span in flights]
    own, idle = [], []
    for flights in spans.values():
        for (_, _, stop), (devices, resumed, _) in pairwise(flights):
            before = [
                end for used, _, end in everything if end < resumed and set(used) & set(devices)
            ]
            own.append(resumed - stop)
            idle.append(resumed - max([stop, *before]))
    return own, idle


def _flights(
    trial: optuna.trial.FrozenTrial, flights: list[dict[str, Any]]
) -> list[tuple[list[int], float, float]]:
    """(devices, first step, last step) of each flight."""
    spans: list[list[float]] = trial.user_attrs["spans"]
    return [(f["devices"], *span) for f, span in zip(flights, spans, strict=True)]


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    num_trials, long_epochs = map(int, sys.argv[1:])
    train, _ = digits.load_datasets()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
    objective = partial(
        workload.train_timed, long_epochs=long_epochs, short_epochs=2, num_long=NUM_LONG
    )
    with FleetExecutor(
        SharedPipeline(train=train),
        devices=NUM_SLOTS,
        device_type="cpu",
        policy=policies.Own(allocator=RotatingAllocator(), alpha=1.0),
    ) as fleet:
        study.optimize(objective, n_trials=num_trials, executor=fleet)
    own, idle = pauses(study)
    print(json.dumps({"own_s": own, "idle_s": idle}))


if __name__ == "__main__":
    main()
