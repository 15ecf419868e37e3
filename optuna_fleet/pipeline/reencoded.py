"""Smaller copies of large photographs, kept on disk for this sweep and those to come."""

from __future__ import annotations

import hashlib
import os
import weakref
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from optuna_fleet.pipeline.images import (
    JPEG,
    Source,
    content,
    decode,
    encode,
    full_size,
    read_image,
)
from optuna_fleet.pipeline.shards import Shards


class Reencoded:
    """Reads images like `read_image`, but smaller: resized once, and kept as JPEG on disk.

    For data that do not fit decoded into memory: ``ImageFolder(root, loader=Reencoded(folder))``.
    A photograph of 2000 x 1500 is decoded, resized (bilinear, antialiased) and encoded by whoever
    needs it first; from then on a picture of 341 x 256 is read and decoded, in all epochs, trials
    and sweeps that use the folder, on all nodes that see it. **Pixels differ** from the original's
    (smaller, and JPEG twice), but they are always the same ones, kept or not.

    Kept pictures are found by the file's absolute path, size and time of modification (bytes by
    what they are), so a file that is replaced is read anew. They lie in files of up to 4 MiB that
    are written whole; a process that is killed loses less than half of what it made, and at most
    4 MiB. Damaged ones are made anew. Delete the folder when you need it no more.

    Args:
        folder: Where they are kept, below a folder for each `min_side` and `quality`.
        min_side: Pixels of the shorter side. A JPEG that is not larger is read as it is.
        quality: Of the JPEG, from 1 to 100.
        max_bytes: When they take this much together, no more are kept; None for as many as there
            are.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        min_side: int = 256,
        quality: int = 90,
        max_bytes: int | None = None,
    ) -> None:
        _check("min_side", min_side, 1, None)
        _check("quality", quality, 1, 100)
        if max_bytes is not None:
            _check("max_bytes", max_bytes, 0, None)
        self.folder = Path(folder).absolute() / f"{min_side}-{quality}"
        self.min_side = min_side
        self.quality = quality
        self.max_bytes = max_bytes
        self._opened: tuple[int, Shards] | None = None

    def __call__(self, source: Source) -> torch.Tensor:
        """Returns the smaller image as uint8 RGB [3, height, width], channels last in memory.

        Args:
            source: Path, or the content of a file.

        Raises:
            ValueError: No decoder can make an image of the content.
            OSError: The file can't be read.
        """
        shards, key = self._shards(), _key(source)
        picture = shards.get(key)
        if picture is None:
            picture = self._made(source)
            shards.put(key, picture)
        return read_image(picture or source)

    def write(self) -> None:
        """Writes what this process has made so far; otherwise done by itself, now and then."""
        self._shards().write()

    def _shards(self) -> Shards:
        """What this process reads and writes: a forked one leaves its parent's to it."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), Shards(self.folder, max_bytes=self.max_bytes)
            # Also in processes of multiprocessing, which atexit does not know.
            Finalize(None, _write, [os.getpid(), weakref.ref(self._opened[1])], exitpriority=0)
        return self._opened[1]

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

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    def __repr__(self) -> str:
        where = str(self.folder.parent)
        return f"Reencoded({where!r}, min_side={self.min_side}, quality={self.quality})"


def _write(process: int, shards: weakref.ref[Shards]) -> None:
    opened = shards()
    if opened is not None and process == os.getpid():
        opened.write()


def _key(source: Source) -> bytes:
    if isinstance(source, bytes):
        return hashlib.blake2b(source, digest_size=16).digest()
    status = os.stat(source)
    text = f"{status.st_size} {status.st_mtime_ns} {os.path.abspath(os.fspath(source))}"
    return hashlib.blake2b(os.fsencode(text), digest_size=16).digest()


def _check(name: str, value: Any, least: int, most: int | None) -> None:
    if not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f">= {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"The value of `{name}` is {value!r}, but must be an integer {limits}.")
