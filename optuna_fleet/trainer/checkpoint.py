"""Checkpoints of trials: what is in them, packed into one file in memory, and how it is read."""

from __future__ import annotations

import mmap
import os
import pickle
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from optuna_fleet.checkpoints import file as checkpoint_file
from optuna_fleet.checkpoints.file import ADVICE, CheckpointError, Owner
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.groups import group_size
from optuna_fleet.trainer.randomness import set_rng_state


class MemoryFile:
    """Bytes in memory with a path, by which torch maps them instead of making copies.

    It is there as long as it is referenced, or what was loaded from it. What is saved at its path
    may have any size.
    """

    def __init__(self, size: int = 0) -> None:
        self._descriptor = os.memfd_create("optuna-fleet")
        self.path = f"/proc/self/fd/{self._descriptor}"
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, size)

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> MemoryFile:
        """One with these bytes in it."""
        made = cls(len(data))
        made.data[:] = data
        return made

    def __reduce__(self) -> Any:
        """Pickled with what is in it."""
        return MemoryFile.of, (bytes(self.data),)

    @property
    def data(self) -> memoryview:
        """What is in it; to write there writes to it."""
        is_empty = not os.fstat(self._descriptor).st_size
        return memoryview(b"" if is_empty else mmap.mmap(self._descriptor, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All that a trial needs to go on elsewhere."""

    loop: int  # of the objective's over `trial.epochs`, from 1
    epoch: int  # of that loop, to go on with
    objects: list[dict[str, Any]]  # `state_dict` of each prepared one, in their order
    state: dict[str, Any]  # `trial.state`
    rng: list[dict[str, Any]]  # `rng_state` of each rank
    history: dict[int, float]  # values reported so far, by step
    modules: list[int] = field(default_factory=list)  # which of the objects are these
    names: list[str] = field(default_factory=list)  # of the objects: the user's, or their types'
    remainder: list[dict[str, Any]] = field(default_factory=list)  # of each object, see `states`
    step: int | None = None  # of the epoch's first pass, to go on with; None for its beginning
    totals: list[dict[str, Any]] = field(default_factory=list)  # of each rank, before that step
    on_device: list[int] = field(default_factory=list)  # leaves of `state` that were on a GPU

    @property
    def position(self) -> tuple[int, ...]:
        """How far the trial is in it: loop, epoch, and step where it left an epoch's midst."""
        return self.loop, self.epoch, *(() if self.step is None else (self.step,))


@dataclass(frozen=True, slots=True)
class Captured:
    """A checkpoint as it is handed over, and written: nothing changes it any more."""

    file: MemoryFile
    position: tuple[int, ...]

    @property
    def content(self) -> Checkpoint:
        """What is in it; its tensors are in the file's memory."""
        return unpacked(self.file)


# -- packed and unpacked --------------------------------------------------------------------------


def captured(checkpoint: Checkpoint) -> Captured:
    """Copy a checkpoint to the CPU's memory.

    Raises:
        FleetConfigError: If ``trial.state`` or a ``state_dict`` holds a type that can't be loaded
            safely; names the key.
        CheckpointError: If torch could not load it again.
    """
    content = {field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)}
    content["on_device"] = _on_device(checkpoint.state)
    try:
        content["state"] = pytree.tree_map_only(torch.Tensor, _compact, checkpoint.state)
        file = _packed(content)
    except Exception:  # something has to be converted, or can't be kept: say what
        content["state"] = _portable(checkpoint.state, "trial.state", own=True)
        for name in ("objects", "remainder", "totals"):
            content[name] = _portable(content[name], name, own=False)
        file = _packed(content)
    return Captured(file, checkpoint.position)


def _packed(content: dict[str, Any]) -> MemoryFile:
    file = MemoryFile()
    try:
        with _without_crc():
            torch.save(content, file.path)
    except RuntimeError as error:  # torch can't write
        raise CheckpointError(
            f"What the trial keeps can't be put together in memory ({error}): check that there is "
            "room for it, and that files may be as large (`ulimit -f`)."
        ) from error
    _check_loadable(file)
    return file


@contextmanager
def _without_crc() -> Iterator[None]:
    """Those of torch take longer than all the rest; files have a SHA-256 of ours."""
    setting: Any = torch.serialization
    was = setting.get_crc32_options()
    setting.set_crc32_options(False)
    try:
        yield
    finally:
        setting.set_crc32_options(was)


def _check_loadable(file: MemoryFile) -> None:
    try:
        try:
            unpacked(file, "meta")  # reads no numbers
        except (RuntimeError, pickle.UnpicklingError):  # sparse tensors need theirs
            unpacked(file)
    except pickle.UnpicklingError as error:
        why = str(error).partition("WeightsUnpickler error:")[2].strip().split("\n")[0]
        raise CheckpointError(
            f"Torch could not load again what the trial keeps ({why or error}): store plain "
            "numbers, strings and tensors."
        ) from error


def unpacked(file: MemoryFile, device: str = "cpu") -> Checkpoint:
    """The checkpoint in what `captured` has made, with its tensors on that device.

    On the CPU they are not copied: one that is kept keeps all of the file.
    """
    loaded = torch.load(file.path, map_location=device, mmap=device == "cpu", weights_only=True)
    return Checkpoint(**loaded)


def placed(saved: Checkpoint, device: torch.device) -> Checkpoint:
    """With those tensors of its state on the device that were on one."""
    leaves, structure = pytree.tree_flatten(saved.state)
    for index in saved.on_device:
        leaves[index] = leaves[index].to(device)
    return replace(saved, state=pytree.tree_unflatten(leaves, structure))


def _on_device(state: dict[str, Any]) -> list[int]:
    leaves = enumerate(pytree.tree_leaves(state))
    return [i for i, leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_cpu]


def restore_rng(states: list[dict[str, Any]]) -> None:
    """Restore this rank's own generators, or rank 0's if the number of ranks changed."""
    rank = dist.get_rank() if group_size() == len(states) and dist.is_initialized() else 0
    set_rng_state(states[rank])


# -- read -----------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], owner: Owner) -> Captured:
    """Read and verify a checkpoint; its tensors are on the CPU.

    Raises:
        CheckpointError: As of `loaded`, or it can't be read.
    """
    return loaded(path, checkpoint_file.contents(path), owner)


def loaded(path: str | os.PathLike[str], data: bytes | bytearray, owner: Owner) -> Captured:
    """The checkpoint that `data` is, which was read at `path`.

    Raises:
        CheckpointError: It is torn, altered, of another format, or another trial's; or torch can't
            load what is in it.
    """
    payload = checkpoint_file.verified(path, data, owner)
    try:
        file = MemoryFile.of(payload)
        return Captured(file, unpacked(file).position)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"The checkpoint {path} has in it what torch can't load here: {ADVICE}."
        ) from error


# -- what can be kept -----------------------------------------------------------------------------

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.dtype, torch.device, torch.Size),
)


def _portable(value: Any, where: str, *, own: bool) -> Any:
    """`value` as ``torch.load(weights_only=True)`` accepts it, with the same tensors.

    The user's own (``trial.state``) is refused where he can convert it; in other objects a NumPy
    number (a learning rate, say) becomes one of Python, a defaultdict a dict.
    """
    if isinstance(value, torch.Tensor) and _can_be_loaded(type(value.detach())):
        return _compact(value.detach())
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, np.generic) and not own:
        return value.item()
    if kind in (list, tuple, set):
        return kind(_portable(v, f"{where}[{i}]", own=own) for i, v in enumerate(value))
    if kind in (dict, OrderedDict, Counter) or (kind is defaultdict and not own):
        keys = [_portable(key, f"a key of {where}", own=own) for key in value]
        items = [_portable(v, f"{where}[{key!r}]", own=own) for key, v in value.items()]
        made: Any = dict(zip(keys, items, strict=True))
        made = made if kind is defaultdict else kind(made)
        if hasattr(value, "_metadata"):  # versions of the modules, for load_state_dict
            made._metadata = value._metadata
        return made
    raise FleetConfigError(
        f"The value of {where} is a {kind.__name__}, but a checkpoint takes only numbers and "
        "strings of Python, bytes, tensors, and plain lists, tuples, sets and dicts of them: keep "
        f"such values, and make the {kind.__name__} from them where you need one."
    )


def _can_be_loaded(kind: type[torch.Tensor]) -> bool:
    return kind is torch.Tensor or kind in torch.serialization.get_safe_globals()


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Torch saves whole storages: a view of a large tensor would take all of it along."""
    if tensor.layout != torch.strided:
        return tensor
    size = tensor.numel() * tensor.element_size()
    return tensor.detach().clone() if tensor.untyped_storage().nbytes() > size else tensor
