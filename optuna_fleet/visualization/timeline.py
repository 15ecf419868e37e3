"""Which trial was on which device when: read from a study's records, drawn with plotly."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet.arguments import check_that, is_a
from optuna_fleet.events import Ending
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.records import DEVICES_PREFIX, flights_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

Row = tuple[str, int]
"""A device's node, "" where there is only one, and its number."""


class Mark(Enum):
    """What is worth seeing at the end of a flight; the value is the legend's text."""

    PRUNED = "pruned"
    FAILED = "failed"
    MOVED = "checkpointed to move"
    LOST = "devices lost"


_BY_STATE = {TrialState.PRUNED: Mark.PRUNED, TrialState.FAIL: Mark.FAILED}
_BY_ENDING = {Ending.YIELDED.value: Mark.MOVED, Ending.LOST.value: Mark.LOST}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A trial was on a device, from and to these seconds since the study's first flight.

    Its round is one of a `call`; `text` says more of it, as HTML.
    """

    number: int
    row: Row
    start_s: float
    end_s: float
    round: int
    call: str = ""
    mark: Mark | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What is drawn.

    Attributes:
        name: The study's.
        bars: One per flight and device, by start.
    """

    name: str
    bars: tuple[Bar, ...]

    @property
    def rows(self) -> list[Row]:
        """The devices from the top: node by node."""
        return sorted({bar.row for bar in self.bars})

    @property
    def duration_s(self) -> float:
        """From the first start to the last end; never 0."""
        return max((bar.end_s for bar in self.bars), default=0.0) or 1.0

    @property
    def round_starts(self) -> list[float]:
        """When a round of a call of `optimize` began, but for each call's first."""
        starts: dict[tuple[str, int], float] = {}
        firsts: dict[str, int] = {}
        for bar in self.bars:
            starts.setdefault((bar.call, bar.round), bar.start_s)
            firsts.setdefault(bar.call, bar.round)
        return [start_s for (call, number), start_s in starts.items() if number > firsts[call]]


def timeline_of(study: optuna.Study) -> Timeline:
    """What the study recorded of its trials; warns if none ran on a fleet."""
    check_that("study", study, is_a(optuna.Study), "be a study, as of optuna.load_study()")
    flights, nodes = flights_of(study), _Nodes(study)
    zero = min((few[0]["start"] for few in flights.values()), default=0.0)
    bars = [
        bar
        for trial in study.get_trials(deepcopy=False)
        for bar in _bars(trial, flights.get(trial.number, ()), zero, nodes)
    ]
    if not bars:
        message = "Your study does not have any flights: no trial ran on a fleet."
        compat.fleet_logger.warning(message)
    bars.sort(key=lambda bar: (bar.start_s, bar.number, bar.row[1]))
    return Timeline(name=study.study_name, bars=tuple(bars))


class _Nodes:
    """Which node a device was on; "" if all were on one."""

    def __init__(self, study: optuna.Study) -> None:
        self._stays: dict[tuple[str, int], list[tuple[float, str]]] = defaultdict(list)
        for key, records in compat.study_records(study, DEVICES_PREFIX).items():
            for record in records:  # a number is a device of its call: drivers may run at once
                stay = record["start"], record["node"]
                self._stays[key.partition(":")[0], record["device"]].append(stay)
        if len({node for own in self._stays.values() for _, node in own}) < 2:
            self._stays.clear()

    def at(self, call: str, device: int, time_s: float) -> str:
        of_device = sorted(self._stays.get((call, device), []))
        before = [stay for stay in of_device if stay[0] <= time_s] or of_device[:1]
        return before[-1][1] if before else ""


def _bars(
    trial: FrozenTrial, flights: Sequence[Mapping[str, Any]], zero: float, nodes: _Nodes
) -> Iterator[Bar]:
    for nth, flight in enumerate(flights, start=1):
        end = max(flight["start"], flight["end"])  # a clock may be set back
        start_s, end_s, is_last = flight["start"] - zero, end - zero, nth == len(flights)
        mark = (_BY_STATE.get(trial.state) if is_last else None) or _BY_ENDING.get(
            flight["ending"]
        )
        for device in flight["devices"]:
            node = nodes.at(flight["call"], device, flight["start"])
            lines = [
                *_about(trial),
                f"devices: {', '.join(map(str, flight['devices']))}",
                *([f"node: {html.escape(node)}"] if node else []),
                f"round: {flight['round']}",
                f"flight {nth} of {len(flights)}: {start_s:.1f} s to {end_s:.1f} s",
                f"waited for data: {flight['data_wait_s']:.1f} s, "
                f"probing: {flight['probing_s']:.1f} s",
                f"the flight ended: {flight['ending']}",
            ]
            yield Bar(
                number=trial.number,
                row=(node, device),
                start_s=start_s,
                end_s=end_s,
                round=flight["round"],
                call=flight["call"],
                mark=mark,
                text="<br>".join(lines),
            )


def _about(trial: FrozenTrial) -> list[str]:
    values = ", ".join(f"{value:.6g}" for value in trial.values or ()) or "none yet"
    params = (
        f"{html.escape(name)}: {html.escape(_short(value))}"
        for name, value in trial.params.items()
    )
    return [
        f"<b>trial {trial.number}</b> ({trial.state.name.lower()})",
        f"value: {values}",
        *params,
    ]


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


# -- the picture ----------------------------------------------------------------------------------

_INK, _GREY, _ALERT = "#222222", "#C8C8C8", "#B2182B"
_NO_FLIGHTS = "No flights are recorded: no trial of this study ran on a fleet"
_BAR_HEIGHT = 0.84  # of a row
_LONGEST_NAME = 24
_SYMBOLS = {Mark.FAILED: "x", Mark.MOVED: "triangle-right", Mark.LOST: "diamond"}
_HATCH = {
    "fgcolor": _INK,
    "fgopacity": 0.5,
    "fillmode": "overlay",
    "solidity": 0.12,
    "size": 9,
}

# Paul Tol's "light" scheme, then darker shades of it: told apart by colour-blind eyes, and dark
# text is readable on each. Neighbours, which often run at the same time, differ most.
_COLOURS = (
    *("#77AADD", "#EE8866", "#EEDD88", "#44BB99", "#FFAABB", "#99DDFF", "#BBCC33"),
    *("#6390BD", "#CF7252", "#CDBB60", "#379C80", "#DD8A9C", "#7ABFE0", "#9BAA22"),
)


def plot_timeline(study: optuna.Study) -> go.Figure:
    """Plot which trial was on which device when.

    Trials of all `optimize` calls on the study are shown, unfinished ones with the flights that
    have ended. Pruned flights are hatched; failed, moved and lost ones have a mark at their end.
    Where there are several nodes, the rows are grouped by them. Who points at a flight is told
    how long it waited for data.

    Args:
        study: A study whose trials ran on a fleet.

    Returns:
        A figure with one row per device; an empty one, with a note, if no trial ran on a fleet.
        Its `write_html` makes a file for a browser; `write_image` needs plotly's kaleido.
    """
    return figure_of(timeline_of(study))


def figure_of(timeline: Timeline) -> go.Figure:
    """Draw it; see `plot_timeline`."""
    import plotly.graph_objects as go

    if not timeline.bars:
        note = {"text": _NO_FLIGHTS, "showarrow": False, "font": {"size": 16}}
        hidden = {"visible": False}
        layout = {"annotations": [note], "xaxis": hidden, "yaxis": hidden}
        return go.Figure(layout={"template": "plotly_white", **layout})
    rows = {row: place for place, row in enumerate(timeline.rows)}
    traces = [*_bar_traces(timeline.bars, rows), *_mark_traces(timeline.bars, rows)]
    return go.Figure(data=traces, layout=_layout(timeline))


def _layout(timeline: Timeline) -> dict[str, Any]:
    rows = timeline.rows
    upright = {"type": "line", "layer": "below", "yref": "paper", "y0": 0, "y1": 1}
    upright |= {"name": "new round", "line": {"color": "#707070", "width": 1.5}}
    row_px = max(14, min(60, 1600 // len(rows)))  # of many, less: the picture stays usable
    return {
        "template": "plotly_white",
        "title": {"text": html.escape(_title(timeline))},
        "height": max(320, 140 + row_px * len(rows)),
        "margin": {"t": 70, "b": 60},
        "barmode": "overlay",
        "uniformtext": {"minsize": 9, "mode": "hide"},  # no number where it does not fit
        "showlegend": True,
        "xaxis": {
            "title": {"text": "time since the first start (s)"},
            "range": [0, timeline.duration_s * 1.01],
        },
        "yaxis": {
            "title": {"text": "device"},
            "tickvals": [*range(len(rows))],
            "ticktext": [*map(html.escape, _labels(rows))],
            "range": [len(rows) - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
        },
        # The first line explains all of them in the legend.
        "shapes": [
            {**upright, "x0": time_s, "x1": time_s, "showlegend": index == 0}
            for index, time_s in enumerate(timeline.round_starts)
        ],
    }


def _title(timeline: Timeline) -> str:
    """What the picture shows, with the study's name if it was given one."""
    trials, rows = {bar.number for bar in timeline.bars}, timeline.rows
    counts = {"trial": len(trials), "device": len(rows)}
    shown = " on ".join(f"{n} {thing}{'s' * (n != 1)}" for thing, n in counts.items())
    if (num_nodes := len({node for node, _ in rows})) > 1:
        shown += f" of {num_nodes} nodes"
    return shown if timeline.name.startswith("no-name-") else f"{timeline.name}: {shown}"


def _labels(rows: Sequence[Row]) -> Iterator[str]:
    """Numbers of the devices; the first of each node has its name too."""
    before = ""
    for node, device in rows:
        name = node if len(node) <= _LONGEST_NAME else f"{node[: _LONGEST_NAME - 1]}…"
        yield f"{name}  {device}" if node != before else str(device)
        before = node


def _bar_traces(bars: Sequence[Bar], rows: dict[Row, int]) -> Iterator[dict[str, Any]]:
    yield {
        "type": "bar",
        "orientation": "h",
        "showlegend": False,
        "width": _BAR_HEIGHT,
        "x": [bar.end_s - bar.start_s for bar in bars],
        "base": [bar.start_s for bar in bars],
        "y": [rows[bar.row] for bar in bars],
        "text": [str(bar.number) for bar in bars],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": _INK, "size": 13},
        "customdata": [bar.text for bar in bars],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {
            "color": [_COLOURS[bar.number % len(_COLOURS)] for bar in bars],
            "line": {"color": "white", "width": 1},
            "pattern": {"shape": ["/" * (bar.mark is Mark.PRUNED) for bar in bars], **_HATCH},
        },
    }
    if any(bar.mark is Mark.PRUNED for bar in bars):  # draws nothing, but explains the hatch
        marker = {"color": _GREY, "pattern": {"shape": "/", **_HATCH}}
        entry = {"x": [None], "y": [0], "name": Mark.PRUNED.value, "marker": marker}
        yield {"type": "bar", "orientation": "h", **entry}


def _mark_traces(bars: Sequence[Bar], rows: dict[Row, int]) -> Iterator[dict[str, Any]]:
    for mark, symbol in _SYMBOLS.items():
        if own := [bar for bar in bars if bar.mark is mark]:
            yield {
                "type": "scatter",
                "mode": "markers",
                "name": mark.value,
                "x": [bar.end_s for bar in own],
                "y": [rows[bar.row] for bar in own],
                "hoverinfo": "skip",
                "cliponaxis": False,
                "marker": {
                    "symbol": symbol,
                    "size": 11,
                    "color": _INK if mark is Mark.MOVED else _ALERT,
                    "line": {"color": "white", "width": 1},
                },
            }
