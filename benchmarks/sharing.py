"""What one preprocessing for many trials saves, beside a DataLoader for each.

python benchmarks/sharing.py                          # all rows, about 15 minutes
python benchmarks/sharing.py --only epoch --rounds 5
python benchmarks/sharing.py --quick                  # every row once, short; for trying out

Trials are processes that read every byte of their batches and do nothing else. The data are
photographs of 500 x 375 pixels (JPEG, quality 90) that are decoded, cropped at random to 224 x
224, flipped, made float32 and normalised, all by torchvision and for both sides alike. In "one
epoch" both get the same data set, and nothing is kept of it. "In parts" the pipeline is told what
is always the same, and keeps decoded photographs for later epochs; so it is in the other rows,
where it also has `optuna_fleet.RandomResizedCrop`, to the same bits.

What is counted is the CPU time, user and system, of all processes of a side (trials, the workers
of their DataLoaders, the pipeline's server and preprocessors) from the moment when all trials are
ready to the end of the last one, per image and trial. Each DataLoader forks its worker after that
moment, the pipeline the second of its two preprocessors; both keep them from epoch to epoch. The
sides run in alternation; values are medians of the rounds.
"""

from __future__ import annotations

import argparse
import mmap
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from pairing import Row, Served, note, print_table, ratios, row
from scripts.sharing_photos import CROP_PX, SIZE_PX, make_photographs

CPU = "us of CPU per sample and trial"
LONGEST = 4  # epochs of a trial in the pruning sweep
SLOW_S = 1 / 32
SAMPLE_BYTES = 3 * CROP_PX**2 * 4
DECODED_BYTES = 3 * SIZE_PX[0] * SIZE_PX[1]
RELEASE_BYTES, RELEASE_S = 64 << 20, 0.05
MADV_POPULATE_WRITE = 23  # Linux 5.14


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to measure; `warm_bytes`: see `WarmMemory`."""

    rounds: int
    samples: int
    seconds: float
    folder: str
    warm_bytes: int

    def room_for(self, epochs: int) -> dict[str, int]:
        """Options with which the pipeline can keep all decoded photographs and so many epochs."""
        decoded_bytes = self.samples * (DECODED_BYTES + (1 << 16))
        chunk_bytes = epochs * self.samples * SAMPLE_BYTES + (1 << 28)
        return {"memory_bytes": 3 * max(decoded_bytes, chunk_bytes // 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One side once: CPU time per sample that a trial read, what each read, what was made."""

    cpu_us: float
    reports: list[dict[str, Any]]
    preprocessed: int | None


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


def run(
    side: str,
    effort: Effort,
    trials: Sequence[dict[str, Any]],
    *,
    in_parts: bool = True,
    our_crop: bool = True,
    **more: Any,
) -> Run:
    """Start a side, let its trials read, end it."""
    request = {
        "folder": effort.folder,
        "samples": effort.samples,
        "in_parts": in_parts,
        "our_crop": our_crop and side == "ours",
        "trials": list(trials),
        **more,
    }
    with Served("sharing_side.py", side) as served:
        memory = WarmMemory(effort.warm_bytes)
        served.ask(request)
        with memory.released():
            cost = served.ask("go")
        preprocessed = served.ask("end").answers[0]
    reports = cost.answers[0]
    cpu_us = 1e6 * cost.cpu_s / max(sum(report["samples"] for report in reports), 1)
    note(f"{side}, {len(trials)} trials: {cpu_us:.0f} us, {cost.wall_s:.1f} s, {preprocessed}")
    return Run(cpu_us=cpu_us, reports=reports, preprocessed=preprocessed)


def compared(
    what: str, effort: Effort, trials: Sequence[dict[str, Any]], *, least: float, **more: Any
) -> tuple[list[Row], list[Run]]:
    """Rows of both sides, which take turns, and the runs of ours."""
    theirs, ours = [], []
    for _ in range(effort.rounds):
        theirs.append(run("dataloaders", effort, trials, **more))
        ours.append(run("ours", effort, trials, **more))
    times = [[one.cpu_us for one in runs] for runs in (theirs, ours)]
    rows = [
        row(f"{what}: DataLoaders", times[0], CPU),
        row("... SharedPipeline", times[1], CPU),
        row(f"{what}: times less than DataLoaders", ratios(*times), "x", least=least),
    ]
    return rows, ours


# -- the rows -------------------------------------------------------------------------------------


def measure_epoch(effort: Effort) -> Iterator[Row]:
    """One epoch, the same data set on both sides; and in parts, which pays off in later epochs."""
    for number, least in ((1, 1.15), (2, 2.3), (4, 4.7), (8, 8.5)):
        what, trials = f"one epoch, {number} trial{'s' * (number > 1)}", [{}] * number
        rows, _ = compared(what, effort, trials, least=least, in_parts=False, our_crop=False)
        yield from rows
        kept = [run("ours", effort, trials, our_crop=False).cpu_us for _ in range(effort.rounds)]
        yield row("... SharedPipeline, in parts", kept, CPU)


def measure_epochs(effort: Effort) -> Iterator[Row]:
    """Five epochs, everything in memory."""
    more = {"options": effort.room_for(5)}
    yield from compared("five epochs, 8 trials", effort, [{"epochs": 5}] * 8, least=20, **more)[0]


def measure_sweep(effort: Effort) -> Iterator[Row]:
    """24 trials, four at a time; most of them are stopped after their second epoch."""
    trials = [{"epochs": LONGEST if number % 4 == 3 else 2} for number in range(24)]
    more = {"slots": 4, "options": effort.room_for(LONGEST)}
    rows, ours = compared("pruning sweep", effort, trials, least=28, **more)
    yield from rows
    made = [(one.preprocessed or 0) / (LONGEST * effort.samples) for one in ours]
    yield row("pruning sweep: samples made / (epochs x samples)", made, "x", 1.1)


def measure_slow(effort: Effort) -> Iterator[Row]:
    """One of four trials computes for 1/32 s per sample: what the other three get."""
    trials: list[dict[str, Any]] = [
        {"epochs": 10**6, "seconds": effort.seconds, "sleep_s": SLOW_S * (number == 0)}
        for number in range(4)
    ]
    window = {"memory_bytes": effort.samples * SAMPLE_BYTES // 4}
    rates, wrong = [], 0
    for _ in range(effort.rounds):
        reports = run("ours", effort, trials, options=window).reports
        read = sorted(r["samples_after_first"] / (r["reading_s"] or 1e-9) for r in reports)
        rates.append(mean(read[1:]))
        wrong += sum(report["wrong"] for report in reports)
    what = "one slow trial, a window of a quarter epoch"
    yield row(f"{what}: samples/s of each other one", rates, "", least=1000)
    yield row("... samples missed or repeated", [wrong], "", 0)


MEASURES: dict[str, Callable[[Effort], Iterator[Row]]] = {
    "epoch": measure_epoch,
    "epochs": measure_epochs,
    "sweep": measure_sweep,
    "slow": measure_slow,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MEASURES, action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, help="runs per row; default: 3, or 1 if quick")
    parser.add_argument("--samples", type=int, help="per epoch; default: 2048, or 320 if quick")
    parser.add_argument(
        "--warm", type=int, default=6144, help="MiB of memory that the machine has ready; or 0"
    )
    parser.add_argument("--quick", action="store_true", help="short runs, for trying out")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what tidies up
    with tempfile.TemporaryDirectory(prefix="sharing-") as folder:
        make_photographs(Path(folder), 40 if given.quick else 400)
        effort = Effort(
            rounds=given.rounds or (1 if given.quick else 3),
            samples=given.samples or (320 if given.quick else 2048),
            seconds=4 if given.quick else 30,
            folder=folder,
            warm_bytes=given.warm << 20,
        )
        rows = [made for name in given.only or MEASURES for made in MEASURES[name](effort)]
    print_table(rows)


if __name__ == "__main__":
    main()
