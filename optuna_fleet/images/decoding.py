"""Images from files or bytes, by the fastest decoder that is installed.

JPEG is decoded by simplejpeg (``pip install optuna-fleet[images]``), everything else, and whatever
that refuses, by Pillow: so a file is readable where Pillow can read it. Not by torchvision: its
decoders are deprecated and hardly faster, and a damaged PNG has been seen to crash the process.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Source = str | os.PathLike[str] | bytes

JPEG = b"\xff\xd8\xff"


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
    data, name = content(source)
    return decode(data, name, min_size=(min_side or 0, min_side or 0))


# -- decoding -------------------------------------------------------------------------------------


def content(source: Source) -> tuple[bytes, str]:
    """The bytes of an image, and what to call it in an error."""
    if isinstance(source, bytes):
        return source, f"An image of {len(source)} bytes"
    with open(source, "rb") as file:
        return file.read(), f"Image {os.fspath(source)!r}"


def decode(data: bytes, name: str, *, min_size: tuple[int, int]) -> torch.Tensor:
    """The image, at its own size or at the smallest scale that gives ``min_size``."""
    pixels = None
    if data.startswith(JPEG):
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
            fits = (k for k in (1, 2, 4) if all(at_scale(k, n) >= least for n, least in sides))
            eighths = next(fits, 8)
            image.draft(None, (image.width * eighths // 8 or 1, image.height * eighths // 8 or 1))
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def at_scale(eighths: int, side: int) -> int:
    """Pixels of a side, decoded at a scale; rounded up."""
    return -(-side * eighths // 8)


def full_size(data: bytes, name: str) -> tuple[int, int]:
    """Height and width of the full image."""
    import PIL.Image

    if data.startswith(JPEG) and _simplejpeg() is not None:
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
