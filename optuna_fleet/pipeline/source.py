"""The data itself, as preprocessors get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optuna_fleet.pipeline.splitting import Stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The user's data sets by name, and the stages that were given for them."""

    datasets: Mapping[str, Any]
    stages: Mapping[str, Stages]
