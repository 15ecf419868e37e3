"""Trials beside each other, or one after the other: they share data and processes, no results."""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.transforms import v2

from optuna_fleet import SharedPipeline, policies, take_apart
from tests.behaviour.harness import Leg, fleet_of, small_model, train, train_epoch

# -- G3: one preprocessing for all trials ---------------------------------------------------------


class Counted(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Writes down each index it is asked for; looks slightly different each time."""

    def __init__(self, log: Path, size: int, seconds: float = 0.0) -> None:
        self.log, self.size, self.seconds = str(log), size, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{index} {os.getpid()}\n".encode())
        os.close(fd)
        time.sleep(self.seconds)
        return torch.rand(2), index


def numbers_of_looks(log: Path) -> list[int]:
    """How often each sample was preprocessed, in order."""
    return sorted(Counter(map(int, log.read_text().split()[::2])).values())


def noted(fleet: Any, objective: Any, script: dict[int, Sequence[Leg]]) -> list[dict[str, Any]]:
    """The attributes of trials that fly by a script."""
    study, fleet.script = optuna.create_study(), script
    study.optimize(objective, n_trials=len(script), gc_after_trial=True, executor=fleet)
    return [trial.user_attrs for trial in study.trials]


def fly(
    objective: Any, script: dict[int, Sequence[Leg]], data: dict[str, Any], **options: Any
) -> tuple[list[dict[str, Any]], Any]:
    """Those of trials of a fleet of its own, and the summary."""
    with fleet_of(devices=4, pipeline=SharedPipeline(**data), **options) as fleet:
        return noted(fleet, objective, script), fleet.summary


def collect(trial: Any) -> float:
    model = trial.prepare(nn.Linear(2, 1))
    batch_size = [3, 7, 16, 100][trial.number]
    seen, looks = [], []
    for _ in trial.epochs(2):
        indices: list[int] = []
        for x, index in trial.batches("train", batch_size=batch_size):
            model(x).sum().backward()
            indices += index[: trial.shard_size].tolist()
            looks += x[: trial.shard_size].flatten().tolist()
        seen.append(indices)
    trial.set_user_attr("seen", seen)
    trial.set_user_attr("looks", looks)
    return 0.0


def test_each_sample_is_preprocessed_once_per_epoch_and_delivered_to_every_trial(
    tmp_path: Path,
) -> None:
    log, script = tmp_path / "log", {number: [Leg((number,))] for number in range(4)}
    (first, *others), summary = fly(collect, script, {"train": Counted(log, 40)})
    for indices in first["seen"]:
        assert sorted(indices) == list(range(40))  # every index exactly once
    assert first["seen"][0] != first["seen"][1]
    for other in others:  # the same order at another batch size, the same augmentation
        assert other == first
    # One is made once more at first, to see whether that gives the same.
    assert numbers_of_looks(log) == [2] * 39 + [3]
    assert (summary.preprocessed, summary.consumed) == (80, 320)
    assert summary.sharing_factor == 4.0


def test_a_baseline_shares_nothing_between_trials_and_gives_the_same(tmp_path: Path) -> None:
    script = {0: [Leg((0, 1))], 1: [Leg((2,))], 2: [Leg((1,))]}
    (seen, shared), (again, alone) = (
        fly(
            collect,
            script,
            {"train": Counted(tmp_path / f"log {own}", 40)},
            policy=policies.Baseline(own_preprocessors=own),
        )
        for own in (None, 1)
    )
    assert again == seen
    assert shared.sharing_factor == 3.0
    assert alone.preprocessed == alone.consumed == 3 * 80
    assert "sharing factor 1.0" in str(alone)
    assert numbers_of_looks(tmp_path / "log 1")[0] == 6  # in each epoch of each trial


def evaluate_often(trial: Any) -> float:
    trial.prepare(nn.Linear(2, 1))
    for name in ("train", "val", "val", "val"):
        for _ in trial.batches(name, batch_size=8):
            pass
    return 0.0


def test_one_preprocessor_works_for_each_trial_of_a_baseline(tmp_path: Path) -> None:
    log = tmp_path / "log"
    data = {"train": Counted(log, 400, seconds=0.001), "val": Counted(log, 100)}
    policy = policies.Baseline(own_preprocessors=1)
    _, summary = fly(evaluate_often, {0: [Leg((0,))]}, data, policy=policy)
    assert len(set(log.read_text().split()[1::2])) == 1
    # What is evaluated on is made anew each time too, as by a DataLoader.
    assert (summary.preprocessed, summary.consumed) == (400 + 3 * 100, 400 + 3 * 100)


def gather(trial: Any) -> float:
    model = trial.prepare(nn.Linear(2, 1))
    sizes, indices = [], []
    for _ in trial.epochs(1):
        for x, index in trial.batches("train", batch_size=4):
            model(x).sum().backward()
            sizes.append(trial.sum(trial.shard_size))
            mine = torch.zeros(10, dtype=torch.int64)
            mine[index[: trial.shard_size]] = 1
            indices += trial.sum(mine).nonzero().flatten().tolist()
    trial.set_user_attr("sizes", sizes)
    trial.set_user_attr("indices", indices)
    return 0.0


def test_ranks_of_a_trial_share_its_batches(tmp_path: Path) -> None:
    data = {"train": Counted(tmp_path / "log", 10)}
    (seen,), _ = fly(gather, {0: [Leg((0, 1, 2))]}, data)
    # Batches of 4 on three ranks: 2 + 1 + 1, 2 + 1 + 1, and the last 2 as 1 + 1 + 0.
    assert seen["sizes"] == [4, 4, 2]
    assert sorted(seen["indices"]) == list(range(10))


class Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """8-bit pictures of a pixel's margin too much, cropped at random."""

    transform = v2.Compose(
        [
            v2.Pad(1),
            v2.RandomCrop(6),
            v2.ToDtype(torch.float64, scale=True),
            v2.Normalize([0.5], [0.2]),
        ]
    )

    def __init__(self, size: int) -> None:
        made = torch.Generator().manual_seed(size)
        self.images = torch.randint(0, 256, (size, 1, 6, 6), generator=made, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), index % 3


def losses_of_pictures(*, whole: bool = False, **options: Any) -> list[Any]:
    """Of a trial that stays, of one that moves, and of one that grows."""
    train_set: Any = Pictures(41)
    if not whole:
        train_set, augment, finish = take_apart(train_set, augment=1, finish=2)
        options |= {"augment": {"train": augment}, "finish": {"train": finish}}
    script = {
        0: [Leg((0,))],
        1: [Leg((1,), 2), Leg((2,))],
        2: [Leg((2,), 1), Leg((1, 2))],
    }
    seen, _ = fly(train, script, {"train": train_set, "val": Pictures(20), **options})
    return [each["losses"] for each in seen]


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    return losses_of_pictures(whole=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory_bytes": 12_000, "whole": True},
        {"memory_bytes": 40_000, "spill_dir": "here"},
    ],
    ids=["decoded", "ring", "disk"],
)
def test_wherever_data_are_kept_losses_are_the_same(
    options: dict[str, Any], wanted: list[Any], tmp_path: Path
) -> None:
    if "spill_dir" in options:
        options = {**options, "spill_dir": tmp_path}
    assert losses_of_pictures(**options) == wanted
    assert list(tmp_path.iterdir()) == []


# -- processes that serve many trials -------------------------------------------------------------


def test_in_a_flotilla_of_four_gives_the_same_bits(fleet: Any) -> None:
    """The numbers that torch draws at the end tell whether its generator was restored too."""
    (alone,) = noted(fleet, train, {0: [Leg((0,))]})
    first, other, *_ = noted(fleet, train, {n: [Leg((n,))] for n in range(4)})
    assert first == alone
    assert other["losses"] != alone["losses"]  # another trial, another seed


_earlier: list[weakref.ref[nn.Module]] = []  # models of this process' trials


def notes_what_is_left(trial: Any, *, is_in_stages: bool) -> float:
    """One epoch; which of the models of earlier trials are still there goes into attributes."""
    is_left = [known() is not None for known in _earlier]
    model: Any = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if is_in_stages:
        pipeline = trial.pipeline(model, optimizer, F.cross_entropy)
    else:
        trial.prepare(model, optimizer)
    for _ in trial.epochs(1):
        if is_in_stages:
            for images, labels in trial.batches("train", batch_size=10):
                pipeline.step(images, labels)
        else:
            train_epoch(trial, model, optimizer, [], batch_size=10)
    _earlier.append(weakref.ref(model))
    trial.set_user_attr("left", is_left)
    return 0.0


@pytest.mark.parametrize("is_in_stages", [False, True])
@pytest.mark.parametrize("devices", [(0,), (0, 1)])
def test_models_of_earlier_trials_are_gone(
    fleet: Any, devices: tuple[int, ...], is_in_stages: bool
) -> None:
    objective = functools.partial(notes_what_is_left, is_in_stages=is_in_stages)
    script = {number: [Leg(devices)] for number in range(3)}
    lefts = [seen["left"] for seen in noted(fleet, objective, script)]
    assert [len(left) - len(lefts[0]) for left in lefts] == [0, 1, 2]
    assert not any(map(any, lefts))


def compiles(trial: Any) -> float:
    """Compiles a function for a size of its own; whether for any size goes into an attribute."""
    for_any: list[bool] = []

    def noting(graph: Any, inputs: list[Any]) -> Any:
        for_any.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward

    torch.compile(nn.Sequential(nn.Identity(), nn.Tanh()), backend=noting)(
        torch.ones(trial.number + 2)
    )
    trial.set_user_attr("for_any", for_any)
    return 0.0


def test_trials_compile_as_if_they_were_the_first_of_their_process(fleet: Any) -> None:
    """Else for any size after another one, and from torch's limit on not at all."""
    script = {number: [Leg((0,))] for number in range(3)}
    assert noted(fleet, compiles, script) == [{"for_any": [False]}] * 3


_compiled: list[Any] = []  # in this process


def counted(graph: Any, inputs: list[Any]) -> Any:
    _compiled.append(graph)
    return graph.forward


class Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


def compiles_what_it_trains(trial: Any, *, kind: type[Halved] | None) -> float:
    """How much each beginning has compiled goes into an attribute."""

    class Own(Halved):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 2

    model = (kind or Own)(36, 3).double()
    model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    compiled, before = torch.compile(model, backend=counted), len(_compiled)
    for _ in trial.epochs(12):
        for images, _ in trial.batches("train", batch_size=41):
            compiled(images.flatten(1)).square().mean().backward()
            optimizer.step()
        numbers = trial.user_attrs.get("compiled", [])
        trial.set_user_attr("compiled", [*numbers, len(_compiled) - before])
    return 0.0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Halved, [1] + [0] * 11),
        pytest.param(None, [1] * 12, id="a class of each beginning"),
    ],
)
def test_a_trial_that_moves_compiles_what_it_has_not_compiled_there(
    fleet: Any, kind: Any, expected: list[int]
) -> None:
    """Nor does it come to torch's limit, beyond which nothing is compiled."""
    script = {0: [Leg((0,), until_epoch=i + 1) for i in range(11)] + [Leg((0,))]}
    objective = functools.partial(compiles_what_it_trains, kind=kind)
    assert noted(fleet, objective, script) == [{"compiled": expected}]
