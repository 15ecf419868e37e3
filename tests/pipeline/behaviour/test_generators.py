"""Data sets with random generators of their own: the same augmentation in every process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pipeline_datasets import GENERATORS
from pipeline_harness import draw, serving
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


def read(client: Any, name: str, epoch: int) -> dict[int, float]:
    found = {}
    for batch in client.read(name, epoch=epoch, batch_size=5):
        indices, noise = batch.data
        found.update(
            zip(indices.tolist(), noise.reshape(len(noise), -1)[:, 0].tolist(), strict=True)
        )
    return found


def of_all(make: Any) -> dict[str, Any]:
    """Something for each kind of generator, which it keeps."""
    return {f"train_{kind}": make(new()) for kind, new in GENERATORS.items()}


def read_by_processes(pipeline: SharedPipeline, number: int) -> dict[str, list[dict[int, float]]]:
    """Three epochs of each data set, of which the last is the first again."""
    with serving(pipeline, chunk_bytes=64, num_preprocessors=number) as agent:
        client = agent.client()
        names = [dataset.name for dataset in pipeline.spec().datasets]
        return {name: [read(client, name, epoch) for epoch in (0, 1, 0)] for name in names}


def test_own_generators_are_seeded_for_each_sample() -> None:
    pipeline = SharedPipeline(**of_all(Noisy), seed=5)
    found, inline = read_by_processes(pipeline, 1), pipeline.inline()
    assert read_by_processes(pipeline, 3) == found
    for name, (first, other, again) in found.items():
        assert first == again
        assert set(first.values()).isdisjoint(other.values())
        assert len(set(first.values())) == SIZE
        assert read(inline, name, 1) == other


def test_own_generators_of_what_augments_are_seeded_too() -> None:
    noises = of_all(Noise)
    parts = SharedPipeline(**dict.fromkeys(noises, Images()), augment=noises, seed=5)
    whole = read_by_processes(SharedPipeline(**of_all(Noisier), seed=5), 2)
    assert all(first == again != other for first, other, again in whole.values())
    assert read_by_processes(parts, 2) == whole


def test_two_generators_draw_unlike_numbers() -> None:
    class Two(Noisy):
        def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
            return index, torch.tensor([draw(one) for one in self.generator])

    generators = [np.random.default_rng(0), np.random.default_rng(0)]
    pipeline = SharedPipeline(train=Two(generators), seed=5)
    (batch,) = pipeline.inline().read("train", epoch=0, batch_size=SIZE)
    assert len(set(batch.data[1].reshape(-1).tolist())) == 2 * SIZE
