"""Smaller copies of large photographs, kept on disk for this sweep and those to come."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import zlib
from pathlib import Path

import torch

from optuna_fleet.arguments import check_number, path
from optuna_fleet.pipeline.images import (
    JPEG,
    Source,
    content,
    decode,
    encode,
    full_size,
    read_image,
)

_CHECK_BYTES = 4
_logger = logging.getLogger(__name__)


class Reencoded:
    """Reads images like `read_image`, but smaller: resized once, and kept as JPEG on disk.

    For data that do not fit decoded into memory: ``ImageFolder(root, loader=Reencoded(folder))``.
    A photograph of 2000 x 1500 is decoded, resized (bilinear, antialiased) and encoded by whoever
    needs it first; from then on a picture of 341 x 256 is read and decoded, in all epochs, trials
    and sweeps that use the folder, on all nodes that see it. **Pixels differ** from the original's
    (smaller, and JPEG twice), but they are always the same ones, kept or not.

    Kept pictures are found by the file's absolute path, size and time of modification (bytes by
    what they are), so a file that is replaced is read anew. Each is a file, which appears when it
    is whole; damaged ones are made anew. If the disk is full, no more are kept. Delete the folder
    when you need it no more.

    Args:
        folder: Where they are kept, below a folder for each `min_side` and `quality`.
        min_side: Pixels of the shorter side. A JPEG that is not larger is read as it is.
        quality: Of the JPEG, from 1 to 100.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, min_side: int = 256, quality: int = 90
    ) -> None:
        check_number("min_side", min_side, least=1, whole=True)
        check_number("quality", quality, least=1, most=100, whole=True)
        self.folder = path("folder", folder) / f"{min_side}-{quality}"
        self.min_side = min_side
        self.quality = quality
        self._keeps = True

    def __call__(self, source: Source) -> torch.Tensor:
        """Returns the smaller image as uint8 RGB [3, height, width], channels last in memory.

        Args:
            source: Path, or the content of a file.

        Raises:
            ValueError: No decoder can make an image of the content.
            OSError: The file can't be read.
        """
        key = _key(source)
        file = self.folder / key[:2] / f"{key[2:]}.jpg"
        picture = _kept(file)
        if picture is None:
            picture = self._made(source)
            self._keep(file, picture)
        return read_image(picture or source)

    def _made(self, source: Source) -> bytes:
        """The smaller picture as JPEG; nothing, where the original is as good."""
        data, name = content(source)
        if data.startswith(JPEG) and min(full_size(data, name)) <= self.min_side:
            return b""
        from torchvision.transforms.v2 import functional

        image = decode(data, name, min_size=(2 * self.min_side, 2 * self.min_side))
        if min(image.shape[1:]) > self.min_side:
            image = functional.resize(image, [self.min_side], antialias=True)
        return encode(image, self.quality)

    def _keep(self, file: Path, picture: bytes) -> None:
        if not self._keeps:
            return
        unfinished = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(picture + _checksum(file, picture))
            unfinished.rename(file)
        except OSError as error:
            self._keeps = False
            _logger.warning("No more pictures are kept in %s: %s.", self.folder, error)
            with contextlib.suppress(OSError):
                unfinished.unlink()

    def __repr__(self) -> str:
        where = str(self.folder.parent)
        return f"Reencoded({where!r}, min_side={self.min_side}, quality={self.quality})"


def _kept(file: Path) -> bytes | None:
    """The picture in a file; None if it is not there, or not whole."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    picture = data[:-_CHECK_BYTES]
    return picture if data == picture + _checksum(file, picture) else None


def _checksum(file: Path, picture: bytes) -> bytes:
    """Comes behind a picture, where decoders leave it alone; no other file has it."""
    return zlib.crc32(picture, zlib.crc32(file.name.encode())).to_bytes(_CHECK_BYTES, "little")


def _key(source: Source) -> str:
    if isinstance(source, bytes):
        named = source
    else:
        status = os.stat(source)
        where = os.path.abspath(os.fspath(source))
        named = os.fsencode(f"{status.st_size} {status.st_mtime_ns} {where}")
    return hashlib.blake2b(named, digest_size=16).hexdigest()
