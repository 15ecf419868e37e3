"""What the tables' words for verdicts stand for."""

from __future__ import annotations

from optuna_fleet.preflight import verdict as found
from tests.preflight import table

VERDICTS: dict[str, type[found.Verdict]] = {
    table.ANY: found.Free,
    table.STAYS: found.NotMoved,
    table.ONE: found.OneDevice,
    table.UNREPEATABLE: found.NotRepeatable,
    table.UNCHECKED: found.NotChecked,
    table.PLAIN: found.Plain,
}
