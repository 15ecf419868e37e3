"""Checkpoints of trials: one file, written atomically, verified when read."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import tempfile
from collections import OrderedDict, defaultdict
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist

from optuna_fleet.exceptions import FleetConfigError, FleetError
from optuna_fleet.trainer.groups import group_size
from optuna_fleet.trainer.randomness import rng_state, set_rng_state

FORMAT_VERSION = 1

_MAGIC = b"OptFleet"
_HEADER = struct.Struct("<8sIQ32s")  # magic, version, payload bytes, sha256 of the payload
_PLAIN_TYPES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    torch.dtype,
    torch.device,
    torch.Size,
)


class CheckpointError(FleetError):
    """A checkpoint file that can't be read or written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All that a trial needs to go on elsewhere.

    Attributes:
        loop: Which of the objective's ``trial.epochs`` loops it was made in, from 1.
        epoch: The epoch of that loop to go on with.
        objects: ``state_dict`` of each prepared object, in the order of ``trial.prepare``.
        state: ``trial.state``, the objective's own variables.
        rng: ``rng_state`` of each rank.
        history: Values reported so far.
        version: Format of the file.
    """

    loop: int
    epoch: int
    objects: list[dict[str, Any]]
    state: dict[str, Any]
    rng: list[dict[str, Any]]
    history: list[float]
    version: int = FORMAT_VERSION


def save(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write `checkpoint` to `path` (mode 0600), or leave what was there; never half of it.

    Args:
        path: The file; its folder is made. The checkpoint before it is kept beside it.
        checkpoint: Tensors on any device; they are saved as CPU tensors.

    Raises:
        FleetConfigError: If ``trial.state`` or a ``state_dict`` holds a type that can't be loaded
            safely; names the key.
        CheckpointError: If the file can't be written.
    """
    target = Path(path)
    content = _content(checkpoint)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                _write(file, content, checkpoint.version)
            with suppress(FileNotFoundError):
                os.replace(target, previous(target))
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {target} can't be written ({error}): check that its folder exists "
            f"and has space."
        ) from error


def previous(path: str | os.PathLike[str]) -> Path:
    """Where the checkpoint before the one at `path` is kept."""
    return Path(f"{os.fspath(path)}.previous")


def load_newest(path: str | os.PathLike[str]) -> tuple[Checkpoint | None, list[str]]:
    """Read the newest good checkpoint: that at `path`, else the one before it.

    Returns:
        The checkpoint, or None if neither is good; and what was wrong with those passed over.
    """
    problems: list[str] = []
    for candidate in (path, previous(path)):
        try:
            return load(candidate), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read and verify a checkpoint; its tensors are on the CPU.

    Raises:
        CheckpointError: If the file is missing, torn, altered, or of another format.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} can't be read ({error}): check the folder, or start the trial "
            f"again from its first epoch."
        ) from error
    payload = _verified(path, data)
    content = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    return Checkpoint(**content)


def gather_rng() -> list[dict[str, Any]]:
    """``rng_state`` of every rank of the default group, on every rank."""
    if group_size() == 1:
        return [rng_state()]
    states: list[Any] = [None] * group_size()
    dist.all_gather_object(states, rng_state())
    return states


def restore_rng(states: list[dict[str, Any]]) -> None:
    """Restore this rank's own generators, or rank 0's if the number of ranks changed."""
    rank = dist.get_rank() if group_size() == len(states) and dist.is_initialized() else 0
    set_rng_state(states[rank])


def _content(checkpoint: Checkpoint) -> dict[str, Any]:
    content = {field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)}
    content["objects"] = [
        _portable(item, f"objects[{index}]", own=False)
        for index, item in enumerate(checkpoint.objects)
    ]
    content["state"] = {
        _portable(key, "trial.state", own=True): _portable(
            value, f"trial.state[{key!r}]", own=True
        )
        for key, value in checkpoint.state.items()
    }
    return content


def _write(file: IO[bytes], content: dict[str, Any], version: int) -> None:
    file.write(bytes(_HEADER.size))
    hashing = _Hashing(file)
    torch.save(content, hashing)  # type: ignore[arg-type]  # it only needs to write
    file.seek(0)
    file.write(_HEADER.pack(_MAGIC, version, hashing.num_bytes, hashing.digest.digest()))
    file.flush()
    os.fsync(file.fileno())


class _Hashing:
    """Passes bytes on to a file and hashes them, so that the payload need not be in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.num_bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _verified(path: str | os.PathLike[str], data: bytes) -> memoryview:
    advice = "the trial goes on from its checkpoint before, or from its first epoch"
    if len(data) < _HEADER.size:
        raise CheckpointError(f"The checkpoint {path} is truncated: {advice}.")
    magic, version, num_bytes, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise CheckpointError(f"The file {path} is no checkpoint of optuna-fleet: {advice}.")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {path} has format version {version}, but must have {FORMAT_VERSION}: "
            f"use the version of optuna-fleet that wrote it, or {advice}."
        )
    payload = memoryview(data)[_HEADER.size :]
    if len(payload) != num_bytes:
        raise CheckpointError(
            f"The checkpoint {path} is truncated or torn ({len(payload)} of {num_bytes} bytes): "
            f"{advice}."
        )
    if hashlib.sha256(payload).digest() != digest:
        raise CheckpointError(f"The checkpoint {path} is corrupt (checksum differs): {advice}.")
    return payload


def _portable(value: Any, where: str, *, own: bool) -> Any:
    """Copy of `value` that ``torch.load(weights_only=True)`` accepts, with compact CPU tensors.

    Args:
        value: A tensor, a plain value, or containers of them.
        where: Its name in errors.
        own: Whether it is the user's own (``trial.state``), who can convert NumPy values; those in
            other objects (a learning rate, say) become Python numbers here.
    """
    if isinstance(value, torch.Tensor):
        return _compact(value)
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, np.generic) and not own:
        return value.item()
    if type(value) in (list, tuple, set):
        items = enumerate(value)
        return type(value)(_portable(item, f"{where}[{key}]", own=own) for key, item in items)
    if type(value) in (dict, OrderedDict, defaultdict):
        return _portable_dict(value, where, own=own)
    raise FleetConfigError(_refusal(value, where))


def _portable_dict(value: dict[Any, Any], where: str, *, own: bool) -> dict[Any, Any]:
    items = {
        _portable(key, f"a key of {where}", own=own): _portable(item, f"{where}[{key!r}]", own=own)
        for key, item in value.items()
    }
    if not isinstance(value, OrderedDict):
        return items
    ordered = OrderedDict(items)
    if hasattr(value, "_metadata"):  # versions of the modules, for load_state_dict
        vars(ordered)["_metadata"] = value._metadata
    return ordered


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided:
        return tensor
    # torch saves whole storages: a view of a large tensor would take all of it along.
    is_part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if is_part else tensor


def _refusal(value: Any, where: str) -> str:
    name = type(value).__name__
    if isinstance(value, np.generic):
        return f"The value of {where} is a NumPy {name}; store `value.item()` instead."
    if isinstance(value, np.ndarray):
        return f"The value of {where} is a NumPy array; store `torch.from_numpy(value)` instead."
    return (
        f"The value of {where} is a {name}, but a checkpoint takes only numbers, strings, bytes, "
        f"tensors, and lists, tuples, sets and dicts of them: store such values, and make the "
        f"{name} from them when the trial resumes."
    )
