"""The trials of `optuna-fleet simulate` and `replay`, from files that people write."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from optuna_fleet.alloc.rates import RateProfile
from optuna_fleet.arguments import check_choice, check_number, check_that, is_a
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.replay.workload import MOST, SimulatedTrial, check_rates


@contextlib.contextmanager
def _read(path: Path) -> Iterator[Any]:
    """Gives what the file holds; what is wrong with that is said with the file's name."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FleetConfigError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise FleetConfigError(f"{path} is not JSON: {error}.") from error
    with _told_of(str(path)):
        yield data


@contextlib.contextmanager
def _told_of(where: str) -> Iterator[None]:
    """Says where it is, of what is missing or wrong."""
    try:
        yield
    except FleetConfigError as error:
        raise FleetConfigError(f"{where}: {error}") from error
    except KeyError as error:
        raise FleetConfigError(f"{where}: there is no field {error}.") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise FleetConfigError(f"{where} is none of this kind: {error}.") from error


# -- ensembles ------------------------------------------------------------------------------------


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
    with _read(path) as data:
        cost_s, pruned = data.get("rescale_s", 0.0), data.get("pruned", 0.0)
        check_number("pruned", pruned, least=0, most=1)
        common = {"samples_per_epoch": data["samples_per_epoch"]}
        common |= {"rescale_up_s": cost_s, "rescale_down_s": cost_s}
        trials = []
        for k, one in enumerate(data["trials"]):
            with _told_of(f"`trials[{k}]`"):
                trial = _trial(one, k, num_devices, common)
                trials.append(pruned_after(trial, pruned, [seed, k]))
        check_that("trials", data["trials"], bool, "be a list that is not empty")
        _check_names(trials)
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
    one: Mapping[str, Any], k: int, num_devices: int | Mapping[str, int], common: dict[str, Any]
) -> SimulatedTrial:
    spans_types = one.get("spans_types", False)
    num_by_kind = num_devices if isinstance(num_devices, Mapping) else {"": num_devices}
    widest = (sum if spans_types else max)(num_by_kind.values())
    most = one.get("max_epochs")
    return SimulatedTrial(
        name=one.get("name", f"trial {k}"),
        **_all_rates(one["rates"], tuple(num_by_kind), widest),
        epochs=one["epochs"] if most is None else one.get("epochs", most),
        max_epochs=most,
        submit_s=one.get("submit_s", 0.0),
        min_devices=one.get("min_devices", 1),
        spans_types=spans_types,
        traits=frozenset(map(str, one.get("traits", ()))),
        **common,
    )


def _all_rates(given: Mapping[str, Any], kinds: Sequence[str], widest: int) -> dict[str, Any]:
    check_that("rates", given, is_a(Mapping), 'be by numbers of devices, as {"1": 100.0}')
    if not any(isinstance(value, Mapping) for value in given.values()):
        return {"rates": _rates(given, widest)}
    by_kind = {kind: _rates(given[kind], widest) for kind in kinds}
    fastest = max(kinds, key=lambda kind: by_kind[kind][0])
    return {"rates": by_kind[fastest], "rates_by_kind": by_kind}


def _rates(given: Mapping[str, Any], widest: int) -> tuple[float, ...]:
    measured = {int(width): rate for width, rate in given.items()}
    check_that("rates", given, lambda _: min(measured, default=0) > 0, "be by numbers of devices")
    check_rates(tuple(measured.values()))
    return RateProfile(structure="", measured=measured).rates(widest)


def _check_names(trials: Sequence[SimulatedTrial]) -> None:
    rates: dict[str, Any] = {}
    for trial in trials:
        own = trial.rates, trial.rates_by_kind
        if rates.setdefault(trial.name, own) != own:
            raise FleetConfigError(
                f"two trials are named {trial.name!r} but have unlike rates; trials of one name "
                "share a rate profile, so unlike ones need unlike names."
            )


# -- the jobs of BFTrainer's experiments ----------------------------------------------------------

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
    with contextlib.nullcontext(BFTRAINER) if path is None else _read(path) as data:
        jobs = data[MIXES[mix]]
        count, widest, spacing_s = jobs["n_jobs"], jobs["Jmax"], jobs["spacing_s"]
        for name in ("n_jobs", "Jmax"):
            check_number(name, jobs[name], least=1, most=MOST, whole=True)
        check_number("spacing_s", spacing_s, least=0)
        names = jobs["cycle"] if "cycle" in jobs else [jobs["dnn"]]
        check_that("cycle", names, lambda some: is_a(list)(some) and some, "be a list of models")
        for name in names:
            check_choice("dnn", name, data["scaling"])
        rates = {name: _table(data["scaling"][name], widest) for name in set(names)}
        up, down = (_seconds(jobs, name) for name in ("Tcup_s", "Tcdw_s"))
        return tuple(
            SimulatedTrial(
                name=names[k % len(names)],
                rates=rates[names[k % len(names)]],
                epochs=1,
                samples_per_epoch=jobs["Pmax_images"],
                submit_s=k * spacing_s,
                min_devices=jobs["Jmin"],
                rescale_up_s=up[k],
                rescale_down_s=down[k],
            )
            for k in range(count)
        )


def _seconds(jobs: Mapping[str, Any], name: str) -> list[float]:
    """One number for all, or one for each."""
    given, count = jobs[name], jobs["n_jobs"]
    wanted = f"be a number, or a list of {count}"
    check_that(name, given, lambda x: not isinstance(x, list) or len(x) == count, wanted)
    return given if isinstance(given, list) else [given] * count


def _table(scaling: Mapping[str, Any], widest: int) -> tuple[float, ...]:
    nodes, rates = scaling["nodes"], scaling["images_per_s"]
    is_rising = sorted(set(nodes)) == nodes and 0 <= nodes[0] <= 1 and nodes[-1] >= widest
    wanted = f"rise, from 0 or 1 up to at least {widest}"
    check_that("nodes", nodes, lambda _: is_rising, wanted)
    return tuple(np.interp(np.arange(1, widest + 1), nodes, rates).tolist())
