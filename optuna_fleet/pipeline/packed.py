"""A pipeline as those who serve it get it: packed and decided on once, whoever joins, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optuna_fleet.pipeline.limits import Wanted
from optuna_fleet.pipeline.preprocessor.payload import Payload
from optuna_fleet.pipeline.spec import PipelineSetup, PipelineSpec
from optuna_fleet.settings import settings_here


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPipeline:
    """What ``SharedPipeline.packed`` returns.

    Attributes:
        payload: The data sets.
        spec: Returns their description, given whether trainers do the elementwise end.
        wanted: What the user lets it take.
        num_preprocessors: Most preprocessors per node; None if the user gave no number.
    """

    payload: Payload
    spec: Callable[[bool], PipelineSpec]
    wanted: Wanted
    num_preprocessors: int | None

    def setup(
        self,
        default_preprocessors: int,
        *,
        is_adaptive: bool = False,
        niceness: int = 0,
        finish_on_device: bool = False,
    ) -> PipelineSetup:
        """Returns what whoever serves the pipeline on some machine needs.

        Args:
            default_preprocessors: Most preprocessors if the user gave no number.
            is_adaptive: In that case run as many as are needed, not all.
            niceness: What is added to theirs.
            finish_on_device: Trainers do the elementwise end of the preprocessing.

        Raises:
            FleetConfigError: What the user gave does not do what it must, or can't be pickled.
        """
        return PipelineSetup(
            payload=self.payload,
            spec=self.spec(finish_on_device),
            wanted=self.wanted,
            num_preprocessors=self.num_preprocessors or default_preprocessors,
            is_adaptive=is_adaptive and self.num_preprocessors is None,
            niceness=niceness,
            settings=settings_here(),
        )
