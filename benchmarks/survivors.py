"""Ranks that are killed within an epoch: do the others go on from where they were, and how soon?

python benchmarks/survivors.py                  # 80 kills; 100 leaves, joins and kills; the cost
python benchmarks/survivors.py --only cost --width 2048     # of a model with 100 MB of weights
python benchmarks/survivors.py --late             # of a loop that needs others after its step
python benchmarks/survivors.py --late --every 1   # and copies parameters before each

On 4 CPU slots, by gloo. *Kills*: one of three ranks is killed at a random moment of a step, most
of which is the all-reduce. *Events*: a trial leaves devices, joins others, or loses one, in random
order. Both are compared with the same trial undisturbed on one device. *Pause*: from the death to
the end of the next step. *Cost*: of being able to go on, as median step time of epochs with it
over that of epochs without. The loop adds to ``trial.totals`` before the backward pass, and asks
for the mean loss before its optimizer steps; or does both after that.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import optuna
import torch
from torch.nn.functional import cross_entropy

from optuna_fleet import SharedPipeline
from optuna_fleet.executor.call.handovers import Handovers
from tests.fleets import Leg, Noise, ask_to_move, fleet_of

SIZE, BATCH, APART = 512, 16, 6
EPOCH = SIZE // BATCH
Event = tuple[str, int, float]
"""What happens, to which rank, after how many milliseconds."""


def prepared(trial: Any, width: int, kind: str = "SGD", **more: float) -> Any:
    hidden = torch.nn.Linear(width, width)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(64, width),
        torch.nn.ReLU(),
        hidden,
        torch.nn.Linear(width, 3),
    ).double()
    optimizer = getattr(torch.optim, kind)(model.parameters(), **more)
    return trial.prepare(model, optimizer)


def happens(trial: Any, event: Event | None, mark: Path) -> bool:
    """Begin with what is to happen in this step, once; return whether it is a move."""
    if event is None:
        return False
    what, rank, after_ms = event
    if what == "move":
        return not mark.exists()
    if trial.rank == rank and not mark.exists():
        mark.touch()

        def die() -> None:
            time.sleep(after_ms / 1e3)
            mark.write_text(f"{time.monotonic()}")
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die).start()
    return False


def moves(trial: Any, mark: Path) -> None:
    mark.touch()
    ask_to_move(trial)
    while trial.sum(int(trial._session.stop_line._is_asked)) < trial.world_size:
        trial.should_prune()


def add_up(trial: Any, loss: torch.Tensor) -> None:
    trial.totals["loss"] += loss * trial.shard_size
    trial.totals["samples"] += trial.shard_size


def copies_each(trial: Any, every: int | None) -> None:
    """Have parameters copied before each so many steps, where a loop needs that."""
    if every is not None:
        steps = itertools.count()
        trial._training.holding.is_due = lambda: next(steps) % every == 0


def trains(
    trial: Any,
    *,
    events: Mapping[int, Event],
    folder: Path,
    width: int,
    epochs: int,
    late: bool,
    every: int | None,
) -> float:
    model, optimizer = prepared(trial, width, lr=0.01, momentum=0.9)
    copies_each(trial, every)
    losses = trial.state.setdefault("losses", [])
    for epoch in trial.epochs(epochs):
        for images, labels in trial.batches("train", batch_size=BATCH, movable=True):
            step = len(losses)
            is_move = happens(trial, events.get(step), folder / f"event {step}")
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            if not late:
                add_up(trial, loss)
            loss.backward()
            if not late:
                losses.append(trial.mean(loss.item(), weight=trial.shard_size))
            with (folder / "done").open("a") as file:
                file.write(f"{trial._session.run.run_id} {step} {time.monotonic()}\n")
            optimizer.step()
            if late:
                add_up(trial, loss)
                losses.append(trial.mean(loss.item(), weight=trial.shard_size))
            if is_move:
                moves(trial, folder / f"event {step}")
        assert trial.totals["samples"] == SIZE
        trial.state[f"mean {epoch}"] = trial.totals.mean("loss", "samples")
    means = [trial.state[f"mean {epoch}"] for epoch in range(epochs)]
    trial.set_user_attr("result", [*losses, *means, *model[1].running_mean.tolist()])
    return float(losses[-1])


def run(
    fleet: Any, legs: Sequence[Leg], events: Mapping[int, Event], folder: Path, **more: Any
) -> list[float]:
    fleet.script = {0: legs}
    study = optuna.create_study()
    study.optimize(
        functools.partial(trains, events=events, folder=folder, **more),
        n_trials=1,
        executor=fleet,
    )
    result: list[float] = study.trials[0].user_attrs["result"]
    return result


def plan(
    number: int, kills: float, seed: int, step_ms: float
) -> tuple[list[Leg], dict[int, Event]]:
    """The devices after each event; three of them where only deaths are planned."""
    chance = random.Random(seed)
    devices: tuple[int, ...] = (0, 1, 2)
    legs, events = [Leg(devices, until_asked=True)], dict[int, Event]()
    for step in range(3, 3 + APART * number, APART):
        if len(devices) > 1 and chance.random() < kills:
            rank = chance.randrange(len(devices))
            events[step] = ("kill", rank, chance.uniform(0, step_ms))
            left = [device for device in range(4) if device != devices[rank]]
        else:
            events[step] = ("move", 0, 0.0)
            left = list(range(4))
        width = 3 if kills == 1 else chance.randint(1, len(left))
        devices = tuple(chance.sample(left, width))
        legs.append(Leg(devices, until_asked=True))
    return legs, events


def steps_done(folder: Path) -> dict[int, dict[int, float]]:
    """When each step was first computed, by step and run."""
    done: dict[int, dict[int, float]] = defaultdict(dict)
    for line in (folder / "done").read_text().splitlines():
        number, step, at = line.split()
        done[int(step)].setdefault(int(number), float(at))
    return done


def pauses_ms(events: Mapping[int, Event], folder: Path) -> list[float]:
    ends = sorted(at for by in steps_done(folder).values() for at in by.values())
    died = [
        float((folder / f"event {step}").read_text())
        for step, (what, *_) in events.items()
        if what == "kill"
    ]
    # The step that they were at may still end on others.
    return [1e3 * next(end - at for end in ends if end > at + 0.02) for at in died]


def strikes(fleet: Any, number: int, kills: float, seed: int, **more: Any) -> dict[str, Any]:
    epochs = -(-(number * APART + 2 * APART) // EPOCH)
    more |= {"epochs": epochs}
    with tempfile.TemporaryDirectory() as name:
        (alone := Path(name, "alone")).mkdir()
        (struck := Path(name, "struck")).mkdir()
        undisturbed = run(fleet, [Leg((0,))], {}, alone, **more)
        run(fleet, [Leg((0, 1, 2))], {}, warm := Path(name), **more | {"epochs": 2})
        ends = sorted(min(by.values()) for by in steps_done(warm).values())
        step_ms = 1e3 * statistics.median(b - a for a, b in itertools.pairwise(ends))
        legs, events = plan(number, kills, seed, step_ms)
        held: dict[int, set[Any]] = defaultdict(set)
        rank_ended = Handovers.rank_ended

        def notes(self: Any, run: Any, ended: Any) -> None:
            if ended.holds is not None:
                held[ended.run_id].add(ended.holds)
            rank_ended(self, run, ended)

        Handovers.rank_ended = notes  # type: ignore[method-assign]
        try:
            result = run(fleet, legs, events, struck, **more)
        finally:
            Handovers.rank_ended = rank_ended  # type: ignore[method-assign]
        done = steps_done(struck)
        again = Counter(number for by in done.values() for number in sorted(by)[1:])
        lost = sum(what == "kill" for what, *_ in events.values())
        pauses = sorted(pauses_ms(events, struck))
        return {
            "events": len(events),
            "kills": lost,
            "runs of which a step was held": len(held),
            "survivors at different steps": sum(len(places) > 1 for places in held.values()),
            "steps skipped": epochs * EPOCH - len(done),
            "steps computed twice": sum(len(by) - 1 for by in done.values()),
            "most after one event": max(again.values(), default=0),
            "largest relative difference": max(
                abs(a - b) / max(abs(b), 1e-300) for a, b in zip(result, undisturbed, strict=True)
            ),
            "pause, ms: median, 90 %": [
                round(statistics.median(pauses)),
                round(pauses[9 * len(pauses) // 10]),
            ],
            "step, ms": round(step_ms, 1),
        }


# -- what it costs --------------------------------------------------------------------------------


def alternates(
    trial: Any, *, width: int, epochs: int, kind: str, late: bool, every: int | None
) -> float:
    """Epochs with and without, in turn."""
    model, optimizer = prepared(trial, width, kind, lr=1e-4)
    copies_each(trial, every)
    within = trial._training._within
    hold = within._hold
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for epoch in trial.epochs(2 + epochs):
        within._hold = hold if epoch % 2 else None
        began = time.perf_counter(), time.process_time()
        for images, labels in trial.batches("train", batch_size=BATCH, movable=True):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            if not late:
                add_up(trial, loss)
            loss.backward()
            optimizer.step()
            if late:
                add_up(trial, loss)
        ended = time.perf_counter(), time.process_time()
        times[bool(epoch % 2)].append((ended[0] - began[0], ended[1] - began[1]))
    trial.set_user_attr("plain", trial._training.holding._is_plain)
    for name, which in (("ms", 0), ("cpu_ms", 1)):
        spent = ([1e3 * one[which] / EPOCH for one in times[with_][1:]] for with_ in (False, True))
        trial.set_user_attr(name, [statistics.median(some) for some in spent])
    return 0.0


def cost(fleet: Any, devices: int, **more: Any) -> dict[str, Any]:
    fleet.script = {0: [Leg(tuple(range(devices)))]}
    study = optuna.create_study()
    objective = functools.partial(alternates, **more)
    study.optimize(objective, n_trials=1, executor=fleet)
    known = study.trials[0].user_attrs
    (without, with_), processor = known["ms"], known["cpu_ms"]
    return {
        "devices": devices,
        **more,
        "step without, ms": round(without, 2),
        "step with, ms": round(with_, 2),
        "of a core, ms": [round(ms, 2) for ms in processor],
        "copies parameters": not known["plain"],
        "more": f"{100 * (with_ / without - 1):.1f} %",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["kills", "events", "cost"])
    parser.add_argument("--number", type=int)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--late", action="store_true", help="a loop that needs others after it")
    parser.add_argument("--every", type=int, help="copy parameters then, whatever that costs")
    parser.add_argument("--epochs", type=int, default=64, help="that the cost is measured in")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    more = {"width": given.width, "late": given.late, "every": given.every}
    with fleet_of(devices=4, pipeline=SharedPipeline(train=Noise(SIZE))) as fleet:
        for what, number, share in (("kills", 80, 1.0), ("events", 100, 0.4)):
            if given.only in (None, what):
                answer = strikes(fleet, given.number or number, share, given.seed, **more)
                print(json.dumps({what: answer, "load": os.getloadavg()[0]}), flush=True)
                assert given.late or answer["most after one event"] <= 1
        if given.only in (None, "cost"):
            for kind in ("SGD", "AdamW"):
                answer = cost(fleet, 2, kind=kind, epochs=given.epochs, **more)
                print(json.dumps({"cost": answer, "load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main()
