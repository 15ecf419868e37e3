"""What a simulation runs: trials with the rates and lengths that only the simulation knows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from optuna_fleet.alloc.rates import PROFILE_BATCHES, RateProfile, profile_key
from optuna_fleet.arguments import check_number, check_that, is_a
from optuna_fleet.events import Model
from optuna_fleet.exceptions import FleetConfigError

_BATCH_SIZE = 32  # of FLEET's networks

MOST = 10**6
"""Of what is counted one by one: devices, trials, epochs."""

LARGEST = 1e15
"""Beyond it, and below its inverse, sums and quotients of times and rates overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTrial:
    """A trial to be.

    Attributes:
        name: For people.
        rates: True (r(1), ..., r(M)) in samples/s; M is the widest it may fly. Where device types
            differ, those of the type that is fastest.
        epochs: Epochs until it ends; the policy does not know.
        samples_per_epoch: Samples of one epoch.
        predicted_epochs: What somebody predicts for `epochs`; None if nobody does.
        max_epochs: What it says `epochs` is at most; None if it does not.
        submit_s: When it can be proposed first, in seconds.
        min_devices: Fewest devices it can fly on.
        rescale_up_s: What a move to more devices costs, in seconds of training.
        rescale_down_s: What a move to fewer devices costs, in seconds of training.
        rates_by_kind: Device type -> rates there, as many; empty if ``rates`` hold on all types.
        spans_types: It can have devices of several types at once.
        traits: See `events.Model`; none if it is not checked.
    """

    name: str
    rates: tuple[float, ...]
    epochs: int
    samples_per_epoch: float
    predicted_epochs: float | None = None
    max_epochs: int | None = None
    submit_s: float = 0.0
    min_devices: int = 1
    rescale_up_s: float = 0.0
    rescale_down_s: float = 0.0
    rates_by_kind: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    spans_types: bool = False
    traits: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_that("name", self.name, lambda name: is_a(str)(name) and name, "be a text")
        for rates in (self.rates, *self.rates_by_kind.values()):
            _check_rates(rates)
        most = MOST if self.max_epochs is None else self.max_epochs
        check_number("max_epochs", most, least=1, most=MOST, whole=True)
        check_number("epochs", self.epochs, least=1, most=most, whole=True)
        check_number("min_devices", self.min_devices, least=1, most=len(self.rates), whole=True)
        check_number("samples_per_epoch", self.samples_per_epoch, least=1 / LARGEST, most=LARGEST)
        for name in ("submit_s", "rescale_up_s", "rescale_down_s"):
            check_number(name, getattr(self, name), least=0, most=LARGEST)

    def rates_on(self, kind: str) -> tuple[float, ...]:
        """True (r(1), ..., r(M)) in samples/s on devices of that type."""
        return self.rates_by_kind.get(kind, self.rates)

    def rate_on(self, num_by_kind: Mapping[str, int]) -> float:
        """True rate in samples/s on so many devices of each type.

        Each adds to it what it adds among as many of its own type.
        """
        m = sum(num_by_kind.values())
        return sum(n / m * self.rates_on(kind)[m - 1] for kind, n in num_by_kind.items())

    @property
    def model(self) -> Model:
        """What the controller is told of it."""
        return Model(
            structure=self.name,
            resumable=True,
            min_devices=self.min_devices,
            max_devices=len(self.rates),
            samples_per_epoch=self.samples_per_epoch,
            max_epochs=self.max_epochs,
            rescale_up_s=self.rescale_up_s,
            rescale_down_s=self.rescale_down_s,
            spans_types=self.spans_types,
            traits=self.traits,
        )

    @property
    def work(self) -> float:
        """Samples it trains in all."""
        return self.epochs * self.samples_per_epoch


def _check_rates(rates: Iterable[float]) -> None:
    for rate in rates:
        check_number("rates", rate, least=1 / LARGEST, most=LARGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """Devices that join and leave at one moment."""

    time_s: float
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the simulated world behaves.

    Attributes:
        coupled: Trials of one flotilla advance at the pace of the slowest (a ring without pools).
        cost: A move costs its seconds at the new width, always but for the first start
            ("stall"); or at the width before, so that a trial without devices starts for free
            ("old rate": BFTrainer, Eq. 13 and its published simulator).
        seen_at: Ends of trials are seen at once ("completions"), or only when the fleet changes
            next ("nodes-only": BFTrainer's published simulator).
        profile_samples: A run on as many devices as its rate is not known for trains so many
            samples until it is measured.
        decision_s: Seconds from when a plan is asked for until it is there; who can move
            at the end of an epoch only waits for it there.
        preprocess_samples_per_s: What the preprocessors of the fleet make; None for any amount. No
            trial advances faster: all share what is made. Where each has preprocessors of its own,
            no faster than its device's part.
        check_s: Seconds that a pre-flight check takes on its device.
        check_share: The part of the devices' time that checks may take.
    """

    coupled: bool = False
    cost: Literal["stall", "old rate"] = "stall"
    seen_at: Literal["completions", "nodes-only"] = "completions"
    profile_samples: float = PROFILE_BATCHES * _BATCH_SIZE
    decision_s: float = 0.0
    preprocess_samples_per_s: float | None = None
    check_s: float = 3.0
    check_share: float = 0.02


def believed_profiles(
    trials: Sequence[SimulatedTrial],
    kinds: Sequence[str],
    *,
    noise: float = 0.0,
    seed: int = 0,
    widest: int | None = None,
) -> dict[str, RateProfile]:
    """What the policy believes of the rates: one profile per name and device type.

    Args:
        trials: Those of one name have equal rates.
        kinds: Device types of the fleet; ``rates`` hold on those no trial knows.
        noise: Standard deviation of the logarithm of (believed / true) rate; 0 for the truth.
        seed: Of the noise.
        widest: Rates on more devices than this are not known; 0 if none is, None if all are.
    """
    generator = np.random.default_rng([seed, 1])
    profiles: dict[str, RateProfile] = {}
    for trial, kind in product(trials, kinds if widest != 0 else ()):
        key = profile_key(trial.name, kind)
        if key not in profiles:
            rates = np.array(trial.rates_on(kind))
            believed = rates * np.exp(noise * generator.standard_normal(len(rates)))
            measured = dict(enumerate(believed[:widest].tolist(), 1))
            profiles[key] = RateProfile(
                structure=trial.name, measured=measured, kind=kind, anywhere=True
            )
    return profiles


# -- the trials of `optuna-fleet simulate` and `replay` -------------------------------------------


def load_ensemble(path: Path, num_devices: int, seed: int = 0) -> tuple[SimulatedTrial, ...]:
    """The trials of an ensemble file, in order of submission.

    Args:
        path: A JSON file: ``{"samples_per_epoch": 30606, "rescale_s": 34, "trials": [{"name":
            "...", "rates": {"1": 100.0, "2": 190.0}, "epochs": 14, "submit_s": 0}, ...]}``. Rates
            of other widths follow :meth:`RateProfile.rates`, up to ``"max_devices"`` of a trial.
            A trial with ``"max_epochs": 30`` says that it ends after 30 epochs at the latest, as
            ``trial.epochs(30)`` does; ``epochs`` are then 30 unless given. With ``"pruned": 0.05``
            beside ``"trials"``, that share of them ends at each epoch's end. With ``"traits":
            ["sgd", "resnet"]`` a trial is checked before it gets several devices or is moved.
        num_devices: Devices of the fleet.
        seed: Of which trials are pruned when.

    Raises:
        FleetConfigError: The file can't be read, or a field is missing or wrong.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FleetConfigError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise FleetConfigError(f"{path} is not JSON: {error}.") from error
    with _told_of(str(path)):
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


def _trial(
    one: Mapping[str, Any], k: int, num_devices: int, common: dict[str, Any]
) -> SimulatedTrial:
    most, widest = one.get("max_epochs"), one.get("max_devices", num_devices)
    check_number("max_devices", widest, least=1, whole=True)
    measured = {int(width): rate for width, rate in one["rates"].items()}
    wanted = 'be by numbers of devices, as {"1": 100.0}'
    check_that("rates", one["rates"], lambda _: min(measured, default=0) > 0, wanted)
    _check_rates(measured.values())
    profile = RateProfile(structure="", measured=measured)
    return SimulatedTrial(
        name=one.get("name", f"trial {k}"),
        rates=profile.rates(min(widest, num_devices)),
        epochs=one["epochs"] if most is None else one.get("epochs", most),
        max_epochs=most,
        submit_s=one.get("submit_s", 0.0),
        min_devices=one.get("min_devices", 1),
        traits=frozenset(map(str, one.get("traits", ()))),
        **common,
    )


def pruned_after(trial: SimulatedTrial, share: float, seed: Sequence[int]) -> SimulatedTrial:
    """The trial as it will be, if a share of trials is pruned at each epoch's end.

    What it draws is its own, whatever becomes of the others.
    """
    if not share:
        return trial
    end = int(np.random.default_rng(seed).geometric(share))
    return replace(trial, epochs=min(trial.epochs, end))


def _check_names(trials: Sequence[SimulatedTrial]) -> None:
    rates: dict[str, Any] = {}
    for trial in trials:
        if rates.setdefault(trial.name, trial.rates) != trial.rates:
            raise FleetConfigError(
                f"two trials are named {trial.name!r} but have unlike rates; trials of one name "
                "share a rate profile, so unlike ones need unlike names."
            )


BFTRAINER_NODES = (1, 2, 4, 8, 16, 32, 64)
BFTRAINER_RATES = {
    "AlexNet": (7.1, 13.1, 21.1, 40.5, 74.0, 130.8, 202.1),
    "ResNet18": (5.2, 10.6, 20.4, 39.6, 78.0, 144.8, 262.7),
    "MnasNet": (3.2, 6.0, 11.5, 23.1, 43.9, 83.5, 160.5),
    "MobileNets": (3.0, 5.9, 11.4, 22.0, 42.5, 82.3, 155.2),
    "ShuffleNet": (2.8, 5.3, 10.0, 20.4, 38.9, 74.1, 145.1),
    "VGG-16": (1.2, 2.4, 4.7, 9.3, 18.3, 36.2, 70.2),
    "DenseNet": (1.0, 2.0, 3.8, 7.6, 15.0, 28.8, 57.8),
}
"""BFTrainer's Table 2: thousands of images per second by numbers of nodes."""


def bftrainer_trials(names: Sequence[str], num_trials: int = 1000) -> tuple[SimulatedTrial, ...]:
    """The trials of BFTrainer's experiments, as far as the paper prints them.

    A trial is one epoch of all its samples, 100 times those of ImageNet (sections 4.2, 5.1 and
    5.2). What moves cost, and how soon the next trial comes, is not in the paper, but in the
    simulator published with it.

    Args:
        names: Models that take turns, of `BFTRAINER_RATES`.
        num_trials: How many.
    """
    widths = np.arange(1, BFTRAINER_NODES[-1] + 1)
    rates = {
        name: tuple((1000 * np.interp(widths, BFTRAINER_NODES, BFTRAINER_RATES[name])).tolist())
        for name in names
    }
    return tuple(
        SimulatedTrial(
            name=(name := names[k % len(names)]),
            rates=rates[name],
            epochs=1,
            samples_per_epoch=130e6,
            submit_s=36.0 * k,
            rescale_up_s=18.0,
            rescale_down_s=12.0,
        )
        for k in range(num_trials)
    )
