"""Pictures of what a fleet did, drawn from what the study stored.

`timeline` reads a study's records, `figure` draws them with plotly. `top` shows a sweep as it is
now: a `snapshot` of its study, in the `view` of a terminal.
"""

from optuna_fleet.visualization.figure import plot_timeline

__all__ = ["plot_timeline"]
