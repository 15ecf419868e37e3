"""Many small records in few files that never change: written whole, so shared without locks."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import struct
import time
import zlib
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_logger = logging.getLogger(__name__)

FIRST_BYTES, SHARD_BYTES = 64 << 10, 4 << 20
"""Of a process' first file, and of a full one: each is as large as those before it together, so
that of little, too, most is on disk when the process is killed."""

UNWRITTEN_S = 30.0
"""After this long records are written though they fill no file."""

LISTED_S = 10.0
"""The folder is looked at no more often than this."""

_HEAD = struct.Struct("<16sII")  # of a record: key, length, CRC-32
_TAIL = struct.Struct("<II8s")  # of a file: number of records, CRC-32 of what tells where they are
_MAGIC = b"ofshard1"
_SUFFIX, _UNFINISHED = ".shard", ".tmp"
_FORSAKEN_S = 3600
_MOST = 1 << 16  # records of a file, and files


class Shards:
    """Records by key, on disk.

    A process collects what it puts and writes it as one file, which appears under its name when
    it is whole. Others see it then; what is put twice is there twice. A record takes 12 bytes of
    memory in each process that reads.

    Args:
        folder: Where; made if it isn't there.
        max_bytes: What would make the files larger than this together is not kept.
    """

    def __init__(self, folder: Path, *, max_bytes: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._is_full = False
        self._unwritten: dict[bytes, bytes] = {}
        self._unwritten_bytes = 0
        self._written_bytes = FIRST_BYTES
        self._written_at = time.monotonic()
        self._listed_at = -LISTED_S
        self._files: list[Path] = []
        self._offsets: list[NDArray[np.uint32]] = []
        # Sorted: 32 bits of the key's, 16 of the file's number, 16 of the record's in it.
        self._index: NDArray[np.uint64] = np.empty(0, np.uint64)

    def get(self, key: bytes) -> bytes | None:
        """Returns the record of a key of 16 bytes; None if there is none that is whole."""
        if self._unwritten and time.monotonic() - self._written_at > UNWRITTEN_S:
            self.write()
        found = self._unwritten.get(key)
        if found is None:
            found = self._read(key)
        if found is None and time.monotonic() - self._listed_at >= LISTED_S:
            self._listed_at = time.monotonic()
            if self._see_new_files():
                found = self._read(key)
        return found

    def put(self, key: bytes, record: bytes) -> None:
        """Keeps a record."""
        if self._is_full:
            return
        self._unwritten[key] = record
        self._unwritten_bytes += len(record)
        enough = min(self._written_bytes, SHARD_BYTES)
        if self._unwritten_bytes >= enough or len(self._unwritten) + 1 >= _MOST:
            self.write()

    def write(self) -> None:
        """Writes what was put so far, if there is room; else it is let go."""
        records, self._unwritten, self._unwritten_bytes = self._unwritten, {}, 0
        self._written_at = time.monotonic()
        if not records or self._is_full:
            return
        content = _file_of(records)
        name = f"{time.time_ns():020}-{secrets.token_hex(4)}"
        unfinished = self._folder / f"{name}{_UNFINISHED}"
        try:
            if self._max_bytes is not None and self._used() + len(content) > self._max_bytes:
                self._give_up(f"they would take more than {self._max_bytes:,} bytes")
                return
            unfinished.write_bytes(content)
            unfinished.rename(self._folder / f"{name}{_SUFFIX}")
        except OSError as error:
            self._give_up(f"{error}")
            with contextlib.suppress(OSError):
                unfinished.unlink()
        else:
            self._written_bytes += len(content)
            self._see_new_files()

    def _used(self) -> int:
        """Bytes of all files; some of writers who died are deleted."""
        sizes = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                sizes.append(status.st_size)
                if path.suffix == _UNFINISHED and time.time() - status.st_mtime > _FORSAKEN_S:
                    path.unlink()
        return sum(sizes)

    def _give_up(self, reason: str) -> None:
        self._is_full = True
        _logger.warning("No more pictures are kept in %s: %s.", self._folder, reason)

    def _read(self, key: bytes) -> bytes | None:
        hashed = int.from_bytes(key[:4], "little") << 32
        begin = int(np.searchsorted(self._index, np.uint64(hashed)))
        end = int(np.searchsorted(self._index, np.uint64(hashed | 0xFFFFFFFF), side="right"))
        for place in range(end - 1, begin - 1, -1):  # the latest file first
            low = int(self._index[place])
            record = self._record(low >> 16 & 0xFFFF, low & 0xFFFF, key)
            if record is not None:
                return record
        return None

    def _record(self, file: int, number: int, key: bytes) -> bytes | None:
        begin, end = (int(offset) for offset in self._offsets[file][number : number + 2])
        try:
            with open(self._files[file], "rb", buffering=0) as opened:
                content = os.pread(opened.fileno(), end - begin, begin)
        except OSError:  # it has been deleted
            return None
        if len(content) < _HEAD.size:
            return None
        found, length, checksum = _HEAD.unpack_from(content)
        record = content[_HEAD.size :]
        whole = len(record) == length and zlib.crc32(record) == checksum
        return record if found == key and whole else None

    def _see_new_files(self) -> bool:
        known = {path.name for path in self._files}
        try:
            names = [name for name in os.listdir(self._folder) if name.endswith(_SUFFIX)]
        except FileNotFoundError:  # deleted meanwhile
            return False
        new = [self._index]
        for name in sorted(set(names) - known)[: _MOST - len(self._files)]:
            path = self._folder / name
            hashes, offsets = _where(path)
            numbers = np.arange(len(hashes), dtype=np.uint64)
            high = hashes.astype(np.uint64) << np.uint64(32)
            new.append(high | np.uint64(len(self._files) << 16) | numbers)
            self._files.append(path)
            self._offsets.append(offsets)
        if len(new) > 1:
            self._index = np.sort(np.concatenate(new), kind="stable")
        return len(new) > 1


def _file_of(records: dict[bytes, bytes]) -> bytes:
    parts = [
        _HEAD.pack(key, len(record), zlib.crc32(record)) + record
        for key, record in records.items()
    ]
    hashes = b"".join(key[:4] for key in records)
    offsets = np.fromiter(accumulate(map(len, parts), initial=0), np.uint32).tobytes()
    where = hashes + offsets
    return b"".join([*parts, where, _TAIL.pack(len(records), zlib.crc32(where), _MAGIC)])


def _where(path: Path) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The beginnings of the keys in a file, and where its records begin and end."""
    nothing = np.empty(0, np.uint32)
    try:
        numbers = _footer(path)
    except FileNotFoundError:  # deleted meanwhile
        return nothing, nothing
    except (OSError, ValueError):
        _logger.warning("%s is damaged, and left alone: delete it.", path)
        return nothing, nothing
    return numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]


def _footer(path: Path) -> NDArray[np.uint32]:
    with path.open("rb") as file:
        file.seek(-_TAIL.size, os.SEEK_END)
        count, checksum, magic = _TAIL.unpack(file.read())
        length = 4 * (2 * count + 1)
        file.seek(-_TAIL.size - length, os.SEEK_END)
        where = file.read(length)
    if magic != _MAGIC or zlib.crc32(where) != checksum:
        raise ValueError("another file, or not all of it")
    return np.frombuffer(where, "<u4")
