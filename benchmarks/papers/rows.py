"""A published number beside ours, what that says, and how it is printed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

Span = tuple[float, float]
Cells = tuple[str, str, str, str, str]
"""Of a row, as in `TITLES`."""
TITLES = ("where", "what", "paper", "here", "verdict")


class Verdict(Enum):
    """What a row says."""

    REPRODUCED = "reproduced"
    DIFFERS = "differs"
    NOT_HERE = "can't be measured here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of a paper.

    Attributes:
        place: Where it is published.
        what: What it is.
        paper: The number; or the range that the paper's words say, which may be open (inf); or
            words, of what can't be measured here.
        ours: What comes out here; None or NaN if it can't be measured here.
        unit: Of both.
        why: Why ours is another one, or missing. Printed if so.
        tolerance: By which part of a published number ours may be off. Ranges have none.
    """

    place: str
    what: str
    paper: float | Span | str
    ours: float | None = None
    unit: str = ""
    why: str = ""
    tolerance: float = 0.1

    @property
    def verdict(self) -> Verdict:
        """What the two numbers say."""
        if self.ours is None or math.isnan(self.ours) or isinstance(self.paper, str):
            return Verdict.NOT_HERE
        low, high = self.allowed
        return Verdict.REPRODUCED if low <= self.ours <= high else Verdict.DIFFERS

    @property
    def allowed(self) -> Span:
        """Where ours counts as reproduced."""
        assert not isinstance(self.paper, str)
        if isinstance(self.paper, tuple):
            return self.paper
        off = self.tolerance * abs(self.paper)
        return self.paper - off, self.paper + off

    def cells(self, reasons: Sequence[str]) -> Cells:
        """The row as texts, as in `TITLES`; of its reason the number among all of them."""
        ours = "" if self.ours is None else _number(self.ours, self.unit)
        told = self.verdict.value
        if self.verdict is not Verdict.REPRODUCED:
            told += f" ({reasons.index(self.why) + 1})"
        elif isinstance(self.paper, float | int):
            told += f", +- {self.tolerance:.0%}"
        return self.place, self.what, self._published(), ours, told

    def _published(self) -> str:
        match self.paper:
            case str():
                return self.paper
            case (low, high):
                if math.isinf(high):
                    return f">= {_number(low, self.unit)}"
                if math.isinf(low):
                    return f"<= {_number(high, self.unit)}"
                return f"{_number(low)} to {_number(high, self.unit)}"
        return _number(self.paper, self.unit)


def at_least(number: float) -> Span:
    """So much or more."""
    return number, math.inf


def at_most(number: float) -> Span:
    """So much or less."""
    return -math.inf, number


def _number(value: float, unit: str = "") -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:,.{digits}f} {unit}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows that belong together.

    Attributes:
        title: What they are of.
        rows: In the paper's order.
        note: What else a reader must know.
    """

    title: str
    rows: tuple[Row, ...]
    note: str = ""


def as_markdown(table: Table) -> str:
    """For a page of the documentation: rows of one kind are one line."""
    reasons = _reasons(table)
    lines = [f"### {table.title}", ""]
    if table.note:
        lines += [table.note, ""]
    lines += [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    kinds = by_kind(row.cells(reasons) for row in table.rows)
    lines += [f"| {' | '.join(line)} |" for line in kinds]
    return "\n".join([*lines, "", *_numbered(reasons)]).rstrip() + "\n"


def by_kind(rows: Iterable[Cells]) -> list[Cells]:
    """Rows of one place whose texts differ in one or two words beside each other become one."""
    kinds: list[list[Cells]] = []
    for row in rows:
        for kind in kinds:
            if _is_of(row, kind):
                kind.append(row)
                break
        else:
            kinds.append([row])
    return [_merged(kind) if len(kind) > 1 else kind[0] for kind in kinds]


def _is_of(row: Cells, kind: Sequence[Cells]) -> bool:
    place, what, _, ours, _ = kind[0]
    if (row[0], bool(row[3])) != (place, bool(ours)):
        return False
    slot = _slot(what, row[1])
    return slot is not None and all(_slot(what, other[1]) == slot for other in kind[1:])


def _slot(text: str, other: str) -> slice | None:
    """Where two texts differ, if that is one or two words beside each other."""
    words, others = text.split(), other.split()
    unlike = [k for k, pair in enumerate(zip(words, others, strict=False)) if len(set(pair)) > 1]
    if len(words) != len(others) or not unlike or unlike[-1] - unlike[0] > 1:
        return None
    return slice(unlike[0], unlike[-1] + 1)


def _merged(rows: Sequence[Cells]) -> Cells:
    places, texts, papers, ours, verdicts = zip(*rows, strict=True)
    slot = _slot(*texts[:2])
    assert slot is not None
    unlike = [" ".join(text.split()[slot]) for text in texts]
    (end,) = ends if len(ends := {text[-1] for text in unlike} & {",", ":"}) == 1 else ("",)
    told = ", ".join(text.removesuffix(end) for text in unlike) + end
    words = texts[0].split()
    what = " ".join([*words[: slot.start], told, *words[slot.stop :]])
    if len(set(verdicts)) == 1:
        return places[0], what, _joined(papers), _joined(ours), verdicts[0]
    marks = [verdict[verdict.find(" (") :] if " (" in verdict else "" for verdict in verdicts]
    good = [verdict for verdict in verdicts if verdict.startswith(Verdict.REPRODUCED.value)]
    tolerance = max(good, key=len, default="").partition(",")[2]
    verdict = "reproduced" if len(good) == len(rows) else f"{len(good)} of {len(rows)} reproduced"
    verdict += f",{tolerance}" if tolerance else ""
    return places[0], what, _joined(papers), _joined(ours, marks), verdict


def _joined(values: Sequence[str], marks: Sequence[str] = ()) -> str:
    """Each with its mark, and the unit once."""
    if len(set(values)) == 1 and not any(marks):
        return values[0]
    units = {value.rpartition(" ")[2] for value in values}
    unit = f" {units.pop()}" if len(units) == 1 else ""
    bare = [value.removesuffix(unit) for value in values]
    return "; ".join(map("".join, zip(bare, marks or [""] * len(bare), strict=True))) + unit


def _reasons(table: Table) -> list[str]:
    """Each once."""
    rows = (row for row in table.rows if row.verdict is not Verdict.REPRODUCED)
    return list(dict.fromkeys(row.why for row in rows))


def _numbered(reasons: Sequence[str]) -> list[str]:
    return [*(f"{k}. {reason}" for k, reason in enumerate(reasons, 1)), ""]


def counts(tables: Iterable[Table]) -> dict[Verdict, int]:
    """How many rows say what."""
    found = Counter(row.verdict for table in tables for row in table.rows)
    return {verdict: found[verdict] for verdict in Verdict}


def summary(tables: Sequence[Table]) -> str:
    """The same in words."""
    return ", ".join(f"{verdict.value}: {number}" for verdict, number in counts(tables).items())
