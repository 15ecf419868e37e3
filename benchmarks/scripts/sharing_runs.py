"""The values of `sharing.py`: how a system is run and what is told of it."""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from pairing import Served, note
from scripts.sharing_photos import CROP_PX, SIZE_PX

NAMES = {
    "dataloader": "DataLoaders",
    "tensorsocket": "TensorSocket",
    "ours": "SharedPipeline",
    "ring": "a ring without features",
    "bare": "no loader: samples made and read",
    "dataloader+fused": "DataLoaders with our crop",
    "ours+fused": "SharedPipeline with our crop",
}
"""A script, and after a plus the way to crop (`sharing_photos.CROPS`) that it is asked for."""

DECODED_BYTES = 3 * SIZE_PX[0] * SIZE_PX[1]
RELEASE_BYTES, RELEASE_S = 64 << 20, 0.05
MADV_POPULATE_WRITE = 23  # Linux 5.14
SAMPLE_BYTES = {"uint8": 3 * CROP_PX**2, "float32": 12 * CROP_PX**2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to measure, and with what data; `warm_bytes`: see `WarmMemory`."""

    rounds: int
    samples: int
    seconds: float
    folder: str
    decoder: str
    fastest: str
    dtype: str
    preprocessors: int
    systems: tuple[str, ...]
    warm_bytes: int

    @property
    def epoch_bytes(self) -> int:
        """Bytes of a preprocessed epoch."""
        return self.samples * SAMPLE_BYTES[self.dtype]

    def room_for(self, epochs: int) -> dict[str, int]:
        """Options with which the pipeline can keep all decoded photographs and so many epochs."""
        decoded_bytes = self.samples * (DECODED_BYTES + (1 << 16))
        chunk_bytes = epochs * self.epoch_bytes + (1 << 28)
        return {"memory_bytes": 3 * max(decoded_bytes, chunk_bytes // 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One system once.

    Attributes:
        cpu_us: CPU microseconds of all processes per sample that a trial read.
        wall_s: Seconds from "go" to the end.
        reports: What each trial has read.
        counts: What the pipeline tells of itself; None for the others.
    """

    cpu_us: float
    wall_s: float
    reports: list[dict[str, Any]]
    counts: dict[str, Any] | None

    def rates(self) -> list[float]:
        """Samples per second of each trial."""
        return [r["samples_after_first"] / (r["reading_s"] or 1e-9) for r in self.reports]

    def total(self, what: str) -> int:
        """A sum over the trials."""
        return sum(report[what] for report in self.reports)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity of one system; its value is the median of the rounds.

    Attributes:
        row: Which line of the table.
        system: One of `NAMES`.
        trials: Number of trials.
        unit: Unit of the values.
        runs: One value per round.
        least: The value must be this or more; None if nothing is asked.
        most: The value must be this or less.
    """

    row: str
    system: str
    trials: int
    unit: str
    runs: tuple[float, ...]
    least: float | None = None
    most: float | None = None

    @property
    def value(self) -> float:
        """The median."""
        return median(self.runs)

    @property
    def is_met(self) -> bool | None:
        """Whether the value is what was asked for; None if nothing was."""
        if self.least is None and self.most is None:
            return None
        enough = self.least is None or self.value >= self.least
        return enough and (self.most is None or self.value <= self.most)

    def to_json(self) -> str:
        """The row as one line."""
        return json.dumps(
            {
                "row": self.row,
                "system": self.system,
                "trials": self.trials,
                "value": float(f"{self.value:.4g}"),
                "unit": self.unit,
                "least": self.least,
                "most": self.most,
                "ok": self.is_met,
                "runs": [float(f"{run:.4g}") for run in self.runs],
            }
        )

    def to_markdown(self) -> str:
        """The row as a line of a table."""
        asked = "" if self.least is None else f">= {self.least:g}"
        asked += "" if self.most is None else f"<= {self.most:g}"
        span = f"{min(self.runs):.4g} .. {max(self.runs):.4g}"
        name = NAMES.get(self.system, self.system)
        return (
            f"| {self.row} | {name} | {self.trials} | {self.value:.4g} {self.unit} | {span} "
            f"| {asked} |"
        )


class WarmMemory:
    """Memory that the machine has behind it, to be left to others little by little.

    A virtual machine may get its memory from its host only when it is used, at ten times the cost
    of using it again, and give back what has been free for a second or two. Without this, a system
    that holds much is measured together with its host. It is given back in huge pages, which all
    others can be made of: memory that lies in scattered small ones would suit some systems only.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes // RELEASE_BYTES * RELEASE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, self._left + RELEASE_BYTES, flags=flags)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory.madvise(MADV_POPULATE_WRITE)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Leaves it to whoever takes memory meanwhile, faster than a system does."""
        done = threading.Event()
        thread = threading.Thread(target=self._release, args=(done,))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._memory.close()

    def _release(self, done: threading.Event) -> None:
        while self._left and not done.wait(RELEASE_S):
            self._left -= RELEASE_BYTES
            self._memory.madvise(mmap.MADV_DONTNEED, self._left, RELEASE_BYTES)


def run(system: str, effort: Effort, trials: Sequence[dict[str, Any]], **more: Any) -> Run:
    """Start a system, let its trials read, end it."""
    script, _, crop = system.partition("+")
    request = {
        "data": "photographs",
        "folder": effort.folder,
        "samples": effort.samples,
        "decoder": effort.decoder,
        "crop": crop or "torchvision",
        "dtype": effort.dtype,
        "preprocessors": effort.preprocessors,
        "trials": list(trials),
        **more,
    }
    with Served(f"sharing_{script}.py") as served:
        memory = WarmMemory(effort.warm_bytes)
        served.ask(request)
        with memory.released():
            cost = served.ask("go")
        counts = served.ask("end").answers[0]
    reports = cost.answers[0]
    samples = sum(report["samples"] for report in reports)
    result = Run(
        cpu_us=1e6 * cost.cpu_s / max(samples, 1),
        wall_s=cost.wall_s,
        reports=reports,
        counts=counts,
    )
    note(f"{system}, {len(trials)} trials: {result.cpu_us:.0f} us, {cost.wall_s:.1f} s, {counts}")
    return result


def compared(
    row: str,
    effort: Effort,
    trials: Sequence[dict[str, Any]],
    value: Callable[[Run], float],
    unit: str,
    *,
    systems: Sequence[str],
    **more: dict[str, Any],
) -> Iterator[Row]:
    """Yields a row for each system, which run in alternation; `more` is theirs alone."""
    runs: dict[str, list[float]] = {system: [] for system in systems}
    for _ in range(effort.rounds):
        for system in systems:
            own = more.get(system.partition("+")[0], {})
            runs[system].append(value(run(system, effort, trials, **own)))
    for system in systems:
        yield Row(row=row, system=system, trials=len(trials), unit=unit, runs=tuple(runs[system]))


def times_less(
    rows: Sequence[Row], row: str, trials: int, *, least: float | None = None
) -> Iterator[Row]:
    """How many times less the others take than the DataLoaders, round by round."""
    runs = {r.system: r.runs for r in rows if r.row == row and r.trials == trials}
    ours = [system for system in runs if system.startswith("ours")]
    for system in ("ring", "dataloader+fused", *ours):
        if not {"dataloader", system} <= set(runs):
            continue
        yield Row(
            row=f"{row}: times less than DataLoaders",
            system=system,
            trials=trials,
            unit="x",
            runs=tuple(a / b for a, b in zip(runs["dataloader"], runs[system], strict=True)),
            least=least if system == ours[-1] else None,
        )
