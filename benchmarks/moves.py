"""Moves within an epoch: for how long a trial pauses, by model and by the way of its state.

python benchmarks/moves.py                         # a small model, 1 GB, a compiled one
python benchmarks/moves.py --models large --gigabytes 2

On CPU slots, by gloo; the trial has 3 and 4 devices in turns and is told where it goes on.

*Pause*: from the end of the last step before a move to the end of the first one after it, on the
slowest rank, less a usual step. The state goes through the memory of rank 0's process, where that
stays, or through a file. *Broadcast*: as many bytes as the large model has, among the same ranks.
*Beginning*: from a compiled objective's first line to the end of its first step.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import optuna
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from optuna_fleet import SharedPipeline
from tests.fleets import Leg, Noise, ask_to_move, fleet_of

SIZE, BATCH = 8192, 16
STEPS_APART = 40
WIDE = (0, 2, 3, 4)
NARROW = {"memory": (0, 2, 4), "file": (1, 2, 4)}  # rank 0 is on the first one
NUM_BEGINNINGS = 4


class Numbered(Noise):
    """Gives the number of each sample in the place of a label."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return super().__getitem__(index)[0], index


# -- objectives -----------------------------------------------------------------------------------


class Model(nn.Sequential):
    """A perceptron; beside it, so many frozen weights of 64 MB each."""

    def __init__(self, num_frozen: int = 0) -> None:
        sizes = [36, 64, 64, 3]
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
        super().__init__(nn.Flatten(), *(part for layer in layers for part in (layer, nn.Tanh())))
        self.double()
        for number in range(num_frozen):
            weights = nn.Parameter(torch.full((2**24,), 0.5), requires_grad=False)
            self.register_parameter(f"frozen_{number}", weights)

    def trained(self) -> list[nn.Parameter]:
        """All others."""
        return [weights for weights in self.parameters() if weights.requires_grad]


def trains(trial: Any, *, folder: Path, num_frozen: int, moves: int) -> float:
    model = Model(num_frozen)
    optimizer = torch.optim.SGD(model.trained(), lr=0.01, momentum=0.9)
    model, optimizer = trial.prepare(model, optimizer)
    log = (folder / str(trial._session.device)).open("a", buffering=1)
    for _ in trial.epochs(1):
        for images, numbers in trial.batches("train", batch_size=BATCH, movable=True):
            loss = cross_entropy(model(images), numbers % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trial.totals["loss"] += loss.detach() * trial.shard_size
            own = numbers.tolist() if trial.shard_size else []
            log.write(json.dumps([trial._session.run.run_id, time.monotonic(), own]) + "\n")
            step = trial.state["step"] = trial.state.get("step", 0) + 1
            if step % STEPS_APART == 0 and step // STEPS_APART <= moves:
                ask_to_move(trial, wait=False)
    trial.set_user_attr("broadcast_s", list(broadcasts(num_frozen)) if num_frozen else [])
    return float(trial.totals["loss"])


def broadcasts(num_frozen: int) -> Iterator[float]:
    """Seconds until all ranks have the bytes of the frozen weights."""
    data = torch.ones(num_frozen * 2**26, dtype=torch.uint8)
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        dist.broadcast(data, group_src=0)
        dist.barrier()
        yield time.perf_counter() - began


def begins(trial: Any) -> float:
    """Each of its beginnings compiles the model anew."""
    began = time.perf_counter()
    model = Model()
    optimizer = torch.optim.SGD(model.trained(), lr=0.01)
    model, optimizer = trial.prepare(model, optimizer)
    compiled, took_s = torch.compile(model), 0.0
    for _ in trial.epochs(NUM_BEGINNINGS):
        for images, numbers in trial.batches("val", batch_size=BATCH):
            cross_entropy(compiled(images), numbers % 3).backward()
            optimizer.step()
            took_s = took_s or time.perf_counter() - began
        trial.set_user_attr("took_s", [*trial.user_attrs.get("took_s", ()), took_s])
    return 0.0


# -- measurements ---------------------------------------------------------------------------------


def pauses_of(folder: Path) -> list[float]:
    """Of each move, in seconds."""
    steps: dict[int, list[list[float]]] = defaultdict(list)  # of each run, by rank
    seen: Counter[int] = Counter()
    for path in folder.iterdir():
        ends: dict[int, list[float]] = defaultdict(list)
        for run, end, own in map(json.loads, path.open()):
            ends[run].append(end)
            seen.update(own)
        for run, times in ends.items():
            steps[run].append(times)
    assert seen == Counter(range(SIZE)), "samples were skipped or computed twice"
    runs = [steps[run] for run in sorted(steps)]
    usual = statistics.median(
        b - a for ranks in runs for ends in ranks for a, b in itertools.pairwise(ends)
    )
    return [
        max(ends[0] for ends in after) - max(ends[-1] for ends in before) - usual
        for before, after in itertools.pairwise(runs)
    ]


def fly(fleet: Any, way: str, *, moves: int, num_frozen: int) -> tuple[list[float], Any]:
    """Returns the pauses of a trial, and the trial."""
    legs = [Leg(NARROW[way] if i % 2 else WIDE, until_asked=i < moves) for i in range(moves + 1)]
    with tempfile.TemporaryDirectory() as name:
        fleet.script = {0: legs}
        study = optuna.create_study()
        more = {"moves": moves, "num_frozen": num_frozen}
        objective = functools.partial(trains, folder=Path(name), **more)
        study.optimize(objective, n_trials=1, executor=fleet)
        assert study.trials[0].value is not None
        return pauses_of(Path(name)), study.trials[0]


def measure(fleet: Any, name: str, given: argparse.Namespace) -> None:
    num_frozen = int(16 * given.gigabytes) if name == "large" else 0
    found: dict[str, list[float]] = {way: [] for way in NARROW}
    losses, broadcast_s = [], []
    for _ in range(given.rounds):
        for way in NARROW:
            pauses, trial = fly(fleet, way, moves=given.moves, num_frozen=num_frozen)
            found[way] += pauses
            losses.append(trial.value)
            broadcast_s += trial.user_attrs["broadcast_s"]
    for way, pauses in found.items():
        shown = f"median {statistics.median(pauses):.3f} s, longest {max(pauses):.3f} s"
        print(f"{name}, through {way}: pause {shown} of {len(pauses)} moves")
    apart = (max(losses) - min(losses)) / max(losses)
    assert apart < 1e-10, f"losses differ by {apart:.1e}"
    print(f"{name}: losses differ by {apart:.1e}; no sample was skipped or computed twice")
    if broadcast_s:
        print(f"{name}: broadcast {statistics.median(broadcast_s):.3f} s")


def measure_beginnings(fleet: Any) -> None:
    """Of one trial after the other, each in two processes that have compiled nothing."""
    for devices, cache in {(0, 1): "empty", (2, 3): "filled"}.items():
        legs = [Leg(devices, until_epoch=i + 1) for i in range(NUM_BEGINNINGS - 1)]
        fleet.script = {0: [*legs, Leg(devices)]}
        study = optuna.create_study()
        study.optimize(begins, n_trials=1, executor=fleet)
        first, *others = study.trials[0].user_attrs["took_s"]
        shown = ", ".join(f"{seconds:.2f}" for seconds in others)
        print(
            f"beginnings of a compiled objective, torch's cache on disk {cache}: {first:.2f} s, "
            f"then {shown}; second / first {others[0] / first:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["small", "large", "compiled"])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the large one")
    parser.add_argument("--moves", type=int, default=6, help="of each trial")
    parser.add_argument("--rounds", type=int, default=2, help="each with a trial of either way")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    data = SharedPipeline(train=Numbered(SIZE), val=Numbered(16 * BATCH))
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        with fleet_of(devices=5, pipeline=data) as fleet:
            for name in given.models:
                if name == "compiled":
                    measure_beginnings(fleet)
                else:
                    measure(fleet, name, given)


if __name__ == "__main__":
    main()
