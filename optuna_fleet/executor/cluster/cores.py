"""How trainers and preprocessors share a node."""

from __future__ import annotations

from collections.abc import Sequence

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.limits import NICENESS, default_preprocessors, most_preprocessors
from optuna_fleet.pipeline.packed import PackedPipeline, PipelineSetup
from optuna_fleet.resources import Device


def pipeline_setup(
    pipeline: PackedPipeline, devices: Sequence[Device], cores: int
) -> PipelineSetup:
    """What the agent of a node with these devices and cores is to know of the pipeline."""
    cpu_slots = _has_cpu_slots(devices)
    return pipeline.setup(
        most_preprocessors(cores, num_slots=len(devices), cpu_slots=cpu_slots),
        is_adaptive=True,
        niceness=NICENESS if cpu_slots else 0,
        finish_on_device=not cpu_slots,
    )


def cores_set_aside(
    pipeline: SharedPipeline | PackedPipeline | None, devices: Sequence[Device], cores: int
) -> int:
    """For preprocessors; there may be more of them, where that does not slow down trials."""
    if pipeline is None:
        return 0
    default = default_preprocessors(cores, cpu_slots=_has_cpu_slots(devices))
    return pipeline.num_preprocessors or default


def _has_cpu_slots(devices: Sequence[Device]) -> bool:
    return devices[0].type == "cpu"
