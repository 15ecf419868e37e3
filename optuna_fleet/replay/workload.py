"""What a simulation runs: trials with the rates and lengths that only the simulation knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optuna_fleet.alloc.rates import RateProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTrial:
    """A trial to be.

    Attributes:
        name: For people.
        rates: True (r(1), ..., r(M)) in samples/s; M is the widest it may fly.
        epochs: Epochs until it ends; the policy does not know.
        samples_per_epoch: Samples of one epoch.
        predicted_epochs: What somebody predicts for `epochs`; None if nobody does.
        submit_s: When it can be proposed first, in seconds.
        min_devices: Fewest devices it can fly on.
        rescale_up_s: What a move to more devices costs, in seconds of training.
        rescale_down_s: What a move to fewer devices costs, in seconds of training.
    """

    name: str
    rates: tuple[float, ...]
    epochs: int
    samples_per_epoch: float
    predicted_epochs: float | None = None
    submit_s: float = 0.0
    min_devices: int = 1
    rescale_up_s: float = 0.0
    rescale_down_s: float = 0.0

    @property
    def work(self) -> float:
        """Samples it trains in all."""
        return self.epochs * self.samples_per_epoch


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
    """

    coupled: bool = False
    cost: str = "stall"
    seen_at: str = "completions"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("cost", ("stall", "old rate")),
            ("seen_at", ("completions", "nodes-only")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"The value of `{name}` is {getattr(self, name)!r}, but must be one of "
                    f"{allowed}."
                )


def believed_profiles(
    trials: Sequence[SimulatedTrial], *, noise: float = 0.0, seed: int = 0
) -> dict[str, RateProfile]:
    """What the policy believes of the rates: one profile per name.

    Args:
        trials: Those of one name have equal rates.
        noise: Standard deviation of the logarithm of (believed / true) rate; 0 for the truth.
        seed: Of the noise.
    """
    generator = np.random.default_rng([seed, 1])
    profiles: dict[str, RateProfile] = {}
    for trial in trials:
        if trial.name not in profiles:
            factors = np.exp(noise * generator.standard_normal(len(trial.rates))).tolist()
            believed = {
                m: r * f for m, (r, f) in enumerate(zip(trial.rates, factors, strict=True), 1)
            }
            profiles[trial.name] = RateProfile(structure=trial.name, measured=believed)
    return profiles
