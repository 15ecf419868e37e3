"""The data itself, as preprocessors get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna_fleet.pipeline.preprocessor.generators import Generator
from optuna_fleet.pipeline.preprocessor.splitting import Stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The user's data sets by name, and the stages that were given for them.

    Attributes:
        datasets: By name.
        stages: Likewise.
        generators: Random generators that any of these hold, once they have been looked for.
    """

    datasets: Mapping[str, Any]
    stages: Mapping[str, Stages]
    generators: Sequence[Generator] = ()
