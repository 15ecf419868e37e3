"""A pipeline as those who serve it get it: packed and decided on once, whoever joins, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.limits import Wanted
from optuna_fleet.pipeline.preprocessor.payload import Payload
from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.settings import Settings, settings_here
from optuna_fleet.wire.packing import pack
from optuna_fleet.wire.unpicklable import explained, variable


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSetup:
    """The pipeline as whoever serves it gets it.

    Attributes:
        payload: The data sets and their stages; None if they are to be fetched from the driver.
        spec: Their description.
        wanted: What the user lets it take.
        num_preprocessors: Most preprocessors at a time.
        is_adaptive: Run as many of them as are needed, not all.
        niceness: What is added to theirs, so that trials that compute on the CPU go first.
        settings: What the script's process is set to, which holds for them too.
        num_alone: Most that work for each run, which shares nothing with others; None if all runs
            share what is made.
    """

    payload: Payload | None
    spec: PipelineSpec
    wanted: Wanted
    num_preprocessors: int
    is_adaptive: bool = False
    niceness: int = 0
    settings: Settings = field(default_factory=Settings)
    num_alone: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPipeline:
    """What ``SharedPipeline.packed`` returns, see `PipelineSetup`.

    ``finishes`` are the elementwise ends that trainers may do, as bytes, by data set; there is no
    ``num_preprocessors`` if the user gave none, and no ``num_alone`` if trials share.
    """

    payload: Payload
    spec: PipelineSpec
    finishes: Mapping[str, bytes | None]
    wanted: Wanted
    num_preprocessors: int | None
    num_alone: int | None = None

    def setup(
        self,
        default_preprocessors: int,
        *,
        is_adaptive: bool = False,
        niceness: int = 0,
        finish_on_device: bool = False,
        num_slots: int = 1,
    ) -> PipelineSetup:
        """Returns what whoever serves the pipeline on some machine needs, see `PipelineSetup`.

        There are no more than ``default_preprocessors``, or, if ``is_adaptive``, as many of them
        as are needed; if the user gave a number, there are so many. Where trials share nothing,
        each of ``num_slots`` has its own. With ``finish_on_device`` trainers do the elementwise
        end of the preprocessing.
        """
        spec = self.spec
        if finish_on_device:
            datasets = [replace(d, finish=self.finishes.get(d.name)) for d in spec.datasets]
            spec = replace(spec, datasets=tuple(datasets))
        alone = num_slots * (self.num_alone or 0)
        return PipelineSetup(
            payload=self.payload,
            spec=spec,
            wanted=self.wanted,
            num_preprocessors=alone or self.num_preprocessors or default_preprocessors,
            is_adaptive=is_adaptive and self.num_preprocessors is None and not alone,
            niceness=niceness,
            settings=settings_here(),
            num_alone=self.num_alone,
        )


def packed_part(argument: str, name: str, value: Any) -> bytes | None:
    """Returns something of the user's as bytes, for trainers; None of None.

    Raises:
        FleetConfigError: It can't be pickled.
    """
    if value is None:
        return None
    try:
        return pack(value)
    except Exception as error:
        what = f"{argument} of data set {name!r}"
        raise unpicklable(what, {argument: value}, error) from error


def unpicklable(what: str, wholes: Mapping[str, Any], error: Exception) -> FleetConfigError:
    """Returns the error for things of which, by their names, one can't be pickled."""
    parts = [variable(name, value, "given to SharedPipeline") for name, value in wholes.items()]
    return FleetConfigError(
        f"The {what} can't be pickled, as preprocessors and trainers, which are other processes, "
        f"need it: {explained(parts, error)} Create such a thing (an open file, a lock, a "
        "connection) when it is first used, in __getitem__."
    )
