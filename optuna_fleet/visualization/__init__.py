"""Pictures of what a fleet did, drawn from what the study stored.

`timeline` reads a study's records; `figure` says what is drawn of them, for plotly and for
`picture`, which draws it with matplotlib. `live` shows a sweep as it is now.
"""

from optuna_fleet.visualization.figure import plot_timeline
from optuna_fleet.visualization.picture import save_timeline

__all__ = ["plot_timeline", "save_timeline"]
