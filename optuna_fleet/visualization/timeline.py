"""The timeline as an interactive figure, drawn with plotly."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import optuna

from optuna_fleet.visualization import style
from optuna_fleet.visualization.bars import (
    Bar,
    Mark,
    bars_of,
    devices_of,
    duration_s,
    numbers_of,
    round_starts,
)
from optuna_fleet.visualization.lane import Curve, Lane, hover_text, lane_of, steps

if TYPE_CHECKING:
    import plotly.graph_objects as go

_NOTE = {"text": style.NO_FLIGHTS, "showarrow": False, "font": {"size": 16}}
_NO_AXES = {"xaxis": {"visible": False}, "yaxis": {"visible": False}}
_MOST_LEGEND_ENTRIES = 20
_FIRST = 1  # legend rank: the marks come before the trials
_SYMBOLS = {Mark.FAILED: "x", Mark.MOVED: "triangle-right", Mark.LOST: "diamond"}


def plot_timeline(study: optuna.Study) -> go.Figure:
    """Plot which trial was on which device when.

    Trials of all `optimize` calls on the study are shown, unfinished ones with the flights that
    have ended. Pruned flights are hatched; failed, moved and lost ones have a mark at their end.
    The lane at the bottom shows the shared pipeline: how busy its preprocessors were, for how much
    of their time trials waited for data, and how full the queues before them were.

    Args:
        study: A study whose trials ran on a fleet.

    Returns:
        A figure with one row per device; an empty one, with a note, if nothing has flown.
    """
    import plotly.graph_objects as go

    bars = bars_of(study)
    if not bars:
        return go.Figure(layout={"template": "plotly_white", "annotations": [_NOTE], **_NO_AXES})
    rows = {device: row for row, device in enumerate(devices_of(bars))}
    lane = lane_of(study, len(rows))
    figure = go.Figure(layout=_layout(bars, study.study_name, lane))
    figure.add_traces([go.Bar(**trace) for trace in _bar_traces(bars, rows)])
    figure.add_traces([go.Scatter(**trace) for trace in _mark_traces(bars, rows)])
    figure.add_traces([go.Scatter(**trace) for trace in _lane_traces(lane)])
    figure.update_layout(shapes=_round_lines(bars))
    return figure


def _layout(bars: Sequence[Bar], study_name: str, lane: Lane) -> dict[str, Any]:
    devices = devices_of(bars)
    num_rows = len(devices) + lane.rows
    return {
        "template": "plotly_white",
        "title": {"text": html.escape(style.title_of(bars, study_name))},
        "height": max(320, 140 + style.row_px(len(devices)) * num_rows),
        "margin": {"t": 70, "b": 60},
        "barmode": "overlay",
        "uniformtext": {"minsize": 9, "mode": "hide"},  # no number where it does not fit
        "showlegend": True,
        "xaxis": {"title": {"text": style.TIME_LABEL}, "range": [0, duration_s(bars) * 1.01]},
        "yaxis": {
            "title": {"text": style.DEVICE_LABEL},
            "tickvals": [*range(len(devices)), *[lane.centre] * bool(lane.spans)],
            "ticktext": [*map(str, devices), *[style.LANE_LABEL] * bool(lane.spans)],
            "range": [num_rows - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
        },
    }


def _bar_traces(bars: Sequence[Bar], rows: dict[int, int]) -> list[dict[str, Any]]:
    numbers = numbers_of(bars)
    pruned = [b for b in bars if b.mark is Mark.PRUNED]
    if len(numbers) > _MOST_LEGEND_ENTRIES:  # one trace draws faster than hundreds
        traces = [{**_bar_trace(bars, rows), "showlegend": False}]
    else:
        # The legend shows a trial as its trace's first bar, so the last flight comes first.
        by_trial = {n: [b for b in reversed(bars) if b.number == n] for n in numbers}
        traces = [{**_bar_trace(own, rows), "name": f"trial {n}"} for n, own in by_trial.items()]
    return traces + [_pruned_entry()] * bool(pruned)


def _bar_trace(bars: Sequence[Bar], rows: dict[int, int]) -> dict[str, Any]:
    return {
        "orientation": "h",
        "width": style.BAR_HEIGHT,
        "x": [b.end_s - b.start_s for b in bars],
        "base": [b.start_s for b in bars],
        "y": [rows[b.device] for b in bars],
        "text": [str(b.number) for b in bars],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": style.INK, "size": 13},
        "customdata": [_hover_text(b) for b in bars],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {
            "color": [style.colour_of(b.number) for b in bars],
            "line": {"color": "white", "width": 1},
            "pattern": _hatch(["/" if b.mark is Mark.PRUNED else "" for b in bars]),
        },
    }


def _pruned_entry() -> dict[str, Any]:
    """Draws nothing, but explains the hatch in the legend."""
    marker = {"color": style.GREY, "pattern": _hatch("/")}
    return {
        "orientation": "h",
        "x": [None],
        "y": [0],
        "name": Mark.PRUNED.value,
        "legendrank": _FIRST,
        "marker": marker,
    }


def _hatch(shape: str | list[str]) -> dict[str, Any]:
    return {
        "shape": shape,
        "fgcolor": style.INK,
        "fgopacity": 0.5,
        "solidity": 0.12,
        "size": 9,
        "fillmode": "overlay",
    }


def _round_lines(bars: Sequence[Bar]) -> list[dict[str, Any]]:
    """Lines behind the bars; the first of them explains them in the legend."""
    line = {"color": style.ROUND_LINE, "width": 1.5}
    return [
        {
            "type": "line",
            "layer": "below",
            "yref": "paper",
            "x0": start.time_s,
            "x1": start.time_s,
            "y0": 0,
            "y1": 1,
            "line": line,
            "name": style.NEW_ROUND,
            "legendrank": _FIRST,
            "showlegend": index == 0,
        }
        for index, start in enumerate(round_starts(bars))
    ]


def _mark_traces(bars: Sequence[Bar], rows: dict[int, int]) -> list[dict[str, Any]]:
    marked = {mark: [b for b in bars if b.mark is mark] for mark in _SYMBOLS}
    return [
        {
            "mode": "markers",
            "name": mark.value,
            "legendrank": _FIRST,
            "x": [b.end_s for b in own],
            "y": [rows[b.device] for b in own],
            "hoverinfo": "skip",
            "cliponaxis": False,
            "marker": {
                "symbol": _SYMBOLS[mark],
                "size": 11,
                "color": style.INK if mark is Mark.MOVED else style.ALERT,
                "line": {"color": "white", "width": 1},
            },
        }
        for mark, own in marked.items()
        if own
    ]


def _lane_traces(lane: Lane) -> list[dict[str, Any]]:
    if not lane.spans:
        return []
    return [_lane_area(lane, Curve.BUSY), _lane_area(lane, Curve.STALLED), _lane_line(lane)]


def _lane_area(lane: Lane, curve: Curve) -> dict[str, Any]:
    """One rectangle for each span."""
    return {
        "mode": "lines",
        "name": curve.value,
        "legendrank": _FIRST,
        "x": [x for s in lane.spans for x in (s.start, s.start, s.end, s.end, s.start, None)],
        "y": [
            y
            for top in (lane.place(curve.share(span)) for span in lane.spans)
            for y in (lane.bottom, top, top, lane.bottom, lane.bottom, None)
        ],
        "fill": "toself",
        "fillcolor": curve.colour,
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _lane_line(lane: Lane) -> dict[str, Any]:
    corners = steps(lane.spans, Curve.QUEUE)
    texts = iter([text for s in lane.spans for text in [hover_text(s)] * 2])
    return {
        "mode": "lines",
        "name": Curve.QUEUE.value,
        "legendrank": _FIRST,
        "x": [corner and corner[0] for corner in corners],
        "y": [corner and lane.place(corner[1]) for corner in corners],
        "customdata": [corner and next(texts) for corner in corners],
        "hovertemplate": "%{customdata}<extra></extra>",
        "line": {"color": Curve.QUEUE.colour, "width": 1.5},
    }


def _hover_text(bar: Bar) -> str:
    values = ", ".join(f"{value:.6g}" for value in bar.values) or "none yet"
    lines = [
        f"<b>trial {bar.number}</b> ({bar.state.name.lower()})",
        f"value: {values}",
        *(f"{html.escape(name)}: {html.escape(_short(value))}" for name, value in bar.params),
        f"devices: {', '.join(map(str, bar.devices))}",
        f"round: {bar.round}",
        f"flight {bar.flight} of {bar.num_flights}: {bar.start_s:.1f} s to {bar.end_s:.1f} s",
        f"waited for data: {bar.data_wait_s:.1f} s, probing: {bar.probing_s:.1f} s",
        f"the flight ended: {bar.ending}",
    ]
    return "<br>".join(lines)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
