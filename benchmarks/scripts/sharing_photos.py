"""The data of `sharing.py`: photographs as they are made ready for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.io import decode_jpeg
from torchvision.transforms import v2

from optuna_fleet import RandomResizedCrop
from optuna_fleet.images import crops

CROP_PX = 224
SIZE_PX = (500, 375)
QUALITY = 90
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NUM_ELEMENTWISE = 2
"""Steps at the end of the transform: the change of type, and normalising."""


def make_photographs(folder: Path, number: int) -> None:
    """Fill `folder` with unlike cut-outs of scikit-learn's photographs, as JPEG files."""
    from sklearn.datasets import load_sample_images

    pictures = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    generator = np.random.default_rng(0)
    for index in range(number):
        picture = pictures[index % len(pictures)]
        scale = generator.uniform(0.85, 1.0)
        width, height = (int(length * scale) for length in SIZE_PX)
        left = int(generator.integers(picture.width - width + 1))
        top = int(generator.integers(picture.height - height + 1))
        tile = picture.crop((left, top, left + width, top + height)).resize(SIZE_PX)
        if generator.random() < 0.5:
            tile = tile.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tile.save(folder / f"{index:05}.jpg", quality=QUALITY)


class Photographs(Dataset[tuple[Any, int]]):
    """`size` samples (image, index) of the files of a folder, which are used over and over."""

    def __init__(self, folder: str, *, size: int, our_crop: bool) -> None:
        self.paths = sorted(map(str, Path(folder).glob("*.jpg")))
        self.size = size
        crop = _our_crop() if our_crop else _torchvisions_crop()
        ends = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        assert len(ends) == NUM_ELEMENTWISE
        self.transform = v2.Compose([*crop, *ends])

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        data = Path(self.paths[index % len(self.paths)]).read_bytes()
        pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return self.transform(pixels), index


def _torchvisions_crop() -> list[Any]:
    return [v2.RandomResizedCrop(CROP_PX, antialias=True), v2.RandomHorizontalFlip()]


def _our_crop() -> list[Any]:
    """To the same bits."""
    if crops._resample is None:
        raise RuntimeError("The crop was not compiled: install with a C compiler.")
    return [RandomResizedCrop(CROP_PX, flip=0.5)]
