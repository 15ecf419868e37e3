"""Pictures of what a fleet did, drawn from what the study stored."""

from optuna_fleet.visualization.picture import save_timeline
from optuna_fleet.visualization.timeline import plot_timeline

__all__ = ["plot_timeline", "save_timeline"]
