"""Where a trial is not started again: on nodes that it was lost on, while others have room. Pure.

So a bad node shows itself by different trials, and costs none of them all of its restarts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from optuna_fleet.alloc.problem import Flotilla, Plan
from optuna_fleet.executor.deciding.state import State
from optuna_fleet.executor.deciding.trials import Trial


class Avoidance:
    """That of one call.

    For the last time that it may lose its devices, a trial is started on a node that it was not
    lost on, if there is any, and waits for that.
    """

    def __init__(self, state: State) -> None:
        self._devices = state.devices
        self._max_restarts = state.policy.max_restarts

    def _shuns(self, trial: Trial, device: int) -> bool:
        return self._devices.place_of(device)[0] in trial.lost_on

    def waits(self, trial: Trial) -> bool:
        """Whether it is started, on one device, only on a node that it was not lost on."""
        if not trial.losses or len(trial.losses) < self._max_restarts:
            return False
        if trial.model is not None and not trial.fits_one_device:
            return False
        return any(not self._shuns(trial, device) for device in self._devices)

    def first_for(self, trial: Trial, free: Collection[int]) -> int | None:
        """The first free device on a node that it was not lost on; else on any, or none."""
        device = min(free, key=lambda device: self._shuns(trial, device), default=None)
        if device is None or (self._shuns(trial, device) and self.waits(trial)):
            return None
        return device

    def amended(self, plan: Plan, starting: Mapping[int, Trial], spare: Collection[int]) -> Plan:
        """A plan in which fewer devices are of nodes that their trials were lost on.

        They are exchanged between trials that it is `starting`, and for the `spare` ones that it
        gives to nobody.
        """
        if not any(trial.losses for trial in starting.values()):
            return plan
        given = {n: a.devices for n, a in plan.assignments.items() if n in starting}
        owners = {device: number for number, devices in given.items() for device in devices}
        self._exchange(pool := {**owners, **dict.fromkeys(spare)}, starting)
        now = {n: tuple(sorted(d for d, owner in pool.items() if owner == n)) for n in given}
        flotillas = (
            tuple(replace(a, devices=now.get(a.number, a.devices)) for a in f.assignments)
            for f in plan.flotillas
        )
        return replace(plan, flotillas=tuple(Flotilla(assignments=f) for f in flotillas))

    def _exchange(self, pool: dict[int, int | None], starting: Mapping[int, Trial]) -> None:
        """Change the owners of devices, so that fewer are on nodes that they were lost on."""

        def shuns(number: int | None, device: int) -> bool:
            return number is not None and self._shuns(starting[number], device)

        def gains(device: int, other: int) -> bool:
            number, theirs = pool[device], pool[other]
            if number == theirs or shuns(number, other) or shuns(theirs, device):
                return False
            return self._devices.kind_of(device) == self._devices.kind_of(other)

        for device in list(pool):
            if shuns(pool[device], device):
                other = next((other for other in pool if gains(device, other)), device)
                pool[device], pool[other] = pool[other], pool[device]
