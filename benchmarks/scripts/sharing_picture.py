"""The picture of `sharing.py`'s rows.

python benchmarks/scripts/sharing_picture.py rows.jsonl sharing.png  # from what it printed
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

SYSTEMS = {
    "dataloader": ("a DataLoader each", "#BBBBBB", "o"),
    "tensorsocket": ("TensorSocket (repaired)", "#EE8866", "s"),
    "ours": ("SharedPipeline", "#4477AA", "D"),
}
MANY_TRIALS = 8
SAVED = {
    "one epoch": "one epoch,\n8 trials",
    "one epoch, fastest decoder": "fastest decoder,\n8 trials",
    "five epochs": "five epochs,\n8 trials",
    "pruning sweep": "pruning sweep,\n24 trials",
}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the CPU time per sample over the number of trials, and what is saved in all."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 3.6), dpi=150, layout="constrained", width_ratios=(1, 1.1)
    )
    _draw_times(left, [row for row in rows if row["row"] == "one epoch"])
    _draw_savings(right, rows)
    figure.savefig(path)
    plt.close(figure)


def _draw_times(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for system, (label, colour, marker) in SYSTEMS.items():
        points = sorted((r["trials"], r["value"]) for r in rows if r["system"] == system)
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    trials = sorted({row["trials"] for row in rows})
    axes.set_xticks(trials, map(str, trials))
    axes.set_xlabel("trials at once")
    axes.set_ylabel("CPU µs per sample and trial")
    axes.set_title("Feeding trials for one epoch", fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.2)
    if rows:
        axes.legend(frameon=False, fontsize=8)


def _draw_savings(axes: Axes, rows: list[dict[str, Any]]) -> None:
    saved: dict[str, float] = {}
    for row in rows:
        name, _, is_ratio = row["row"].partition(": times less")
        is_ours = row["system"].startswith("ours")  # with our crop, which comes last, if measured
        if is_ratio and is_ours and name in SAVED and row["trials"] >= MANY_TRIALS:
            saved[SAVED[name]] = row["value"]
    bars = axes.barh(list(saved), list(saved.values()), color=SYSTEMS["ours"][1])
    axes.bar_label(bars, fmt="%.1f x", padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("times less CPU time than a DataLoader per trial")
    axes.set_title("What one preprocessing saves", fontsize=10)


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    draw([json.loads(line) for line in lines if line.startswith("{")], Path(sys.argv[2]))
