"""How trainers and preprocessors share a machine."""

from __future__ import annotations

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.limits import NICENESS, default_preprocessors, most_preprocessors
from optuna_fleet.pipeline.spec import PipelineSetup
from optuna_fleet.resources import Fleet, cpu_count


def pipeline_setup(pipeline: SharedPipeline, fleet: Fleet) -> PipelineSetup:
    """What the agent is to know of the pipeline."""
    cpus, cpu_slots = cpu_count(), _has_cpu_slots(fleet)
    return pipeline.setup(
        most_preprocessors(cpus, num_slots=len(fleet), cpu_slots=cpu_slots),
        is_adaptive=True,
        niceness=NICENESS if cpu_slots else 0,
        finish_on_device=not cpu_slots,
    )


def cores_set_aside(pipeline: SharedPipeline | None, fleet: Fleet) -> int:
    """For preprocessors; there may be more of them, where that does not slow down trials."""
    if pipeline is None:
        return 0
    default = default_preprocessors(cpu_count(), cpu_slots=_has_cpu_slots(fleet))
    return pipeline.num_preprocessors or default


def _has_cpu_slots(fleet: Fleet) -> bool:
    return fleet.devices[0].kind == "cpu"
