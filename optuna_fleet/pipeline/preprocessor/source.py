"""The data itself, as preprocessors get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna_fleet.pipeline.preprocessor.order import Generator
from optuna_fleet.pipeline.preprocessor.order_file import OrderFile
from optuna_fleet.pipeline.preprocessor.splitting import Stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The user's data sets by name, and the stages that were given for them.

    Attributes:
        datasets: By name.
        stages: Likewise.
        samplers: Likewise, where the user gave one, or ``Weights``.
        orders: What was drawn on this node, likewise; none to draw for oneself.
        generators: Random generators that any of these hold, once they have been looked for.
    """

    datasets: Mapping[str, Any]
    stages: Mapping[str, Stages]
    samplers: Mapping[str, Any] = field(default_factory=dict)
    orders: Mapping[str, OrderFile] = field(default_factory=dict)
    generators: Sequence[Generator] = ()
