"""How a timeline looks, whatever draws it: colours, sizes and words."""

from __future__ import annotations

from collections.abc import Sequence

from optuna_fleet.visualization.bars import Bar, numbers_of
from optuna_fleet.visualization.rows import num_nodes

INK = "#222222"
GREY = "#C8C8C8"
ALERT = "#B2182B"
ROUND_LINE = "#707070"
THERE = "#EFEFEF"
BORDER = "#909090"
BAR_HEIGHT = 0.84  # of a row
NO_FLIGHTS = "No flights are recorded: no trial of this study ran on a fleet"
NEW_ROUND = "new round"
IS_THERE = "node is there"
TIME_LABEL = "time since the first start (s)"
DEVICE_LABEL = "device"
LANE_LABEL = "data"

# Paul Tol's "light" scheme, then darker shades of it: told apart by colour-blind eyes, and dark
# text is readable on each. Neighbours, which often run at the same time, differ most.
_COLOURS = (
    *("#77AADD", "#EE8866", "#EEDD88", "#44BB99", "#FFAABB", "#99DDFF", "#BBCC33"),
    *("#6390BD", "#CF7252", "#CDBB60", "#379C80", "#DD8A9C", "#7ABFE0", "#9BAA22"),
)


def colour_of(number: int) -> str:
    """The colour of a trial, the same in every picture."""
    return _COLOURS[number % len(_COLOURS)]


def title_of(bars: Sequence[Bar], study_name: str) -> str:
    """What the picture shows, with the study's name if it was given one."""
    if not bars:
        return NO_FLIGHTS
    rows = {bar.row for bar in bars}
    counts = {"trial": len(numbers_of(bars)), "device": len(rows)}
    shown = " on ".join(f"{n} {thing}{'s' * (n != 1)}" for thing, n in counts.items())
    if (nodes := num_nodes(rows)) > 1:
        shown += f" of {nodes} nodes"
    return shown if study_name.startswith("no-name-") else f"{study_name}: {shown}"


def row_px(num_devices: int) -> int:
    """Height of a row: less for many devices, so that the picture stays of a usable size."""
    return max(14, min(60, 1600 // max(num_devices, 1)))
