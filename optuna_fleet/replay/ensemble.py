"""Ensembles of trials for `optuna-fleet simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from optuna_fleet.alloc.rates import RateProfile
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.replay.fields import MOST, Fields
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
    fields = Fields.of_file(path)
    rescale_s = fields.number("rescale_s", 0.0)
    common: dict[str, Any] = {
        "samples_per_epoch": fields.number("samples_per_epoch", is_above=True),
        "rescale_up_s": rescale_s,
        "rescale_down_s": rescale_s,
    }
    pruned = fields.number("pruned", 0.0, most=1.0)
    trials = [
        pruned_after(_trial(one, k, num_devices, common), pruned, [seed, k])
        for k, one in enumerate(fields.children("trials"))
    ]
    _check_names(path, trials)
    return tuple(sorted(trials, key=lambda trial: trial.submit_s))


def pruned_after(trial: SimulatedTrial, share: float, seed: Sequence[int]) -> SimulatedTrial:
    """The trial as it will be, if a share of trials is pruned at each epoch's end.

    What it draws is its own, whatever becomes of the others.
    """
    if not share:
        return trial
    end = int(np.random.default_rng(seed).geometric(share))
    return replace(trial, epochs=min(trial.epochs, end))


def _trial(
    one: Fields, k: int, num_devices: int | Mapping[str, int], common: dict[str, Any]
) -> SimulatedTrial:
    spans_types = one.take("spans_types", "true or false", lambda x: isinstance(x, bool), False)
    num_by_kind = num_devices if isinstance(num_devices, Mapping) else {"": num_devices}
    widest = (sum if spans_types else max)(num_by_kind.values())
    most = one.whole("max_epochs") if "max_epochs" in one.data else None
    traits = "traits" in one.data and one.array("traits", "a list of texts", lambda _: True)
    return SimulatedTrial(
        name=one.text("name", f"trial {k}"),
        **_all_rates(one, tuple(num_by_kind), widest),
        epochs=one.whole("epochs", *[most] * (most is not None), most=most or MOST),
        max_epochs=most,
        submit_s=one.number("submit_s", 0.0),
        min_devices=one.whole("min_devices", 1, most=widest),
        spans_types=spans_types,
        traits=frozenset(map(str, traits or ())),
        **common,
    )


def _all_rates(one: Fields, kinds: Sequence[str], widest: int) -> dict[str, Any]:
    given = one.child("rates")
    if not any(isinstance(value, Mapping) for value in given.data.values()):
        return {"rates": _rates(one, "rates", widest)}
    by_kind = {kind: _rates(given, kind, widest) for kind in kinds}
    fastest = max(kinds, key=lambda kind: by_kind[kind][0])
    return {"rates": by_kind[fastest], "rates_by_kind": by_kind}


def _rates(parent: Fields, name: str, widest: int) -> tuple[float, ...]:
    given = parent.child(name)
    if not given.data or not all(m.isdecimal() and int(m) > 0 for m in given.data):
        raise parent.refuse(name, 'by numbers of devices >= 1, as in {"1": 100.0}')
    measured = {int(width): given.number(width, is_above=True) for width in given.data}
    return RateProfile(structure="", measured=measured).rates(widest)


def _check_names(path: Path, trials: list[SimulatedTrial]) -> None:
    rates: dict[str, Any] = {}
    for trial in trials:
        own = trial.rates, trial.rates_by_kind
        if rates.setdefault(trial.name, own) != own:
            raise FleetConfigError(
                f"{path}: two trials are named {trial.name!r} but have unlike rates; trials of "
                "one name share a rate profile, so unlike ones need unlike names."
            )
