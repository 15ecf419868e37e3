"""A snapshot in a terminal: facts, and tables, drawn with rich."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optuna_fleet.sampler_bridge.records import DeviceSpan
from optuna_fleet.visualization.snapshot import Condition, Run, Snapshot
from optuna_fleet.visualization.timeline import colour_of

_LONGEST = 48
_MOST_SHOWN = 12
_NOTHING = "-"
_IS_OVER = {Condition.DONE, Condition.INTERRUPTED, Condition.FAILED}
_NUMBERS = {"trial", "for", "epoch", "samples/s", "last value", "value", "took"}


def rendered(snapshot: Snapshot, problem: str = "") -> Group:
    """What rich prints; with what keeps it from being newer."""
    alarms = (Condition.SILENT, Condition.FAILED)
    style = "bold red" if snapshot.condition in alarms or problem else ""
    name = printable(snapshot.study_name)
    facts = Table.grid(padding=(0, 2))
    for title, text in _facts(snapshot, problem).items():
        if text:
            facts.add_row(Text(title, "dim"), Text(text))
    parts: list[RenderableType] = [
        Text.assemble((name, "bold"), "  ", (_condition(snapshot), style)),
        facts,
    ]
    for table in (_on_devices(snapshot), _recent(snapshot)):
        if table.rows:
            parts += [Text(""), table]
    return Group(*parts, Text(""), Text(f"as of {_clock(snapshot.time, snapshot.time)}", "dim"))


def printable(value: object, longest: int = _LONGEST) -> str:
    """Text without what would control a terminal, and not too long."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def duration(seconds: float) -> str:
    """Seconds in the two largest units that say something."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60)} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers, those that follow each other as one: 0-3, 5."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


# -- facts ----------------------------------------------------------------------------------------


def _condition(snapshot: Snapshot) -> str:
    text = snapshot.condition.value
    if snapshot.condition is Condition.RUNNING and snapshot.began is not None:
        return f"{text} for {duration(snapshot.time - snapshot.began)}"
    if snapshot.condition is Condition.SILENT and snapshot.noted is not None:
        silence = duration(snapshot.time - snapshot.noted)
        return f"{text} from its driver for {silence}: this is how it was then"
    if snapshot.condition in _IS_OVER and snapshot.noted is not None:
        return f"{text} since {_clock(snapshot.noted, snapshot.time)}"
    return text


def _facts(snapshot: Snapshot, problem: str) -> dict[str, str]:
    return {
        "trials": _trials(snapshot),
        "best": _best(snapshot.best),
        "devices": _devices(snapshot),
        "waiting for devices": _numbers(snapshot.waiting),
        "running elsewhere, or left": _numbers(snapshot.elsewhere),
        "expected end": _expected(snapshot),
        "storage": problem,
    }


def _trials(snapshot: Snapshot) -> str:
    counts = Counter(trial.state for trial in snapshot.trials.values())
    words = [f"{counts[state]} {state.name.lower()}" for state in TrialState if counts[state]]
    if snapshot.condition is Condition.RUNNING and snapshot.num_to_come:
        words.append(f"{snapshot.num_to_come} to come")
    return ", ".join(words)


def _best(best: Sequence[FrozenTrial]) -> str:
    if len(best) > 1:
        numbers = _numbers(trial.number for trial in best)
        return f"{len(best)} trials that no other is better than: {numbers}"
    return "".join(f"trial {t.number}: {_values(t.values)} with {_params(t.params)}" for t in best)


def _devices(snapshot: Snapshot) -> str:
    if not snapshot.devices:
        return ""
    nodes = sorted({device.node for device in snapshot.devices})
    kinds = ", ".join(sorted({device.kind for device in snapshot.devices}))
    where = f" of {len(nodes)} nodes" if len(nodes) > 1 else f" of {printable(nodes[0])}"
    return f"{len(snapshot.devices)}{where} ({printable(kinds)}), {len(snapshot.idle)} idle"


def _expected(snapshot: Snapshot) -> str:
    if snapshot.expected_end is None:
        return ""
    left_s = snapshot.expected_end - snapshot.time
    return f"in about {duration(left_s)}, {_clock(snapshot.expected_end, snapshot.time)}"


# -- tables ---------------------------------------------------------------------------------------


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in _NUMBERS else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if heading == "parameters" else None,
        )
    return table


def _add(table: Table, trial: int, *cells: str) -> None:
    texts = [Text(cell) for cell in cells]
    table.add_row(Text(str(trial), f"bold {colour_of(trial)}"), *texts)


def _on_devices(snapshot: Snapshot) -> Table:
    headings = ("trial", "devices", "for", "epoch", "samples/s", "last value", "parameters")
    table = _table("On devices", *headings)
    num_nodes = len({device.node for device in snapshot.devices})
    for run in snapshot.runs:
        _add(table, run.state.trial, _places(run.devices, num_nodes), *_run(run))
    if snapshot.idle:
        table.add_row(Text("idle", "dim"), Text(_places(snapshot.idle, num_nodes)))
    return table


def _run(run: Run) -> tuple[str, ...]:
    state = run.state
    epochs = f"{state.epochs_done}" + (f" of {state.max_epochs}" if state.max_epochs else "")
    value = _NOTHING if run.value is None else f"{run.value:.6g}"
    rate = _rate(state.samples_per_s)
    return duration(run.for_s), epochs, rate, value, _params(run.trial.params)


def _rate(samples_per_s: float | None) -> str:
    if samples_per_s is None:
        return _NOTHING
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"


def _recent(snapshot: Snapshot) -> Table:
    headings = ("trial", "ended", "value", "number of devices", "took", "parameters")
    table = _table("Ended last", *headings)
    for trial in snapshot.recent:
        took = trial.duration and duration(max(0.0, trial.duration.total_seconds()))
        _add(
            table,
            trial.number,
            trial.state.name.lower(),
            _values(trial.values) or _NOTHING,
            _widths(snapshot.widths(trial.number)),
            took or _NOTHING,
            _params(trial.params),
        )
    return table


def _places(devices: Iterable[DeviceSpan], num_nodes: int) -> str:
    by_node: dict[str, list[int]] = defaultdict(list)
    for device in devices:
        by_node[device.node].append(device.device)
    if num_nodes < 2:
        return ranges(itertools.chain.from_iterable(by_node.values()))
    return "; ".join(f"{printable(node, 24)} {ranges(on)}" for node, on in by_node.items())


def _widths(widths: Sequence[int]) -> str:
    """One after the other, what follows itself once."""
    return " → ".join(str(width) for width, _ in itertools.groupby(widths)) or _NOTHING


def _numbers(numbers: Iterable[int]) -> str:
    known = sorted(numbers)
    more = len(known) - _MOST_SHOWN
    return ranges(known[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _values(values: Sequence[float] | None) -> str:
    return ", ".join(f"{value:.6g}" for value in values or ())


def _params(params: Mapping[str, Any]) -> str:
    shown = (f"{name}={_short(value)}" for name, value in params.items())
    return printable(" ".join(shown), 2 * _LONGEST) or _NOTHING


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else printable(value, 24)


def _clock(seconds: float, now: float) -> str:
    """The time of day, with its date if that is not today's."""
    then = time.localtime(seconds)
    is_today = then[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", then)
