"""The view in a terminal, drawn with rich."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optuna_fleet.visualization.figure import colour_of
from optuna_fleet.visualization.live.view import Table, View

if TYPE_CHECKING:
    from rich.console import RenderableType

_NUMBERS = {"trial", "for", "epoch", "samples/s", "last value", "value", "took"}


def rendered(view: View) -> RenderableType:
    """What rich prints."""
    from rich.console import Group
    from rich.table import Table as Grid
    from rich.text import Text

    title = Text.assemble(
        (view.title, "bold"), "  ", (view.condition, "bold red" if view.is_alarming else "")
    )
    facts = Grid.grid(padding=(0, 2))
    for name, text in view.facts:
        facts.add_row(Text(name, "dim"), Text(text))
    blank = Text("")
    tables = [part for table in view.tables for part in (blank, _table(table))]
    return Group(title, facts, *tables, blank, Text(f"as of {view.time}", "dim"))


def _table(table: Table) -> RenderableType:
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in table.headings:
        is_last = heading == "parameters"
        grid.add_column(
            heading,
            justify="right" if heading in _NUMBERS else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if is_last else None,
        )
    for row, trial in zip(table.rows, table.trials, strict=True):
        first = Text(row[0], "dim" if trial is None else f"bold {colour_of(trial)}")
        grid.add_row(first, *(Text(cell) for cell in row[1:]))
    return grid
