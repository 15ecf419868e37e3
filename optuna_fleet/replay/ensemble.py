"""Ensembles of trials for `optuna-fleet simulate`."""

from __future__ import annotations

from pathlib import Path

from optuna_fleet.alloc.rates import RateProfile
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.replay.fields import Fields
from optuna_fleet.replay.workload import SimulatedTrial


def load_ensemble(path: Path, num_devices: int) -> tuple[SimulatedTrial, ...]:
    """The trials of an ensemble file.

    Args:
        path: A JSON file: ``{"samples_per_epoch": 30606, "rescale_s": 34, "trials": [{"name":
            "...", "rates": {"1": 100.0, "2": 190.0}, "epochs": 14, "submit_s": 0}, ...]}``. Rates
            of other widths follow :meth:`RateProfile.rates`.
        num_devices: Widest rate wanted.

    Returns:
        In order of submission.

    Raises:
        FleetConfigError: The file can't be read, or a field is missing or wrong.
    """
    fields = Fields.of_file(path)
    samples = fields.number("samples_per_epoch", above=True)
    rescale_s = fields.number("rescale_s", default=0.0)
    trials = [
        SimulatedTrial(
            name=trial.text("name", default=f"trial {k}"),
            rates=_rates(trial, num_devices),
            epochs=trial.whole("epochs", least=1),
            samples_per_epoch=samples,
            submit_s=trial.number("submit_s", default=0.0),
            min_devices=_min_devices(trial, num_devices),
            rescale_up_s=rescale_s,
            rescale_down_s=rescale_s,
        )
        for k, trial in enumerate(fields.children("trials"))
    ]
    _check_names(path, trials)
    return tuple(sorted(trials, key=lambda trial: trial.submit_s))


def _rates(trial: Fields, num_devices: int) -> tuple[float, ...]:
    given = trial.child("rates")
    measured = {}
    for width in given.names():
        if not width.isdecimal() or int(width) < 1:
            raise trial.refuse("rates", f"by numbers of devices >= 1, not by {width!r}")
        measured[int(width)] = given.number(width, above=True)
    if not measured:
        raise trial.refuse("rates", 'an object like {"1": 100.0}')
    return RateProfile(structure="", measured=measured).rates(num_devices)


def _min_devices(trial: Fields, num_devices: int) -> int:
    least = trial.whole("min_devices", least=1, default=1)
    if least > num_devices:
        raise trial.refuse("min_devices", f"<= {num_devices}, the devices there are")
    return least


def _check_names(path: Path, trials: list[SimulatedTrial]) -> None:
    rates: dict[str, tuple[float, ...]] = {}
    for trial in trials:
        if rates.setdefault(trial.name, trial.rates) != trial.rates:
            raise FleetConfigError(
                f"{path}: two trials are named {trial.name!r} but have unlike rates; trials of "
                "one name share a rate profile, so unlike ones need unlike names."
            )
