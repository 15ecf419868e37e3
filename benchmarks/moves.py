"""Moves within an epoch: how long groups take to form anew, and for how long who stays pauses.

python benchmarks/moves.py                     # 2, 4, 8 ranks; a trial on 3 and 4 devices
python benchmarks/moves.py --beginning-s 1     # of an objective that takes a second to begin
python benchmarks/moves.py --width 2048        # of a model with 67 MB of weights and momentum

On CPU slots, by gloo. *Regroup*: from leaving one group to the end of the next one's first
all-reduce. *Pause*: between two steps of a rank that stays, one before the move and one after it,
less the median of its other steps; "stop and start" is the same where all ranks leave with a
checkpoint: from the last step of the one run to the first of the next.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing as mp
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import optuna
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from optuna_fleet import SharedPipeline
from optuna_fleet.trainer import groups
from tests.fleets import Leg, Noise, ask_to_move, fleet_of

SIZE, BATCH = 4096, 16
STEPS_APART = 40


class Numbered(Noise):
    """Gives the number of each sample in the place of a label."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return super().__getitem__(index)[0], index


# -- groups ---------------------------------------------------------------------------------------


def rank_of(rank: int, world_size: int, port: int, repeats: int, times: Any) -> None:
    torch.set_num_threads(1)
    for repeat in range(repeats + 1):
        spec = groups.GroupSpec(
            rank=rank,
            world_size=world_size,
            prefix=str(repeat),
            store_host="127.0.0.1",
            store_port=port,
        )
        if repeat:
            dist.barrier()
        began = time.perf_counter()
        groups.join_group(spec, "gloo", 60)
        dist.all_reduce(torch.zeros(1))
        if repeat and rank == 0:
            times.put(time.perf_counter() - began)
    dist.barrier()
    groups.leave_group()


def regroup_ms(world_size: int, repeats: int) -> float:
    store, port = groups.serve_store()
    context = mp.get_context("spawn")
    times = context.SimpleQueue()
    ranks = [
        context.Process(target=rank_of, args=(rank, world_size, port, repeats, times))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    measured = [times.get() for _ in range(repeats)]
    for rank in ranks:
        rank.join()
    del store
    return 1e3 * statistics.median(measured)


# -- moves ----------------------------------------------------------------------------------------


def trains(trial: Any, *, folder: Path, width: int, beginning_s: float, moves: int) -> float:
    time.sleep(beginning_s)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(36, width), torch.nn.Linear(width, width)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = trial.prepare(model, optimizer)
    log = (folder / str(trial._session.device)).open("a", buffering=1)
    for _ in trial.epochs(1):
        for images, numbers in trial.batches("train", batch_size=BATCH, movable=True):
            step = trial.state["step"] = trial.state.get("step", 0) + 1
            own = numbers.tolist() if trial.shard_size else []
            log.write(json.dumps([trial._session.run.run_id, time.monotonic(), own]) + "\n")
            loss = cross_entropy(model(images), numbers % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trial.totals["loss"] += loss * trial.shard_size
            if step % STEPS_APART == 0 and step // STEPS_APART <= moves:
                ask_to_move(trial, wait=False)
    return float(trial.totals["loss"])


def pauses_of(folder: Path, stays: bool) -> list[float]:
    """Of each move, in seconds."""
    logs = [[json.loads(line) for line in path.open()] for path in folder.iterdir()]
    seen = Counter(number for log in logs for *_, own in log for number in own)
    assert seen == Counter(range(SIZE)), "samples were skipped or computed twice"
    pauses: dict[tuple[int, int], list[float]] = {}
    for lines in logs if stays else [sorted(line for log in logs for line in log)]:
        pairs = list(itertools.pairwise(lines))
        usual = statistics.median(b[1] - a[1] for a, b in pairs if a[0] == b[0])
        for (run, begun, _), (following, began, _) in pairs:
            if following == run + 1:
                pauses.setdefault((run, following), []).append(began - begun - usual)
    return [max(times) for times in pauses.values()]


def move(fleet: Any, *, stays: bool, moves: int, **more: Any) -> tuple[list[float], float]:
    wide, narrow = (0, 1, 2, 3), (0, 1, 2)
    legs = [
        Leg(wide if i % 2 == 0 else narrow, until_asked=i < moves, promised=None if stays else ())
        for i in range(moves + 1)
    ]
    with tempfile.TemporaryDirectory() as name:
        fleet.script = {0: legs}
        study = optuna.create_study()
        objective = functools.partial(trains, folder=Path(name), moves=moves, **more)
        study.optimize(objective, n_trials=1, executor=fleet)
        assert study.trials[0].value is not None
        return pauses_of(Path(name), stays), study.trials[0].value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--moves", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--beginning-s", type=float, default=0.0)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for world_size in (2, 4, 8):
        print(f"regroup, {world_size} ranks: {regroup_ms(world_size, given.repeats):.1f} ms")
    more = {"width": given.width, "beginning_s": given.beginning_s, "moves": given.moves}
    found: dict[bool, list[float]] = {True: [], False: []}
    losses = set()
    with fleet_of(devices=4, pipeline=SharedPipeline(train=Numbered(SIZE))) as fleet:
        for stays in (True, False, True, False):
            pauses, loss = move(fleet, stays=stays, **more)
            found[stays] += pauses
            losses.add(loss)
    for stays, pauses in found.items():
        how = "pause of those who stay" if stays else "stop and start"
        shown = f"median {statistics.median(pauses):.3f} s, longest {max(pauses):.3f} s"
        print(f"{how}, 3 and 4 ranks: {shown} of {len(pauses)} moves")
    apart = (max(losses) - min(losses)) / max(losses)
    print(f"losses differ by {apart:.1e}; no sample was skipped or computed twice")


if __name__ == "__main__":
    main()
