"""The timeline as a still picture for a README or a paper, drawn with matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import optuna

from optuna_fleet.arguments import check_that, is_a
from optuna_fleet.visualization import style
from optuna_fleet.visualization.bars import (
    Bar,
    Mark,
    bars_of,
    duration_s,
    first_start,
    round_starts,
)
from optuna_fleet.visualization.lane import Curve, Lane, lane_of, steps
from optuna_fleet.visualization.rows import Row, Stay, borders, in_order, labels_of, stays_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_PX, _DPI = 1600, 200
_LEFT_PX, _RIGHT_PX, _TOP_PX, _BOTTOM_PX = 112, 30, 104, 92
_CHARACTER_PX = 13  # of a label's
_SYMBOLS = {Mark.FAILED: "X", Mark.MOVED: ">", Mark.LOST: "D"}
_HATCH: dict[str, Any] = {"hatch": "////", "edgecolor": (0.13, 0.13, 0.13, 0.45), "linewidth": 0}
_ROUND_LINE: dict[str, Any] = {
    "color": style.ROUND_LINE,
    "linewidth": 0.9,
    "label": style.NEW_ROUND,
}


def save_timeline(study: optuna.Study, path: str | os.PathLike[str]) -> None:
    """Save the picture of `plot_timeline` to a file.

    Args:
        study: A study whose trials ran on a fleet.
        path: Where to write; the ending chooses the format, as ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    bars = bars_of(study)
    check_that("path", path, is_a(str, os.PathLike), "be where to write, as 'timeline.png'")
    stays = stays_of(study, first_start(study), duration_s(bars))
    save_bars(bars, study.study_name, path, stays, lane_of(study, len(_rows(bars, stays))))


def _rows(bars: Sequence[Bar], stays: Sequence[Stay]) -> list[Row]:
    return in_order([*(bar.row for bar in bars), *(stay.row for stay in stays)])


def save_bars(
    bars: Sequence[Bar],
    name: str,
    path: str | os.PathLike[str],
    stays: Sequence[Stay] = (),
    lane: Lane | None = None,
) -> None:
    """Save a picture of the bars, titled with a name; see `save_timeline`."""
    lane, order = lane or Lane(), _rows(bars, stays)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "`save_timeline` draws with matplotlib, which is not installed; "
            "install it with `pip install matplotlib`."
        ) from error

    height_px = _height_px(max(len(order), 1), lane)
    longest = max((len(label) for label in labels_of(order)), default=0)
    left_px = _LEFT_PX + _CHARACTER_PX * max(0, longest - 3)
    figure = Figure(figsize=(_WIDTH_PX / _DPI, height_px / _DPI), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = _empty_axes(figure, height_px, left_px)
    title = style.title_of(bars, name)
    axes.set_title(title, loc="left", y=1.0, pad=20, fontsize=9, parse_math=False)
    if bars:
        _draw(axes, bars, order, stays, lane)
    else:
        axes.set_axis_off()
    figure.savefig(path)


def _height_px(num_devices: int, lane: Lane) -> int:
    return _TOP_PX + _BOTTOM_PX + style.row_px(num_devices) * (num_devices + lane.rows)


def _empty_axes(figure: Figure, height_px: int, left_px: int) -> Axes:
    width = (_WIDTH_PX - left_px - _RIGHT_PX) / _WIDTH_PX
    height = (height_px - _TOP_PX - _BOTTOM_PX) / height_px
    axes = figure.add_axes((left_px / _WIDTH_PX, _BOTTOM_PX / height_px, width, height))
    axes.set_xlabel(style.TIME_LABEL, fontsize=8)
    axes.set_ylabel(style.DEVICE_LABEL, fontsize=8)
    axes.tick_params(labelsize=8, length=0, colors=style.INK)
    axes.tick_params(axis="x", length=3)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    return axes


def _draw(
    axes: Axes, bars: Sequence[Bar], order: Sequence[Row], stays: Sequence[Stay], lane: Lane
) -> None:
    rows = {row: place for place, row in enumerate(order)}
    axes.set_xlim(0, duration_s(bars) * 1.005)
    axes.set_ylim(len(rows) + lane.rows - 0.5, -0.5)
    every = -(-16 // style.row_px(len(rows)))  # rows per label
    has_lane = bool(lane.spans)
    axes.set_yticks(
        [*range(0, len(rows), every), *[lane.centre] * has_lane],
        labels=[*labels_of(order[::every]), *[style.LANE_LABEL] * has_lane],
        parse_math=False,
    )
    handles = [*_draw_stays(axes, stays, rows), *_draw_bars(axes, bars, rows)]
    for height in borders(order):
        axes.axhline(height, color=style.BORDER, linewidth=0.5, zorder=1)
    _draw_numbers(axes, bars, rows)
    for mark in _SYMBOLS:
        if own := [b for b in bars if b.mark is mark]:
            ends, places = [b.end_s for b in own], [rows[b.row] for b in own]
            handles += axes.plot(ends, places, label=mark.value, **_mark_style(mark))
    lines = [axes.axvline(time_s, zorder=1, **_ROUND_LINE) for time_s in round_starts(bars)]
    _add_legend(axes, [*handles, *lines[:1]], loc="lower left", bbox_to_anchor=(0, 1.0))
    if has_lane:
        _draw_lane(axes, lane)


def _add_legend(owner: Any, handles: Sequence[Any], **where: Any) -> None:
    owner.legend(
        handles=handles,
        ncols=len(handles),
        fontsize=7.5,
        frameon=False,
        borderpad=0.2,
        handlelength=1.6,
        columnspacing=1.4,
        borderaxespad=0.1,
        **where,
    )


def _draw_lane(axes: Axes, lane: Lane) -> None:
    handles: list[Any] = [
        axes.bar(
            [span.start for span in lane.spans],
            [-lane.height * curve.share(span) for span in lane.spans],
            width=[span.end - span.start for span in lane.spans],
            bottom=lane.bottom,
            align="edge",
            color=curve.colour,
            zorder=2,
            label=curve.value,
        )
        for curve in (Curve.BUSY, Curve.STALLED)
    ]
    nowhere = float("nan"), float("nan")
    corners = [(c[0], lane.place(c[1])) if c else nowhere for c in steps(lane.spans, Curve.QUEUE)]
    looks: dict[str, Any] = {"color": Curve.QUEUE.colour, "linewidth": 0.9, "zorder": 4}
    handles += axes.plot(*zip(*corners, strict=True), label=Curve.QUEUE.value, **looks)
    # To the right of the time's label, which makes room for it.
    axes.set_xlabel(style.TIME_LABEL, fontsize=8, loc="left")
    corner = (1 - _RIGHT_PX / _WIDTH_PX, 0)
    _add_legend(axes.figure, handles, loc="lower right", bbox_to_anchor=corner)


def _draw_stays(axes: Axes, stays: Sequence[Stay], rows: dict[Row, int]) -> list[Any]:
    if not stays:
        return []
    looks = {"height": 1.0, "color": style.THERE, "zorder": 0.5, "label": style.IS_THERE}
    return [_barh(axes, stays, rows, **looks)]


def _draw_bars(axes: Axes, bars: Sequence[Bar], rows: dict[Row, int]) -> list[Any]:
    """Draw them; return what explains them in the legend."""
    from matplotlib.patches import Patch

    colours = [style.colour_of(b.number) for b in bars]
    _barh(axes, bars, rows, color=colours, edgecolor="white", linewidth=0.5, zorder=2)
    handles = [Patch(facecolor=style.GREY, label="flight, with its trial's number")]
    if pruned := [b for b in bars if b.mark is Mark.PRUNED]:
        _barh(axes, pruned, rows, color="none", zorder=3, **_HATCH)
        handles.append(Patch(facecolor=style.GREY, label=Mark.PRUNED.value, **_HATCH))
    return handles


def _barh(axes: Axes, bars: Sequence[Bar | Stay], rows: dict[Row, int], **looks: Any) -> Any:
    return axes.barh(
        [rows[b.row] for b in bars],
        [b.end_s - b.start_s for b in bars],
        left=[b.start_s for b in bars],
        **{"height": style.BAR_HEIGHT, **looks},
    )


def _draw_numbers(axes: Axes, bars: Sequence[Bar], rows: dict[Row, int]) -> None:
    """Write the trial's number into each bar that is wide enough."""
    px_per_s = axes.get_position().width * _WIDTH_PX / duration_s(bars)
    size_pt = min(8.0, 0.6 * style.row_px(len(rows)) * 72 / _DPI)
    digit_px = 0.66 * size_pt * _DPI / 72
    for bar in bars:
        text = str(bar.number)
        if (bar.end_s - bar.start_s) * px_per_s < digit_px * len(text) + 8:
            continue
        backing = {"facecolor": style.colour_of(bar.number), "edgecolor": "none", "pad": 1}
        axes.text(
            (bar.start_s + bar.end_s) / 2,
            rows[bar.row],
            text,
            ha="center",
            va="center",
            fontsize=size_pt,
            color=style.INK,
            bbox=backing if bar.mark is Mark.PRUNED else None,
            zorder=5,
        )


def _mark_style(mark: Mark) -> dict[str, Any]:
    return {
        "linestyle": "none",
        "marker": _SYMBOLS[mark],
        "markersize": 6 if mark is not Mark.LOST else 5,
        "markerfacecolor": style.INK if mark is Mark.MOVED else style.ALERT,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
        "clip_on": False,
        "zorder": 6,
    }
