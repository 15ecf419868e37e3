"""The data of `sharing.py`: photographs that are decoded, cropped and flipped; ready tensors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.io import decode_jpeg
from torchvision.transforms import v2

try:
    import simplejpeg
except ImportError:  # then there is one decoder less to choose from
    simplejpeg = None

CROP_PX = 224
SIZE_PX = (500, 375)
QUALITY = 90
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


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

    def __init__(self, folder: str, *, size: int, decoder: str, crop: str, dtype: str) -> None:
        self.paths = sorted(map(str, Path(folder).glob("*.jpg")))
        self.size = size
        self.decode = DECODERS[decoder]
        steps = CROPS[crop]()
        if dtype == "float32":
            steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        self.transform = v2.Compose(steps)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        data = Path(self.paths[index % len(self.paths)]).read_bytes()
        return self.transform(self.decode(data)), index


class Ready(Dataset[tuple[Any, int]]):
    """Tensors that cost nothing to make: what is left is the hand-over."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.image = torch.randint(0, 256, (3, CROP_PX, CROP_PX), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.image, index


def _decode_pillow(data: bytes) -> Any:
    return v2.functional.pil_to_tensor(Image.open(io.BytesIO(data)).convert("RGB"))


def _decode_torchvision(data: bytes) -> Any:
    return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _decode_simplejpeg(data: bytes) -> Any:
    pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
    return torch.from_numpy(pixels).permute(2, 0, 1)


DECODERS = {
    "pillow": _decode_pillow,
    "torchvision": _decode_torchvision,
    "simplejpeg": _decode_simplejpeg,
}


def _crop_torchvision() -> list[Any]:
    return [v2.RandomResizedCrop(CROP_PX, antialias=True), v2.RandomHorizontalFlip()]


def _crop_fused() -> list[Any]:
    from optuna_fleet import RandomResizedCrop
    from optuna_fleet.images import crops

    if crops._resample is None:
        raise RuntimeError(
            "The crop was not compiled: python setup.py build_ext --inplace, or install with a "
            "C compiler."
        )
    return [RandomResizedCrop(CROP_PX, flip=0.5)]


CROPS = {"torchvision": _crop_torchvision, "fused": _crop_fused}
"""Ways to crop and flip at random, to the same bits."""


def dataset_of(request: dict[str, Any]) -> Dataset[tuple[Any, int]]:
    """The data set that a request of `sharing.py` asks for."""
    if request["data"] == "ready":
        return Ready(request["samples"])
    return Photographs(
        request["folder"],
        size=request["samples"],
        decoder=request["decoder"],
        crop=request["crop"],
        dtype=request["dtype"],
    )
