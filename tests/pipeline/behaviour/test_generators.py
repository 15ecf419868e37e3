"""Data sets with random generators of their own: the same augmentation in every process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pipeline_datasets import GENERATORS
from pipeline_harness import Agent, draw
from torch.utils.data import Dataset

from optuna_fleet import SharedPipeline

SIZE = 24


class Noisy(Dataset[Any]):
    """Images whose noise comes from a generator that the data set keeps."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, draw(self.generator)


class Noise:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, sample: tuple[int, torch.Tensor]) -> tuple[int, torch.Tensor]:
        return sample[0], sample[1] + draw(self.generator)


class Images(Dataset[Any]):
    """Plain images of one value each."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((3, 8, 8), index, dtype=torch.uint8)


class Noisier(Images):
    """The same, with noise from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.noise = Noise(generator)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return self.noise(super().__getitem__(index))


def read(client: Any, epoch: int) -> dict[int, float]:
    found = {}
    for batch in client.read("train", epoch=epoch, batch_size=5):
        indices, noise = batch.data
        found.update(
            zip(indices.tolist(), noise.reshape(len(noise), -1)[:, 0].tolist(), strict=True)
        )
    return found


def read_by_processes(pipeline: SharedPipeline, **options: Any) -> list[dict[int, float]]:
    agent = Agent(pipeline, chunk_bytes=64, **options)
    try:
        client = agent.client()
        return [read(client, epoch) for epoch in (0, 1, 0)]
    finally:
        agent.close()


@pytest.mark.parametrize("kind", GENERATORS)
def test_own_generators_are_seeded_for_each_sample(kind: str) -> None:
    pipeline = SharedPipeline(train=Noisy(GENERATORS[kind]()), seed=5)
    first, other, again = read_by_processes(pipeline, num_preprocessors=1)
    assert first == again
    assert set(first.values()).isdisjoint(other.values())
    assert len(set(first.values())) == SIZE
    assert read_by_processes(pipeline, num_preprocessors=3) == [first, other, first]
    assert read(pipeline.inline(), 1) == other


@pytest.mark.parametrize("kind", GENERATORS)
def test_own_generators_of_what_augments_are_seeded_too(kind: str) -> None:
    parts = SharedPipeline(train=Images(), augment=Noise(GENERATORS[kind]()), seed=5)
    whole = SharedPipeline(train=Noisier(GENERATORS[kind]()), seed=5)
    wanted = read_by_processes(whole)
    assert wanted[0] == wanted[2] != wanted[1]
    assert read_by_processes(parts) == wanted


def test_two_generators_draw_unlike_numbers() -> None:
    class Two(Noisy):
        def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
            return index, torch.tensor([draw(one) for one in self.generator])

    generators = [np.random.default_rng(0), np.random.default_rng(0)]
    pipeline = SharedPipeline(train=Two(generators), seed=5)
    (batch,) = pipeline.inline().read("train", epoch=0, batch_size=SIZE)
    assert len(set(batch.data[1].reshape(-1).tolist())) == 2 * SIZE
