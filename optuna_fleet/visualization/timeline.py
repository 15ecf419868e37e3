"""The timeline as an interactive figure, drawn with plotly."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import optuna

from optuna_fleet.visualization import style
from optuna_fleet.visualization.bars import (
    Bar,
    Mark,
    bars_of,
    duration_s,
    first_start,
    numbers_of,
    round_starts,
)
from optuna_fleet.visualization.lane import Curve, Lane, hover_text, lane_of, steps
from optuna_fleet.visualization.rows import Row, Stay, borders, in_order, labels_of, stays_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

_NO_FLIGHTS: dict[str, Any] = {
    "template": "plotly_white",
    "annotations": [{"text": style.NO_FLIGHTS, "showarrow": False, "font": {"size": 16}}],
    "xaxis": {"visible": False},
    "yaxis": {"visible": False},
}
_MOST_LEGEND_ENTRIES = 20
_FIRST = 1  # legend rank: the marks come before the trials
_SYMBOLS = {Mark.FAILED: "x", Mark.MOVED: "triangle-right", Mark.LOST: "diamond"}
_HATCH = {
    "fgcolor": style.INK,
    "fgopacity": 0.5,
    "solidity": 0.12,
    "size": 9,
    "fillmode": "overlay",
}
_ROUND_LINE = {
    "type": "line",
    "layer": "below",
    "yref": "paper",
    "y0": 0,
    "y1": 1,
    "line": {"color": style.ROUND_LINE, "width": 1.5},
    "name": style.NEW_ROUND,
    "legendrank": _FIRST,
}
_BORDER = {
    "type": "line",
    "layer": "below",
    "xref": "paper",
    "x0": 0,
    "x1": 1,
    "line": {"color": style.BORDER, "width": 1},
    "showlegend": False,
}


def plot_timeline(study: optuna.Study) -> go.Figure:
    """Plot which trial was on which device when.

    Trials of all `optimize` calls on the study are shown, unfinished ones with the flights that
    have ended. Pruned flights are hatched; failed, moved and lost ones have a mark at their end.
    Where there are several nodes, the rows are grouped by them, and grey where a device was there.
    The lane at the bottom shows the shared pipeline: how busy its preprocessors were, for how much
    of their time trials waited for data, and how full the queues before them were.

    Args:
        study: A study whose trials ran on a fleet.

    Returns:
        A figure with one row per device; an empty one, with a note, if no trial ran on a fleet.
    """
    import plotly.graph_objects as go

    bars = bars_of(study)
    if not bars:
        return go.Figure(layout=_NO_FLIGHTS)
    stays = stays_of(study, first_start(study), duration_s(bars))
    order = in_order([*(bar.row for bar in bars), *(stay.row for stay in stays)])
    rows = {row: place for place, row in enumerate(order)}
    lane = lane_of(study, len(rows))
    figure = go.Figure(layout=_layout(bars, order, study.study_name, lane))
    traces = [*_stay_traces(stays, rows), *_bar_traces(bars, rows)]
    figure.add_traces([go.Bar(**trace) for trace in traces])
    lines = [*_mark_traces(bars, rows), *_lane_traces(lane)]
    figure.add_traces([go.Scatter(**trace, legendrank=_FIRST) for trace in lines])
    return figure


def _layout(
    bars: Sequence[Bar], rows: Sequence[Row], study_name: str, lane: Lane
) -> dict[str, Any]:
    num_rows = len(rows) + lane.rows
    return {
        "template": "plotly_white",
        "title": {"text": html.escape(style.title_of(bars, study_name))},
        "height": max(320, 140 + style.row_px(len(rows)) * num_rows),
        "margin": {"t": 70, "b": 60},
        "barmode": "overlay",
        "uniformtext": {"minsize": 9, "mode": "hide"},  # no number where it does not fit
        "showlegend": True,
        "xaxis": {"title": {"text": style.TIME_LABEL}, "range": [0, duration_s(bars) * 1.01]},
        "yaxis": {
            "title": {"text": style.DEVICE_LABEL},
            "tickvals": [*range(len(rows)), *[lane.centre] * bool(lane.spans)],
            "ticktext": [*_ticks(rows), *[style.LANE_LABEL] * bool(lane.spans)],
            "range": [num_rows - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
        },
        # The first line explains all of them in the legend.
        "shapes": [
            *(
                {**_ROUND_LINE, "x0": time_s, "x1": time_s, "showlegend": index == 0}
                for index, time_s in enumerate(round_starts(bars))
            ),
            *({**_BORDER, "y0": height, "y1": height} for height in borders(rows)),
        ],
    }


def _ticks(rows: Sequence[Row]) -> list[str]:
    return [html.escape(label) for label in labels_of(rows)]


def _stay_traces(stays: Sequence[Stay], rows: dict[Row, int]) -> list[dict[str, Any]]:
    if not stays:
        return []
    return [
        {
            "orientation": "h",
            "width": 1.0,
            "x": [stay.end_s - stay.start_s for stay in stays],
            "base": [stay.start_s for stay in stays],
            "y": [rows[stay.row] for stay in stays],
            "name": style.IS_THERE,
            "hoverinfo": "skip",
            "legendrank": _FIRST,
            "marker": {"color": style.THERE, "line": {"width": 0}},
        }
    ]


def _bar_traces(bars: Sequence[Bar], rows: dict[Row, int]) -> list[dict[str, Any]]:
    numbers = numbers_of(bars)
    if len(numbers) > _MOST_LEGEND_ENTRIES:  # one trace draws faster than hundreds
        traces = [{**_bar_trace(bars, rows), "showlegend": False}]
    else:
        # The legend shows a trial as its trace's first bar, so the last flight comes first.
        by_trial = {n: [b for b in reversed(bars) if b.number == n] for n in numbers}
        traces = [{**_bar_trace(own, rows), "name": f"trial {n}"} for n, own in by_trial.items()]
    if any(b.mark is Mark.PRUNED for b in bars):  # draws nothing, but explains the hatch
        marker = {"color": style.GREY, "pattern": {"shape": "/", **_HATCH}}
        entry = {"x": [None], "y": [0], "name": Mark.PRUNED.value, "marker": marker}
        traces.append({"orientation": "h", "legendrank": _FIRST, **entry})
    return traces


def _bar_trace(bars: Sequence[Bar], rows: dict[Row, int]) -> dict[str, Any]:
    return {
        "orientation": "h",
        "width": style.BAR_HEIGHT,
        "x": [b.end_s - b.start_s for b in bars],
        "base": [b.start_s for b in bars],
        "y": [rows[b.row] for b in bars],
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
            "pattern": {"shape": ["/" * (b.mark is Mark.PRUNED) for b in bars], **_HATCH},
        },
    }


def _mark_traces(bars: Sequence[Bar], rows: dict[Row, int]) -> Iterator[dict[str, Any]]:
    for mark, symbol in _SYMBOLS.items():
        if own := [b for b in bars if b.mark is mark]:
            yield {
                "mode": "markers",
                "name": mark.value,
                "x": [b.end_s for b in own],
                "y": [rows[b.row] for b in own],
                "hoverinfo": "skip",
                "cliponaxis": False,
                "marker": {
                    "symbol": symbol,
                    "size": 11,
                    "color": style.INK if mark is Mark.MOVED else style.ALERT,
                    "line": {"color": "white", "width": 1},
                },
            }


def _lane_traces(lane: Lane) -> list[dict[str, Any]]:
    if not lane.spans:
        return []
    return [_lane_area(lane, Curve.BUSY), _lane_area(lane, Curve.STALLED), _lane_line(lane)]


def _lane_area(lane: Lane, curve: Curve) -> dict[str, Any]:
    """One rectangle for each span."""
    tops = [lane.place(curve.share(span)) for span in lane.spans]
    return {
        "mode": "lines",
        "name": curve.value,
        "x": [x for s in lane.spans for x in (s.start, s.start, s.end, s.end, s.start, None)],
        "y": [y for t in tops for y in (lane.bottom, t, t, lane.bottom, lane.bottom, None)],
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
        *([f"node: {html.escape(bar.node)}"] if bar.node else []),
        f"round: {bar.round}",
        f"flight {bar.flight} of {bar.num_flights}: {bar.start_s:.1f} s to {bar.end_s:.1f} s",
        f"waited for data: {bar.data_wait_s:.1f} s, probing: {bar.probing_s:.1f} s",
        f"the flight ended: {bar.ending}",
    ]
    return "<br>".join(lines)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
