"""Ensembles of trials for `optuna-fleet simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from optuna_fleet.alloc.rates import RateProfile
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.replay.fields import Fields
from optuna_fleet.replay.workload import SimulatedTrial


def load_ensemble(
    path: Path, num_devices: int | Mapping[str, int], seed: int = 0
) -> tuple[SimulatedTrial, ...]:
    """The trials of an ensemble file.

    Args:
        path: A JSON file: ``{"samples_per_epoch": 30606, "rescale_s": 34, "trials": [{"name":
            "...", "rates": {"1": 100.0, "2": 190.0}, "epochs": 14, "submit_s": 0}, ...]}``. Rates
            of other widths follow :meth:`RateProfile.rates`. Where device types differ, the rates
            of a trial may be given for each: ``{"v100": {"1": 100.0}, "a100": {"1": 210.0}}``.
            With ``"spans_types": true`` it can have devices of several types at once.
            A trial with ``"max_epochs": 30`` says that it ends after 30 epochs at the latest, as
            ``trial.epochs(30)`` does; ``epochs`` are then 30 unless given. With ``"pruned": 0.05``
            beside ``"trials"``, that share of them ends at each epoch's end. With ``"traits":
            ["sgd", "resnet"]`` a trial is checked before it gets several devices or is moved.
        num_devices: Devices of the fleet, or of each device type.
        seed: Of which trials are pruned when.

    Returns:
        In order of submission.

    Raises:
        FleetConfigError: The file can't be read, or a field is missing or wrong.
    """
    kinds = tuple(num_devices) if isinstance(num_devices, Mapping) else ()
    fields = Fields.of_file(path)
    samples = fields.number("samples_per_epoch", above=True)
    rescale_s = fields.number("rescale_s", default=0.0)
    pruned = fields.number("pruned", default=0.0, most=1.0)
    trials = [
        SimulatedTrial(
            name=trial.text("name", default=f"trial {k}"),
            **_all_rates(trial, kinds, _widest(trial, num_devices)),
            **_lengths(trial),
            samples_per_epoch=samples,
            submit_s=trial.number("submit_s", default=0.0),
            min_devices=_min_devices(trial, _widest(trial, num_devices)),
            spans_types=trial.flag("spans_types"),
            traits=frozenset(map(str, trial.array("traits") if "traits" in trial.names() else ())),
            rescale_up_s=rescale_s,
            rescale_down_s=rescale_s,
        )
        for k, trial in enumerate(fields.children("trials"))
    ]
    _check_names(path, trials)
    ends = [pruned_after(trial, pruned, [seed, k]) for k, trial in enumerate(trials)]
    return tuple(sorted(ends, key=lambda trial: trial.submit_s))


def pruned_after(trial: SimulatedTrial, share: float, seed: Sequence[int]) -> SimulatedTrial:
    """The trial as it will be, if a share of trials is pruned at each epoch's end.

    What it draws is its own, whatever becomes of the others.
    """
    if not share:
        return trial
    end = int(np.random.default_rng(seed).geometric(share))
    return replace(trial, epochs=min(trial.epochs, end))


def _lengths(trial: Fields) -> dict[str, Any]:
    most = trial.whole("max_epochs", least=1) if "max_epochs" in trial.names() else None
    epochs = trial.whole("epochs", least=1, default=most)
    if most is not None and epochs > most:
        raise trial.refuse("epochs", f"<= {most}, as `max_epochs` is")
    return {"epochs": epochs, "max_epochs": most}


def _all_rates(trial: Fields, kinds: Sequence[str], widest: int) -> dict[str, Any]:
    given = trial.child("rates")
    if not kinds or not any(isinstance(given.get(name), Mapping) for name in given.names()):
        return {"rates": _rates(trial, "rates", widest)}
    by_kind = {kind: _rates(given, kind, widest) for kind in kinds}
    fastest = max(kinds, key=lambda kind: by_kind[kind][0])
    return {"rates": by_kind[fastest], "rates_by_kind": by_kind}


def _widest(trial: Fields, num_devices: int | Mapping[str, int]) -> int:
    if not isinstance(num_devices, Mapping):
        return num_devices
    return (sum if trial.flag("spans_types") else max)(num_devices.values())


def _rates(parent: Fields, name: str, widest: int) -> tuple[float, ...]:
    given = parent.child(name)
    measured = {}
    for width in given.names():
        if not width.isdecimal() or int(width) < 1:
            raise parent.refuse(name, f"by numbers of devices >= 1, not by {width!r}")
        measured[int(width)] = given.number(width, above=True)
    if not measured:
        raise parent.refuse(name, 'an object like {"1": 100.0}')
    return RateProfile(structure="", measured=measured).rates(widest)


def _min_devices(trial: Fields, widest: int) -> int:
    least = trial.whole("min_devices", least=1, default=1)
    if least > widest:
        raise trial.refuse("min_devices", f"<= {widest}, the devices there are")
    return least


def _check_names(path: Path, trials: list[SimulatedTrial]) -> None:
    rates: dict[str, Any] = {}
    for trial in trials:
        own = trial.rates, trial.rates_by_kind
        if rates.setdefault(trial.name, own) != own:
            raise FleetConfigError(
                f"{path}: two trials are named {trial.name!r} but have unlike rates; trials of "
                "one name share a rate profile, so unlike ones need unlike names."
            )
