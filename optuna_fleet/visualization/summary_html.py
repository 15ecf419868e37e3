"""A sweep's summary as notebooks show it: its sentences, and how each device's time went."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from optuna_fleet.visualization.figure import GREY

if TYPE_CHECKING:
    from optuna_fleet.executor.call.summary import FleetSummary

_MOST_DEVICES = 64
_TRAINED, _WAITED = "#44BB99", "#EE8866"
_BAR = "display:inline-block;height:0.8em;vertical-align:middle"


def summary_html(summary: FleetSummary, sentences: Sequence[str]) -> str:
    """The summary for a notebook."""
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences[1:])
    devices = sorted(summary.there_s)[:_MOST_DEVICES]
    bars = "".join(_row(summary, device) for device in devices)
    legend = " ".join(
        f'<span style="{_BAR};width:0.8em;background:{colour}"></span> {html.escape(text)}'
        for text, colour in (
            ("on a trial", _TRAINED),
            ("of that, waited for data", _WAITED),
            ("idle", GREY),
        )
    )
    return (
        f"<p><b>{html.escape(sentences[0])}</b></p><ul>{items}</ul>"
        f"<table><tr><th>device</th><th>{legend}</th></tr>{bars}</table>"
    )


def _row(summary: FleetSummary, device: int) -> str:
    there_s = summary.there_s[device]
    busy_s = min(summary.busy_s.get(device, 0.0), there_s)
    waited_s = min(summary.waited_s.get(device, 0.0), busy_s)
    parts = ((busy_s - waited_s, _TRAINED), (waited_s, _WAITED), (there_s - busy_s, GREY))
    spans = "".join(
        f'<span style="{_BAR};width:{24 * seconds / there_s:.2f}em;background:{colour}"></span>'
        for seconds, colour in parts
        if there_s > 0
    )
    text = f"{busy_s:.1f} of {there_s:.1f} s, {waited_s:.1f} s of them for data"
    return f'<tr><td>{device}</td><td title="{text}" style="text-align:left">{spans}</td></tr>'
