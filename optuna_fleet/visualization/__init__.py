"""Pictures of what a fleet did, drawn from what the study stored.

`timeline` draws who was where and when, with plotly. `top` shows a sweep as it is now, in a
terminal.
"""

from optuna_fleet.visualization.timeline import plot_timeline

__all__ = ["plot_timeline"]
