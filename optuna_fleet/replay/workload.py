"""What a simulation runs: trials with the rates and lengths that only the simulation knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

import numpy as np

from optuna_fleet.alloc.rates import PROFILE_BATCHES, RateProfile, profile_key
from optuna_fleet.arguments import check_number, check_that, is_a
from optuna_fleet.events import Model

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
        check_that("spans_types", self.spans_types, is_a(bool), "be true or false")
        for rates in (self.rates, *self.rates_by_kind.values()):
            check_rates(rates)
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


def check_rates(rates: Sequence[float]) -> None:
    """Check that all are numbers > 0 with which can be reckoned.

    Raises:
        FleetConfigError: One is not.
    """
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
