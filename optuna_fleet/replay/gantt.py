"""A picture of a simulated sweep, drawn like that of a real one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from optuna_fleet.events import Ending
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.replay.progress import Span
from optuna_fleet.replay.simulation import Outcome
from optuna_fleet.visualization.bars import Bar
from optuna_fleet.visualization.picture import save_bars


def save_gantt(outcome: Outcome, path: Path, name: str) -> None:
    """Save devices over time, coloured by trial, under a name.

    Raises:
        FleetConfigError: The file can't be written, or its ending names no known format.
        ImportError: matplotlib is not installed.
    """
    try:
        save_bars(list(_bars(outcome.totals.spans)), name, path)
    except OSError as error:
        raise FleetConfigError(f"{path} can't be written: {error.strerror}.") from error
    except ValueError as error:
        raise FleetConfigError(f"{path} can't be drawn: {error}.") from error


def _bars(spans: list[Span]) -> Iterator[Bar]:
    spans = sorted(spans, key=lambda span: (span.start_s, span.number))
    totals = Counter(span.number for span in spans)
    seen: dict[int, int] = defaultdict(int)
    for span in spans:
        seen[span.number] += 1
        for device in span.devices:
            yield Bar(
                number=span.number,
                device=device,
                devices=span.devices,
                start_s=span.start_s,
                end_s=span.end_s,
                round=span.round,
                flight=seen[span.number],
                num_flights=totals[span.number],
                ending=(Ending.RETURNED if span.has_returned else Ending.YIELDED).value,
            )
