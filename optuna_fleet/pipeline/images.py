"""Images from files or bytes, by the fastest decoder that is installed, and crops of them.

JPEG is decoded by simplejpeg (``pip install optuna-fleet[images]``), everything else, and whatever
that refuses, by Pillow: so a file is readable where Pillow can read it. Not by torchvision: its
decoders are deprecated and hardly faster (``benchmarks/decoders.py``), and a damaged PNG has been
seen to crash the process.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Source = str | os.PathLike[str] | bytes
Box = tuple[int, int, int, int]
"""Top, left, height, width."""

_JPEG = b"\xff\xd8\xff"


def read_image(source: Source, *, min_side: int | None = None) -> torch.Tensor:
    """Returns an image as uint8 RGB [3, height, width], laid out in memory with channels last.

    Usable as ``ImageFolder(root, loader=read_image)``. The orientation in a file's EXIF data is
    ignored, as PIL and ``ImageFolder`` do; gray, palette, CMYK and 16-bit images come out as by
    ``PIL.Image.convert("RGB")``, and transparency is dropped.

    Args:
        source: Path, or the content of a file.
        min_side: For JPEG: decode at the smallest scale of 1/8, 2/8, ... 8/8 whose shorter side is
            at least this (of 1/8, 1/4, 1/2, 1 without simplejpeg). An image that is smaller from
            the start, or of another format, comes out at its own size.

    Raises:
        ValueError: No decoder can make an image of the content: truncated, corrupt or no image.
        OSError: The file can't be read.
    """
    data, name = _content(source)
    return _decode(data, name, min_size=(min_side or 0, min_side or 0))


class RandomResizedCrop:
    """``v2.RandomResizedCrop`` with bilinear antialiasing; decodes too, if it is given a file.

    The same crops as torchvision's for the same state of torch's generator, which it leaves in the
    same state; and the same pixels, unless an image was decoded at a smaller scale. That is done
    for an encoded JPEG whose crop is at least twice the size of the output.

    Args:
        size: Height and width of the output, or one number for both.
        scale: Range of the crop's share of the image's area.
        ratio: Range of the crop's width / height.
        scaled_decoding: Whether pixels may differ from those of the fully decoded image.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        *,
        scaled_decoding: bool = True,
    ) -> None:
        self.size = _pair(size)
        self.scale = _range("scale", scale)
        self.ratio = _range("ratio", ratio)
        self.scaled_decoding = scaled_decoding
        # In single precision, as torchvision has them.
        low, high = torch.log(torch.tensor(self.ratio, device="cpu")).tolist()
        self._log_ratio: tuple[float, float] = (low, high)

    def __call__(self, image: Any) -> Any:
        """Returns a random crop of an image, or of a path or of the content of an image's file."""
        if isinstance(image, (str, os.PathLike, bytes)):
            return self._of_file(image)
        if type(image) is torch.Tensor:
            return self._resized(image, self.draw(image.shape[-2], image.shape[-1]))
        from torchvision.transforms.v2 import functional

        height, width = functional.get_size(image)
        box = self.draw(height, width)
        return functional.resized_crop(image, *box, size=list(self.size), antialias=True)

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
                top = int(place.random_(0, height - h + 1))
                return top, int(place.random_(0, width - w + 1)), h, w
        return self._central(height, width)

    def _central(self, height: int, width: int) -> Box:
        """What is taken of an image too narrow or too flat for the ratio."""
        h, w = height, width
        if width / height < min(self.ratio):
            h = round(width / min(self.ratio))
        elif width / height > max(self.ratio):
            w = round(height * max(self.ratio))
        return (height - h) // 2, (width - w) // 2, h, w

    def _of_file(self, source: Source) -> torch.Tensor:
        data, name = _content(source)
        height, width = _size(data, name)
        box = self.draw(height, width)
        eighths = self._eighths(box) if self.scaled_decoding else 8
        min_size = _at_scale(eighths, height), _at_scale(eighths, width)
        image = _decode(data, name, min_size=min_size)
        return self._resized(image, _scaled(box, (height, width), image.shape[-2:]))

    def _eighths(self, box: Box) -> int:
        """The scale that makes decoding and resizing cheapest, in eighths.

        Measured: 5/8 to 7/8 take as long to decode as 8/8 or longer, and 3/8 as long as 4/8.
        """
        _, _, h, w = box
        fits = (k for k in (1, 2, 4) if h * k >= 8 * self.size[0] and w * k >= 8 * self.size[1])
        return next(fits, 8)

    def _resized(self, image: torch.Tensor, box: Box) -> torch.Tensor:
        from torchvision.transforms.v2 import functional

        top, left, h, w = box
        crop = image[..., top : top + h, left : left + w]
        resized: torch.Tensor = functional.resize(crop, list(self.size), antialias=True)
        return resized

    def __repr__(self) -> str:
        return f"RandomResizedCrop(size={self.size}, scale={self.scale}, ratio={self.ratio})"


def _scaled(box: Box, full: Sequence[int], actual: Sequence[int]) -> Box:
    """The box on an image decoded smaller, to the nearest pixel."""
    top, left, h, w = box
    (y, bottom), (x, right) = (
        (round(begin * now / was), round(end * now / was))
        for begin, end, was, now in zip(
            (top, left), (top + h, left + w), full, actual, strict=True
        )
    )
    return y, x, bottom - y, right - x


def _at_scale(eighths: int, side: int) -> int:
    """Pixels of a side, decoded at a scale; rounded up."""
    return -(-side * eighths // 8)


# -- decoding -------------------------------------------------------------------------------------


def _content(source: Source) -> tuple[bytes, str]:
    """The bytes of an image, and what to call it in an error."""
    if isinstance(source, bytes):
        return source, f"An image of {len(source)} bytes"
    with open(source, "rb") as file:
        return file.read(), f"Image {os.fspath(source)!r}"


def _decode(data: bytes, name: str, *, min_size: tuple[int, int]) -> torch.Tensor:
    """The image, at its own size or at the smallest scale that gives ``min_size``."""
    pixels = None
    if data.startswith(_JPEG):
        # Pillow has the last word: it reads some that simplejpeg finds corrupt.
        with contextlib.suppress(ValueError):
            pixels = _by_simplejpeg(data, min_size)
    if pixels is None:
        with _clear_errors(name):
            pixels = _by_pillow(data, min_size)
    return torch.from_numpy(pixels).permute(2, 0, 1)


@contextlib.contextmanager
def _clear_errors(name: str) -> Iterator[None]:
    """Any of the many things that Pillow raises becomes one."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"{name} can't be decoded: {error}. It is truncated, corrupt or no image; "
            "repair it, or leave it out of the data set."
        ) from error


@cache
def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _by_simplejpeg(data: bytes, min_size: tuple[int, int]) -> Pixels | None:
    library = _simplejpeg()
    if library is None:
        return None
    height, width, colours, _ = library.decode_jpeg_header(data)
    if colours not in ("YCbCr", "RGB", "Gray") or height * width > _max_pixels():
        return None
    pixels: Pixels = library.decode_jpeg(data, min_height=min_size[0], min_width=min_size[1])
    return pixels


def _by_pillow(data: bytes, min_size: tuple[int, int]) -> Pixels:
    import PIL.Image

    with PIL.Image.open(io.BytesIO(data)) as image:
        if min_size > (0, 0) and image.format == "JPEG":
            sides = list(zip((image.height, image.width), min_size, strict=True))
            fits = (k for k in (1, 2, 4) if all(_at_scale(k, n) >= least for n, least in sides))
            eighths = next(fits, 8)
            image.draft(None, (image.width * eighths // 8 or 1, image.height * eighths // 8 or 1))
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _size(data: bytes, name: str) -> tuple[int, int]:
    """Height and width of the full image."""
    import PIL.Image

    if data.startswith(_JPEG) and _simplejpeg() is not None:
        with contextlib.suppress(ValueError):
            height, width, _, _ = _simplejpeg().decode_jpeg_header(data)
            return height, width
    with _clear_errors(name), PIL.Image.open(io.BytesIO(data)) as image:
        return image.height, image.width


def _max_pixels() -> float:
    """Beyond this many pixels Pillow sees an attack, and raises."""
    import PIL.Image

    limit = PIL.Image.MAX_IMAGE_PIXELS
    return math.inf if limit is None else 2 * limit


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    sizes = tuple(size) if isinstance(size, Sequence) else (size,)
    if len(sizes) not in (1, 2) or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(
            f"The value of `size` is {size!r}, but must be a positive number of pixels, "
            "or a pair of them: (height, width)."
        )
    return sizes[0], sizes[-1]


def _range(name: str, given: tuple[float, float]) -> tuple[float, float]:
    low, high = given
    if not 0 < low <= high:
        raise ValueError(
            f"The value of `{name}` is {given!r}, but must be a pair (lowest, highest) of "
            "positive numbers."
        )
    return float(low), float(high)
