"""optuna-fleet: runs the trials of Optuna studies of deep networks on a set of devices.

Importing it gives `optuna.Study.optimize` the keyword ``executor=``. The other public names are
imported when they are first used: each process of a fleet, too, imports this module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from optuna_fleet.sampler_bridge.keyword import install as install

if TYPE_CHECKING:
    from optuna_fleet import policies as policies
    from optuna_fleet import visualization as visualization
    from optuna_fleet.checkpoints.best_model import load_best_model as load_best_model
    from optuna_fleet.checkpoints.file import CheckpointError as CheckpointError
    from optuna_fleet.exceptions import FleetConfigError as FleetConfigError
    from optuna_fleet.exceptions import FleetError as FleetError
    from optuna_fleet.exceptions import LaunchError as LaunchError
    from optuna_fleet.exceptions import OutOfMemoryError as OutOfMemoryError
    from optuna_fleet.exceptions import PreprocessingError as PreprocessingError
    from optuna_fleet.exceptions import StorageLostError as StorageLostError
    from optuna_fleet.exceptions import TrainerLostError as TrainerLostError
    from optuna_fleet.exceptions import TrialError as TrialError
    from optuna_fleet.exceptions import TrialTimeoutError as TrialTimeoutError
    from optuna_fleet.executor.call.summary import FleetSummary as FleetSummary
    from optuna_fleet.executor.cluster.join import JoinCluster as JoinCluster
    from optuna_fleet.executor.cluster.local import LocalCluster as LocalCluster
    from optuna_fleet.executor.cluster.ray import RayCluster as RayCluster
    from optuna_fleet.executor.cluster.slurm.cluster import SlurmCluster as SlurmCluster
    from optuna_fleet.executor.cluster.slurm.harvest import HarvestCluster as HarvestCluster
    from optuna_fleet.executor.fleet_executor import FleetExecutor as FleetExecutor
    from optuna_fleet.images.compose_parts import take_apart as take_apart
    from optuna_fleet.images.crops import RandomResizedCrop as RandomResizedCrop
    from optuna_fleet.images.decoding import read_image as read_image
    from optuna_fleet.options import Checkpoints as Checkpoints
    from optuna_fleet.options import Convergence as Convergence
    from optuna_fleet.options import Limits as Limits
    from optuna_fleet.options import Preflight as Preflight
    from optuna_fleet.pipeline import SharedPipeline as SharedPipeline
    from optuna_fleet.trainer.trial import FleetTrial as FleetTrial

__version__ = "0.1.0"

_MODULES = {
    "load_best_model": "checkpoints.best_model",
    "policies": "policies",
    "read_image": "images.decoding",
    "take_apart": "images.compose_parts",
    "visualization": "visualization",
    "CheckpointError": "checkpoints.file",
    "Checkpoints": "options",
    "Convergence": "options",
    "FleetConfigError": "exceptions",
    "FleetError": "exceptions",
    "FleetExecutor": "executor.fleet_executor",
    "FleetSummary": "executor.call.summary",
    "FleetTrial": "trainer.trial",
    "HarvestCluster": "executor.cluster.slurm.harvest",
    "JoinCluster": "executor.cluster.join",
    "LaunchError": "exceptions",
    "Limits": "options",
    "LocalCluster": "executor.cluster.local",
    "OutOfMemoryError": "exceptions",
    "Preflight": "options",
    "PreprocessingError": "exceptions",
    "RandomResizedCrop": "images.crops",
    "RayCluster": "executor.cluster.ray",
    "SharedPipeline": "pipeline",
    "SlurmCluster": "executor.cluster.slurm.cluster",
    "StorageLostError": "exceptions",
    "TrainerLostError": "exceptions",
    "TrialError": "exceptions",
    "TrialTimeoutError": "exceptions",
}
"""Where each public name is."""


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


if not TYPE_CHECKING:  # type checkers go by the imports above
    __all__ = ["install", *_MODULES]

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"optuna_fleet.{_MODULES[name]}")
        return module if name == _MODULES[name] else getattr(module, name)


install()
