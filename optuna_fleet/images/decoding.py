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
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_JPEG = b"\xff\xd8\xff"


def read_image(source: str | os.PathLike[str] | bytes) -> torch.Tensor:
    """Returns an image as uint8 RGB [3, height, width], laid out in memory with channels last.

    Usable as ``ImageFolder(root, loader=read_image)``. The orientation in a file's EXIF data is
    ignored, as PIL and ``ImageFolder`` do; gray, palette, CMYK and 16-bit images come out as by
    ``PIL.Image.convert("RGB")``, and transparency is dropped.

    Args:
        source: Path, or the content of a file.

    Raises:
        ValueError: No decoder can make an image of the content: truncated, corrupt or no image.
        OSError: The file can't be read.
    """
    if isinstance(source, bytes):
        data, name = source, f"An image of {len(source)} bytes"
    else:
        with open(source, "rb") as file:
            data, name = file.read(), f"Image {os.fspath(source)!r}"
    pixels = None
    if data.startswith(_JPEG):
        # Pillow has the last word: it reads some that simplejpeg finds corrupt.
        with contextlib.suppress(ValueError):
            pixels = _by_simplejpeg(data)
    if pixels is None:
        try:
            pixels = _by_pillow(data)
        except MemoryError:
            raise
        except Exception as error:  # any of the many things that Pillow raises
            raise ValueError(
                f"{name} can't be decoded: {error}. It is truncated, corrupt or no image; "
                "repair it, or leave it out of the data set."
            ) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


@cache
def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _by_simplejpeg(data: bytes) -> NDArray[np.uint8] | None:
    import PIL.Image

    library = _simplejpeg()
    if library is None:
        return None
    height, width, colours, _ = library.decode_jpeg_header(data)
    limit = PIL.Image.MAX_IMAGE_PIXELS  # beyond twice as many Pillow sees an attack, and raises
    if colours not in ("YCbCr", "RGB", "Gray") or height * width > 2 * (limit or math.inf):
        return None
    pixels: NDArray[np.uint8] = library.decode_jpeg(data)
    return pixels


def _by_pillow(data: bytes) -> NDArray[np.uint8]:
    import PIL.Image

    with PIL.Image.open(io.BytesIO(data)) as image:
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))
