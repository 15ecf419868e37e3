"""The timeline as a still picture for a README or a paper: the figure, drawn with matplotlib."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import optuna

from optuna_fleet.arguments import check_that, is_a
from optuna_fleet.visualization.figure import GREY, INK, figure_of, row_px
from optuna_fleet.visualization.timeline import Timeline, timeline_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_PX, _DPI = 1600, 200
_LEFT_PX, _RIGHT_PX, _TOP_PX, _BOTTOM_PX = 112, 30, 104, 92
_CHARACTER_PX = 13  # of a label's
_SYMBOLS = {"x": "X", "triangle-right": ">", "diamond": "D"}
_HATCH: dict[str, Any] = {"hatch": "////", "edgecolor": (0.13, 0.13, 0.13, 0.45), "linewidth": 0}
_Trace = Mapping[str, Any]


def save_timeline(study: optuna.Study, path: str | os.PathLike[str]) -> None:
    """Save the picture of `plot_timeline` to a file.

    Args:
        study: A study whose trials ran on a fleet.
        path: Where to write; the ending chooses the format, as ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    timeline = timeline_of(study)
    check_that("path", path, is_a(str, os.PathLike), "be where to write, as 'timeline.png'")
    save(timeline, path)


def save(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Save a picture; see `save_timeline`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "`save_timeline` draws with matplotlib, which is not installed; "
            "install it with `pip install matplotlib`."
        ) from error

    drawn: dict[str, Any] = figure_of(timeline)
    layout = drawn["layout"]
    num_rows = layout["yaxis"]["range"][0] + 0.5 if timeline.bars else 1
    row = row_px(len(timeline.rows))
    height_px = _TOP_PX + _BOTTOM_PX + row * num_rows
    figure = Figure(figsize=(_WIDTH_PX / _DPI, height_px / _DPI), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    if timeline.bars:
        _draw(figure, height_px, row, drawn)
    else:
        axes = _empty_axes(figure, height_px, _LEFT_PX, layout["annotations"][0]["text"])
        axes.set_axis_off()
    figure.savefig(path)


def _draw(figure: Figure, height_px: float, row: int, drawn: Mapping[str, Any]) -> None:
    layout, traces = drawn["layout"], drawn["data"]
    horizontal, vertical = layout["xaxis"], layout["yaxis"]
    labels = [html.unescape(label) for label in vertical["ticktext"]]
    longest = max(len(label) for label in labels)
    left_px = _LEFT_PX + _CHARACTER_PX * max(0, longest - 3)
    axes = _empty_axes(figure, height_px, left_px, html.unescape(layout["title"]["text"]))
    end_s = horizontal["range"][1] / 1.01 * 1.005
    axes.set_xlim(0, end_s)
    axes.set_ylim(*vertical["range"])
    ticks = list(zip(vertical["tickvals"], labels, strict=True))
    every = -(-16 // row)  # rows per label
    shown = [tick for n, tick in enumerate(ticks) if n % every == 0 or n == len(ticks) - 1]
    axes.set_yticks([y for y, _ in shown], labels=[label for _, label in shown], parse_math=False)
    axes.set_xlabel(horizontal["title"]["text"], fontsize=8)
    axes.set_ylabel(vertical["title"]["text"], fontsize=8)
    above, below = _handles(axes, traces, row, (_WIDTH_PX - left_px - _RIGHT_PX) / end_s)
    above += _shapes(axes, layout["shapes"])
    _add_legend(axes, above, loc="lower left", bbox_to_anchor=(0, 1.0))
    if below:  # to the right of the time's label, which makes room for it
        axes.set_xlabel(horizontal["title"]["text"], fontsize=8, loc="left")
        corner = (1 - _RIGHT_PX / _WIDTH_PX, 0)
        _add_legend(figure, below, loc="lower right", bbox_to_anchor=corner)


def _empty_axes(figure: Figure, height_px: float, left_px: int, title: str) -> Axes:
    width = (_WIDTH_PX - left_px - _RIGHT_PX) / _WIDTH_PX
    height = (height_px - _TOP_PX - _BOTTOM_PX) / height_px
    axes = figure.add_axes((left_px / _WIDTH_PX, _BOTTOM_PX / height_px, width, height))
    axes.set_title(title, loc="left", y=1.0, pad=20, fontsize=9, parse_math=False)
    axes.tick_params(labelsize=8, length=0, colors=INK)
    axes.tick_params(axis="x", length=3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return axes


def _handles(
    axes: Axes, traces: Sequence[_Trace], row: int, px_per_s: float
) -> tuple[list[Any], list[Any]]:
    """Draw the traces; what explains them above the picture, and below it."""
    from matplotlib.patches import Patch

    above: list[Any] = []
    below: list[Any] = []
    trials = False
    for trace in traces:
        if trace["type"] == "scatter":
            (above if trace["mode"] == "markers" else below).append(_scatter(axes, trace))
        elif trace["x"] == [None]:
            above.append(Patch(facecolor=GREY, label=trace["name"], **_HATCH))
        elif "text" not in trace:
            above.append(_barh(axes, trace, zorder=0.5, label=trace["name"]))
        else:
            if not trials:
                above.append(Patch(facecolor=GREY, label="flight, with its trial's number"))
            trials = True
            _barh(axes, trace, edgecolor="white", linewidth=0.5, zorder=2)
            _draw_pruned(axes, trace)
            _draw_numbers(axes, trace, row, px_per_s)
    return above, below


def _add_legend(owner: Any, handles: Sequence[Any], **where: Any) -> None:
    is_full = len(handles) > 6  # all there are, which need the whole width
    owner.legend(
        handles=handles,
        ncols=len(handles),
        fontsize=7.5,
        frameon=False,
        borderpad=0.2,
        handlelength=1.1 if is_full else 1.6,
        columnspacing=0.9 if is_full else 1.4,
        borderaxespad=0.1,
        **where,
    )


def _barh(axes: Axes, trace: _Trace, **looks: Any) -> Any:
    looks = {"color": trace["marker"]["color"], **looks}
    return axes.barh(trace["y"], trace["x"], left=trace["base"], height=trace["width"], **looks)


def _draw_pruned(axes: Axes, trace: _Trace) -> None:
    is_hatched = [bool(shape) for shape in trace["marker"]["pattern"]["shape"]]
    hatched = {
        name: [value for value, is_so in zip(trace[name], is_hatched, strict=True) if is_so]
        for name in ("x", "y", "base")
    }
    _barh(axes, {**trace, **hatched}, color="none", zorder=3, **_HATCH)


def _draw_numbers(axes: Axes, trace: _Trace, row: int, px_per_s: float) -> None:
    """Write the trial's number into each bar that is wide enough."""
    size_pt = min(8.0, 0.6 * row * 72 / _DPI)
    digit_px = 0.66 * size_pt * _DPI / 72
    marker = trace["marker"]
    shown = (trace["x"], trace["base"], trace["y"], trace["text"], marker["color"])
    for length, start, y, text, colour, hatch in zip(
        *shown, marker["pattern"]["shape"], strict=True
    ):
        if length * px_per_s >= digit_px * len(text) + 8:
            backing = {"facecolor": colour, "edgecolor": "none", "pad": 1} if hatch else None
            looks: dict[str, Any] = {"fontsize": size_pt, "color": INK, "bbox": backing}
            axes.text(start + length / 2, y, text, ha="center", va="center", zorder=5, **looks)


def _scatter(axes: Axes, trace: _Trace) -> Any:
    xs, ys = ([math.nan if v is None else v for v in trace[name]] for name in ("x", "y"))
    if trace["mode"] == "markers":
        looks: dict[str, Any] = _marker(trace["marker"])
    elif "fill" in trace:
        looks = {"color": trace["fillcolor"], "linewidth": 0, "zorder": 2}
        return axes.fill(xs, ys, label=trace["name"], **looks)[0]
    else:
        looks = {"color": trace["line"]["color"], "linewidth": 0.9, "zorder": 4}
    return axes.plot(xs, ys, label=trace["name"], **looks)[0]


def _marker(marker: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "linestyle": "none",
        "marker": _SYMBOLS[marker["symbol"]],
        "markersize": 5 if marker["symbol"] == "diamond" else 6,
        "markerfacecolor": marker["color"],
        "markeredgecolor": marker["line"]["color"],
        "markeredgewidth": 0.6,
        "clip_on": False,
        "zorder": 6,
    }


def _shapes(axes: Axes, shapes: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Draw the lines; the one that explains them, if one does."""
    explained = []
    for shape in shapes:
        looks = {"color": shape["line"]["color"], "zorder": 1}
        if "name" in shape:
            line = axes.axvline(shape["x0"], linewidth=0.9, label=shape["name"], **looks)
            explained.append(line)
        else:
            axes.axhline(shape["y0"], linewidth=0.5, **looks)
    return explained[:1]
