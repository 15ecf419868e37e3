"""optuna-fleet: runs the trials of Optuna studies of deep networks on a set of devices.

Importing it gives `optuna.Study.optimize` the keyword ``executor=``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from optuna_fleet import policies, visualization
from optuna_fleet.checkpoints.best_model import load_best_model
from optuna_fleet.checkpoints.file import CheckpointError
from optuna_fleet.exceptions import (
    FleetConfigError,
    FleetError,
    LaunchError,
    OutOfMemoryError,
    PreprocessingError,
    StorageLostError,
    TrainerLostError,
    TrialError,
    TrialTimeoutError,
)
from optuna_fleet.executor.call.summary import FleetSummary
from optuna_fleet.executor.cluster.join import JoinCluster
from optuna_fleet.executor.cluster.local import LocalCluster
from optuna_fleet.executor.cluster.ray import RayCluster
from optuna_fleet.executor.cluster.slurm.cluster import SlurmCluster
from optuna_fleet.executor.cluster.slurm.harvest import HarvestCluster
from optuna_fleet.executor.fleet_executor import FleetExecutor
from optuna_fleet.images.compose_parts import take_apart
from optuna_fleet.options import Checkpoints, Convergence, Limits, Preflight
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.sampler_bridge.keyword import install, uninstall
from optuna_fleet.trainer.trial import FleetTrial

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Convergence",
    "FleetConfigError",
    "FleetError",
    "FleetExecutor",
    "FleetSummary",
    "FleetTrial",
    "HarvestCluster",
    "JoinCluster",
    "LaunchError",
    "Limits",
    "LocalCluster",
    "Preflight",
    "OutOfMemoryError",
    "PreprocessingError",
    "RandomResizedCrop",
    "RayCluster",
    "SharedPipeline",
    "SlurmCluster",
    "StorageLostError",
    "TrainerLostError",
    "TrialError",
    "TrialTimeoutError",
    "install",
    "load_best_model",
    "policies",
    "read_image",
    "take_apart",
    "uninstall",
    "visualization",
]

if TYPE_CHECKING:
    from optuna_fleet.images.crops import RandomResizedCrop
    from optuna_fleet.images.decoding import read_image
else:

    def __getattr__(name: str) -> Any:
        """What imports torch, which not every driver needs."""
        rooms = {"RandomResizedCrop": "crops", "read_image": "decoding"}
        if name in rooms:
            return getattr(import_module(f"optuna_fleet.images.{rooms[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


install()
