"""The shared pipeline: one preprocessing for all trials. Importing it imports no torch."""

from optuna_fleet.pipeline.limits import default_preprocessors
from optuna_fleet.pipeline.server.server import PipelineServer
from optuna_fleet.pipeline.shared_pipeline import SharedPipeline
from optuna_fleet.pipeline.spec import DatasetSpec, PipelineSpec
from optuna_fleet.pipeline.stats import PipelineStats
from optuna_fleet.pipeline.wire import socket_pair

__all__ = [
    "DatasetSpec",
    "PipelineServer",
    "PipelineSpec",
    "PipelineStats",
    "SharedPipeline",
    "default_preprocessors",
    "socket_pair",
]
