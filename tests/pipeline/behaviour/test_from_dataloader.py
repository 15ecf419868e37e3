"""A pipeline of the DataLoaders that a script has."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from optuna_fleet import FleetConfigError, SharedPipeline

DATA = [(torch.full((2,), float(i)), i) for i in range(40)]


def read(pipeline: SharedPipeline, name: str, epoch: int, batch_size: int = 7) -> list[Any]:
    batches = pipeline.inline().read(name, epoch=epoch, batch_size=batch_size)
    return [batch.data for batch in batches]


def labels(pipeline: SharedPipeline, name: str, epoch: int) -> list[int]:
    return [int(i) for _, labels in read(pipeline, name, epoch) for i in labels]


def in_pairs(samples: list[Any]) -> Any:
    return torch.stack([row for row, _ in samples]) * 2, [label for _, label in samples]


@pytest.mark.parametrize("collate_fn", [None, in_pairs])
def test_what_is_not_shuffled_comes_as_from_the_loader(collate_fn: Any) -> None:
    loader = DataLoader(Subset(DATA, range(3, 40)), batch_size=7, collate_fn=collate_fn)
    pipeline = SharedPipeline.from_dataloader(train=loader)
    for epoch in range(2):
        for ours, theirs in zip(read(pipeline, "train", epoch), loader, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert [int(i) for i in ours[1]] == [int(i) for i in theirs[1]]


def test_what_is_shuffled_has_a_new_order_in_each_epoch() -> None:
    loaders = {"fold": DataLoader(DATA, shuffle=True), "val": DataLoader(DATA)}
    pipeline = SharedPipeline.from_dataloader(**loaders, seed=3)
    orders = [labels(pipeline, "fold", epoch) for epoch in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(40)] == labels(pipeline, "val", 0)
    assert orders[0] == labels(SharedPipeline(fold=DATA, shuffled=["fold"], seed=3), "fold", 0)


@pytest.mark.parametrize(
    ("sampler", "length"),
    [
        (WeightedRandomSampler([0.0] * 20 + [1.0] * 20, 15), 15),
        (RandomSampler(DATA, replacement=True), 40),
        (RandomSampler(DATA, num_samples=10), 10),
    ],
)
def test_samplers_come_along(sampler: Any, length: int) -> None:
    pipeline = SharedPipeline.from_dataloader(train=DataLoader(DATA, sampler=sampler))
    orders = [labels(pipeline, "train", epoch) for epoch in range(2)]
    assert [len(order) for order in orders] == [length] * 2
    assert orders[0] != orders[1]
    if isinstance(sampler, WeightedRandomSampler):
        assert min(Counter(orders[0])) >= 20


def test_options_go_first() -> None:
    loader = DataLoader(DATA, shuffle=True)
    pipeline = SharedPipeline.from_dataloader(val=loader, shuffled=[], collate_fn=in_pairs)
    assert labels(pipeline, "val", 1) == [*range(40)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs at least one DataLoader, by name"),
        ({"seed": 1}, "needs at least one DataLoader, by name"),
        ({"train": DATA}, "`train` is of type list, but from_dataloader.. takes DataLoaders"),
        ({"train": DataLoader(DATA), "sed": 1}, "`sed` is of type int, .* you mean .seed."),
        ({"train": DataLoader(DATA, batch_size=None)}, "`batch_sampler` of its own"),
        (
            {"train": DataLoader(DATA, worker_init_fn=print)},
            "has a `worker_init_fn` .* seeded before each sample",
        ),
    ],
)
def test_what_can_not_be_shared_is_told(given: dict[str, Any], words: str) -> None:
    with pytest.raises(FleetConfigError, match=words):
        SharedPipeline.from_dataloader(**given)


class ByLength(BatchSampler):
    """One of the user's."""


def test_batches_of_the_users_own_are_refused() -> None:
    loader = DataLoader(DATA, batch_sampler=ByLength(SequentialSampler(DATA), 4, False))
    with pytest.raises(FleetConfigError, match=r"`batch_sampler` .* a batch size of its own"):
        SharedPipeline.from_dataloader(train=loader)
