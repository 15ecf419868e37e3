"""Random crops of images, resized and mirrored: one step in place of three."""

from __future__ import annotations

import math
import numbers
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from optuna_fleet.arguments import check_number, check_that
from optuna_fleet.images.decoding import read_image

try:
    from optuna_fleet.images import _resample
except ImportError:  # not compiled here, or not for this processor: PyTorch's kernel is used
    _resample = None  # type: ignore[assignment]

Box = tuple[int, int, int, int]
"""Top, left, height, width."""


class RandomResizedCrop:
    """``v2.RandomResizedCrop`` (bilinear, antialiased) and ``v2.RandomHorizontalFlip`` in one.

    The same crops as torchvision's for the same state of torch's generator, which it leaves in the
    same state; and the same pixels. A uint8 RGB tensor [3, height, width] whose channels come last
    in memory, as `read_image` gives it, takes a third of the time: crop, resize, flip and the
    change to channels first are one compiled step (where the package was installed with a C
    compiler, on x86 processors with AVX2). Other tensors and PIL images go through torchvision, to
    the same result.

    Args:
        size: Height and width of the output, or one number for both.
        scale: Range of the crop's share of the image's area.
        ratio: Range of the crop's width / height.
        flip: Probability of a horizontal flip. Of 0, nothing is drawn for it.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        *,
        flip: float = 0.0,
    ) -> None:
        check_number("flip", flip, least=0, most=1)
        self.size = _pair(size)
        self.scale = _range("scale", scale)
        self.ratio = _range("ratio", ratio)
        self.flip = float(flip)
        # In single precision, as torchvision has them.
        low, high = torch.log(torch.tensor(self.ratio, device="cpu")).tolist()
        self._log_ratio: tuple[float, float] = (low, high)

    def __call__(self, image: Any) -> Any:
        """Returns a random crop of an image, or of a path or of the content of an image's file.

        Args:
            image: uint8 or float tensor [..., height, width], PIL image, path, or bytes.

        Returns:
            As torchvision's: a tensor (contiguous) of a tensor, a PIL image of a PIL image. Of a
            file a uint8 tensor [3, height, width].
        """
        if isinstance(image, (str, os.PathLike, bytes)):
            image = read_image(image)
        if isinstance(image, torch.Tensor):
            height, width = image.shape[-2:]
        else:
            from torchvision.transforms.v2 import functional

            height, width = functional.get_size(image)
        return self._resized(image, self.draw(height, width), mirrored=self._draw_flip())

    def draw(self, height: int, width: int) -> Box:
        """Draws the crop of an image of this size."""
        number = torch.empty(1, device="cpu")
        for _ in range(10):
            area = height * width * number.uniform_(*self.scale).item()
            ratio = number.uniform_(*self._log_ratio).exp_().item()
            w = round(math.sqrt(area * ratio))
            h = round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                place = torch.empty(1, dtype=torch.int64, device="cpu")
                top = place.random_(0, height - h + 1).item()
                return int(top), int(place.random_(0, width - w + 1).item()), h, w
        return self._central(height, width)

    def _draw_flip(self) -> bool:
        return self.flip > 0 and torch.empty(1, device="cpu").uniform_().item() < self.flip

    def _central(self, height: int, width: int) -> Box:
        """What is taken of an image too narrow or too flat for the ratio."""
        h, w = height, width
        if width / height < min(self.ratio):
            h = round(width / min(self.ratio))
        elif width / height > max(self.ratio):
            w = round(height * max(self.ratio))
        return (height - h) // 2, (width - w) // 2, h, w

    def _resized(self, image: Any, box: Box, *, mirrored: bool) -> Any:
        if _resample is not None and _is_usual(image):
            out = torch.empty((3, *self.size), dtype=torch.uint8, device="cpu")
            _resample.resized_crop(image.numpy(), box, out.numpy(), mirrored)
            return out if type(image) is torch.Tensor else out.as_subclass(type(image))
        from torchvision.transforms.v2 import functional

        crop = functional.resized_crop(image, *box, size=list(self.size), antialias=True)
        crop = functional.horizontal_flip(crop) if mirrored else crop
        if not isinstance(crop, torch.Tensor):
            return crop
        result: torch.Tensor = crop.contiguous()  # of any class: a tensor
        return result if type(crop) is torch.Tensor else result.as_subclass(type(crop))

    def __repr__(self) -> str:
        return (
            f"RandomResizedCrop(size={self.size}, scale={self.scale}, ratio={self.ratio}, "
            f"flip={self.flip})"
        )


def _is_usual(image: Any) -> bool:
    """Whether the compiled step takes it."""
    if type(image) is not torch.Tensor:
        tv_tensors = sys.modules.get("torchvision.tv_tensors")
        if tv_tensors is None or type(image) is not tv_tensors.Image:
            return False
    is_rgb = image.dtype is torch.uint8 and image.ndim == 3 and image.shape[0] == 3
    return bool(is_rgb and image.is_cpu and image.layout is torch.strided)


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    sizes: tuple[Any, ...] = tuple(size) if isinstance(size, Sequence) else (size,)
    wanted = "be a positive number of pixels, or a pair of them: (height, width)"
    check_that(
        "size", size, lambda _: len(sizes) in (1, 2) and all(map(_is_pixels, sizes)), wanted
    )
    return int(sizes[0]), int(sizes[-1])


def _is_pixels(number: Any) -> bool:
    return isinstance(number, numbers.Integral) and int(number) > 0


def _range(name: str, given: tuple[float, float]) -> tuple[float, float]:
    wanted = "be a pair (lowest, highest) of positive numbers"
    check_that(name, given, _is_range, wanted)
    low, high = map(float, given)
    return low, high


def _is_range(given: Any) -> bool:
    try:
        low, high = given
        return bool(0 < low <= high < math.inf)
    except (TypeError, ValueError):  # no pair, or not of numbers
        return False
