"""A pipeline as those who serve it get it: packed and decided on once, whoever joins, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.preprocessor.payload import Payload
from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.settings import Settings, settings_here
from optuna_fleet.wire.packing import pack
from optuna_fleet.wire.unpicklable import explained


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSetup:
    """The pipeline as whoever serves it gets it.

    Attributes:
        payload: The data sets and their stages; None if they are to be fetched from the driver.
        spec: Their description.
        finishes: The elementwise ends that trainers may do, as bytes, by data set.
        memory_bytes: Bytes for preprocessed data; None where the machine decides.
        spill_dir: The folder of the file for them; None for memory.
        chunk_bytes: Size of a chunk to aim at; None where that follows from the others.
        num_preprocessors: Most preprocessors at a time; 0 until `setup` if the user gave none.
        is_adaptive: Run as many of them as are needed, not all.
        niceness: What is added to theirs, so that trials that compute on the CPU go first.
        settings: What the script's process is set to, which holds for them too.
        num_alone: Most that work for each run, which shares nothing with others; None if all runs
            share what is made.
    """

    payload: Payload | None
    spec: PipelineSpec
    finishes: Mapping[str, bytes | None] = field(default_factory=dict)
    memory_bytes: int | None = None
    spill_dir: str | None = None
    chunk_bytes: int | None = None
    num_preprocessors: int = 0
    is_adaptive: bool = False
    niceness: int = 0
    settings: Settings = field(default_factory=Settings)
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
        """Returns it for whoever serves it on some machine.

        There are no more than ``default_preprocessors``, or, if ``is_adaptive``, as many of them
        as are needed; if the user gave a number, there are so many. Where trials share nothing,
        each of ``num_slots`` has its own. With ``finish_on_device`` trainers do the elementwise
        end of the preprocessing.
        """
        spec = self.spec
        if finish_on_device:
            datasets = [replace(d, finish=self.finishes.get(d.name)) for d in spec.datasets]
            spec = replace(spec, datasets=tuple(datasets))
        number = num_slots * (self.num_alone or 0) or self.num_preprocessors
        return replace(
            self,
            spec=spec,
            finishes={},
            num_preprocessors=number or default_preprocessors,
            is_adaptive=is_adaptive and not number,
            niceness=niceness,
            settings=settings_here(),
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
    reason = explained(wholes, "given to SharedPipeline", error)
    return FleetConfigError(
        f"The {what} can't be pickled, as preprocessors and trainers, which are other processes, "
        f"need it: {reason} Create such a thing (an open file, a lock, a connection) when it is "
        "first used, in the __getitem__ of a data set, and leave it out in its __getstate__ if "
        "the script has used it before."
    )
