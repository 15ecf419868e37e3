"""Pictures in memory, for the measurements on one GPU; and a DataLoader's way to the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision.transforms import v2


class Pictures(torch.utils.data.Dataset[tuple[Any, int]]):
    """Bytes of 3 x `size_px` x `size_px`, flipped at random and normalised."""

    def __init__(self, num: int, size_px: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (min(num, 256), 3, size_px, size_px)
        self.pictures = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.num = num
        self.transform = v2.Compose(
            [
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.5] * 3, [0.25] * 3),
            ]
        )

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.pictures[index % len(self.pictures)]), index % 10


def loader(dataset: Any, batch_size: int, device: str, num_workers: int) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=True,
        pin_memory=device == "cuda",
    )


def to_device(batches: DataLoader[Any], device: str) -> Iterator[Any]:
    for images, labels in batches:
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
