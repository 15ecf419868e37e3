"""Random sampling in which a trial's number, and not who asks first, decides what it gets."""

from __future__ import annotations

import hashlib
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import RandomSampler
from optuna.trial import FrozenTrial, TrialState, create_trial


class RandomByNumber(RandomSampler):
    """Stands for a `RandomSampler` during one call of `optimize`.

    Optuna's draws from one generator, call after call, and with several trials under way their
    order is a matter of chance. Here each parameter of each trial is drawn by itself, from a seed
    that is the first number which the user's own sampler draws: so the same seed gives the same
    trials on any devices, and where an interrupted call is made again.

    Attributes:
        given: The user's own sampler.
    """

    def __init__(self, given: RandomSampler, study: optuna.Study) -> None:
        super().__init__()
        self.given = given
        nobody = create_trial(state=TrialState.RUNNING)
        self._seed = given.sample_independent(study, nobody, "", FloatDistribution(0.0, 1.0))

    def reseed_rng(self) -> None:
        """Do nothing: what was drawn before is not drawn again anyway."""

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """See `BaseSampler`."""
        place = f"{self._seed!r} {trial.number} {param_name}".encode()
        seed = int.from_bytes(hashlib.sha256(place).digest()[:4], "little")
        alone = RandomSampler(seed)
        return alone.sample_independent(study, trial, param_name, param_distribution)
