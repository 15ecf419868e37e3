"""What one preprocessing for many trials saves, beside DataLoaders of their own and TensorSocket.

python benchmarks/sharing.py --plot sharing.png      # all rows, about 25 minutes
python benchmarks/sharing.py --only epoch --rounds 5
python benchmarks/sharing.py --quick                 # every row once, short; for trying out

Trials are processes that read every byte of their batches and do nothing else. The data are
photographs of 500 x 375 pixels (JPEG, quality 90) that are decoded, cropped at random to 224 x
224, flipped and normalised, by torchvision; in the rows of several epochs also by
`optuna_fleet.RandomResizedCrop`, to the same bits (systems "...+fused"). CPU time is that of all
processes involved, from the moment when all trials are ready to the end of the last one. Systems
run in alternation; values are medians of the rounds. The ring is what a machine can do at best:
see `scripts/sharing_ring.py`.
TensorSocket is left out if it is not installed (`pip install tensorsocket`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean

from pairing import note
from scripts.sharing_photos import make_photographs
from scripts.sharing_runs import (
    NAMES,
    SAMPLE_BYTES,
    Effort,
    Row,
    Run,
    compared,
    run,
    times_less,
)

TRIALS = (1, 2, 4, 8)
SLOW_S = 1 / 32
LONGEST = 4
CROPPED = ("dataloader", "dataloader+fused", "ours", "ours+fused")
"""Where most samples are cropped anew from decoded photographs, the crop counts."""


# -- the rows ---------------------------------------------------------------------------------

CPU = "us CPU per sample and trial"


def measure_epoch(effort: Effort) -> Iterator[Row]:
    """One epoch, the same decoder everywhere; a single trial without any loader is the floor."""
    plain = [system for system in effort.systems if "+" not in system]
    for trials, least in zip(TRIALS, (1.15, 2.3, 4.7, 8.5), strict=True):
        rows = list(
            compared(
                "one epoch",
                effort,
                [{}] * trials,
                lambda run: run.cpu_us,
                CPU,
                systems=(*plain, *(["bare"] if trials == 1 else [])),
            )
        )
        yield from rows
        yield from times_less(rows, "one epoch", trials, least=least)


def measure_fastest(effort: Effort) -> Iterator[Row]:
    """One epoch, with the fastest decoder in the pipeline."""
    rows = list(
        compared(
            "one epoch, fastest decoder",
            effort,
            [{}] * 8,
            lambda run: run.cpu_us,
            CPU,
            systems=("dataloader", "ours"),
            ours={"decoder": effort.fastest},
        )
    )
    yield from rows
    yield from times_less(rows, "one epoch, fastest decoder", 8, least=10)


def pruning_sweep() -> list[dict[str, int]]:
    """24 trials; most of them are stopped after their second epoch."""
    return [{"epochs": LONGEST if number % 4 == 3 else 2} for number in range(24)]


def measure_epochs(effort: Effort) -> Iterator[Row]:
    """Five epochs, everything in memory."""
    rows = list(
        compared(
            "five epochs",
            effort,
            [{"epochs": 5}] * 8,
            lambda run: run.cpu_us,
            CPU,
            systems=[system for system in CROPPED if system in effort.systems],
            ours={"options": effort.room_for(5)},
        )
    )
    yield from rows
    yield from times_less(rows, "five epochs", 8, least=20)


def measure_sweep(effort: Effort) -> Iterator[Row]:
    """The pruning sweep, four trials at a time, everything in memory."""
    made = []

    def value(run: Run) -> float:
        if run.counts is not None:
            made.append(run.counts["preprocessed"] / (LONGEST * effort.samples))
        return run.cpu_us

    rows = list(
        compared(
            "pruning sweep",
            effort,
            pruning_sweep(),
            value,
            CPU,
            systems=[system for system in CROPPED if system in effort.systems],
            dataloader={"slots": 4},
            ours={"slots": 4, "options": effort.room_for(LONGEST)},
        )
    )
    yield from rows
    yield from times_less(rows, "pruning sweep", 24, least=28)
    yield Row(
        row="pruning sweep: samples made / (epochs x samples)",
        system="ours",
        trials=24,
        unit="x",
        runs=tuple(made),
        most=1.1,
    )


def measure_handover(effort: Effort) -> Iterator[Row]:
    """Ready batches handed to eight trainers."""
    epochs = 50
    rows = compared(
        "hand-over",
        effort,
        [{"epochs": epochs}] * 8,
        lambda run: epochs * effort.samples / run.wall_s,
        "samples/s, each to all",
        systems=[system for system in effort.systems if system in ("ring", "ours")],
        ring={"data": "ready"},
        ours={"data": "ready"},
    )
    for row in rows:
        yield replace(row, least=25_000 if row.system == "ours" else None)


def measure_slow(effort: Effort) -> Iterator[Row]:
    """One of four trials computes for 1/32 s per sample: what the other three get."""
    trials = [{"epochs": 10**6, "seconds": effort.seconds} for _ in range(4)]
    trials[0]["sleep_s"] = SLOW_S
    kinds = {
        "window shorter than an epoch": (effort.epoch_bytes // 4, 1000),
        "epochs in memory": (8 * effort.epoch_bytes, 1200),
    }
    wrong = []
    for kind, (memory_bytes, least) in kinds.items():
        runs = []
        for _ in range(effort.rounds):
            options = {"memory_bytes": memory_bytes}
            done = run("ours", effort, trials, options=options)
            runs.append(mean(sorted(done.rates())[1:]))
            wrong.append(float(done.total("missed") + done.total("repeated")))
        row, unit = f"one slow trial, {kind}", "samples/s of each other trial"
        yield Row(row=row, system="ours", trials=4, unit=unit, runs=tuple(runs), least=least)
    yield Row(
        row="one slow trial: samples missed or repeated",
        system="ours",
        trials=4,
        unit="samples",
        runs=(sum(wrong),),
        most=0,
    )
    others = [system for system in effort.systems if system in ("dataloader", "tensorsocket")]
    yield from compared(
        "one slow trial",
        effort,
        trials,
        lambda run: mean(sorted(run.rates())[1:]),
        "samples/s of each other trial",
        systems=others,
    )


def measure_mixed(effort: Effort) -> Iterator[Row]:
    """Batch sizes 16, 24, 32 and 50 together."""
    trials = [{"batch_size": size, "epochs": 2} for size in (16, 24, 32, 50)]
    wanted = 2 * effort.samples * len(trials)

    def wrong(run: Run) -> float:
        return 100 * (run.total("missed") + run.total("repeated")) / wanted

    systems = [system for system in effort.systems if system in ("tensorsocket", "ours")]
    for row in compared("", effort, trials, wrong, "%", systems=systems):
        most = 0 if row.system == "ours" else None
        yield replace(row, row="mixed batch sizes: samples missed or repeated", most=most)


MEASURES: dict[str, Callable[[Effort], Iterator[Row]]] = {
    "epoch": measure_epoch,
    "fastest": measure_fastest,
    "epochs": measure_epochs,
    "sweep": measure_sweep,
    "handover": measure_handover,
    "slow": measure_slow,
    "mixed": measure_mixed,
}


def main() -> None:
    arguments = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what tidies up
    with tempfile.TemporaryDirectory(prefix="sharing-") as folder:
        make_photographs(Path(folder), 40 if arguments.quick else 400)
        effort = Effort(
            rounds=arguments.rounds or (1 if arguments.quick else 3),
            samples=arguments.samples or (320 if arguments.quick else 2048),
            seconds=4 if arguments.quick else 30,
            folder=folder,
            decoder=arguments.decoder,
            fastest=arguments.fastest,
            dtype=arguments.dtype,
            preprocessors=arguments.preprocessors,
            systems=tuple(arguments.systems or _installed()),
            warm_bytes=arguments.warm << 20,
        )
        rows = []
        for name in arguments.only or MEASURES:
            note(f"measuring {name}")
            for row in MEASURES[name](effort):
                rows.append(row)
                print(row.to_json(), flush=True)
    print("\n| Row | System | Trials | Median | Smallest .. largest | Reach |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(row.to_markdown())
    if arguments.plot:
        from scripts.sharing_picture import draw

        draw([json.loads(row.to_json()) for row in rows], arguments.plot)


def _installed() -> list[str]:
    systems = ["dataloader", "ring", "tensorsocket", "ours", *CROPPED]
    if importlib.util.find_spec("tensorsocket") is None:
        note("TensorSocket is not installed: its rows are left out")
        systems.remove("tensorsocket")
    return list(dict.fromkeys(systems))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MEASURES, action="append", help="may be repeated")
    parser.add_argument("--systems", choices=NAMES, action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, help="runs per row; default: 3, or 1 if quick")
    parser.add_argument("--samples", type=int, help="per epoch; default: 2048, or 320 if quick")
    parser.add_argument("--decoder", default="torchvision", help="pillow, torchvision, simplejpeg")
    parser.add_argument("--fastest", default="simplejpeg", help="decoder of that row")
    parser.add_argument("--dtype", choices=SAMPLE_BYTES, default="float32", help="uint8: raw")
    parser.add_argument("--preprocessors", type=int, default=2, help="of the shared systems")
    parser.add_argument(
        "--warm", type=int, default=6144, help="MiB of memory that the machine has ready; or 0"
    )
    parser.add_argument("--quick", action="store_true", help="short runs, for trying out")
    parser.add_argument("--plot", type=Path, help="draw the picture of the README")
    return parser.parse_args()


if __name__ == "__main__":
    main()
