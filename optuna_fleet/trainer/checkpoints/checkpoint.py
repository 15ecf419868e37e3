"""Checkpoints of trials: what is in them, packed into one file in memory, and how it is read."""

from __future__ import annotations

import _codecs
import math
import os
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from optuna_fleet.checkpoints import file as checkpoint_file
from optuna_fleet.checkpoints.file import ADVICE, CheckpointError, Owner
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.checkpoints.memory_file import MemoryFile
from optuna_fleet.trainer.groups import group_size
from optuna_fleet.trainer.randomness import set_rng_state

_PLAIN_TYPES = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.dtype, torch.device, torch.Size),
)

# Newer versions of torch load these by themselves, 2.4 does not; bytes are pickled as `encode`.
torch.serialization.add_safe_globals([_codecs.encode, bytearray, complex, set])


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All that a trial needs to go on elsewhere.

    Attributes:
        loop: Which of the objective's ``trial.epochs`` loops it was made in, from 1.
        epoch: The epoch of that loop to go on with.
        objects: ``state_dict`` of each prepared object, in the order of ``trial.prepare``.
        state: ``trial.state``, the objective's own variables.
        rng: ``rng_state`` of each rank.
        history: Values reported so far, by step.
        modules: Which of the objects are modules, by position.
        names: What each of the objects is called: by the user, or its type's name.
        remainder: What the ``state_dict`` of each object leaves out (`states`).
        parameters: What was suggested to the trial, but for choices that are objects.
        step: The batch of the epoch's first pass to go on with; None for the epoch's beginning.
        totals: What each rank has added to ``trial.totals`` before that step.
        on_device: Which leaves of `state` are tensors that were on the trial's GPU.
    """

    loop: int
    epoch: int
    objects: list[dict[str, Any]]
    state: dict[str, Any]
    rng: list[dict[str, Any]]
    history: dict[int, float]
    modules: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    remainder: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    totals: list[dict[str, Any]] = field(default_factory=list)
    on_device: list[int] = field(default_factory=list)

    @property
    def position(self) -> tuple[int, ...]:
        """How far the trial is in it: loop, epoch, and step where it left an epoch's midst."""
        return self.loop, self.epoch, *(() if self.step is None else (self.step,))


@dataclass(frozen=True, slots=True)
class Captured:
    """A checkpoint as it is handed over, and written: nothing changes it any more.

    Attributes:
        file: What `unpacked` takes.
        position: How far the trial is in it.
        epoch: The epoch to go on with.
    """

    file: MemoryFile
    position: tuple[int, ...]
    epoch: int

    @property
    def content(self) -> Checkpoint:
        """What is in it; its tensors are in the file's memory."""
        return unpacked(self.file)


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
        file = _packed(content | _portable_parts(checkpoint))
    return Captured(file, checkpoint.position, checkpoint.epoch)


def _portable_parts(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "objects": _portable(checkpoint.objects, "objects", own=False),
        "remainder": _portable(checkpoint.remainder, "remainder", own=False),
        "state": _portable(checkpoint.state, "trial.state", own=True),
        "totals": _portable(checkpoint.totals, "trial.totals", own=False),
    }


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


@contextmanager
def _without_crc() -> Iterator[None]:
    """Those of torch take longer than all the rest; files have a SHA-256 of ours."""
    setting: Any = torch.serialization
    if not hasattr(setting, "set_crc32_options"):  # before torch 2.6
        yield
        return
    was = setting.get_crc32_options()
    setting.set_crc32_options(False)
    try:
        yield
    finally:
        setting.set_crc32_options(was)


def placed(saved: Checkpoint, device: torch.device) -> Checkpoint:
    """With those tensors of its state on the device that were on one."""
    leaves, structure = pytree.tree_flatten(saved.state)
    for index in saved.on_device:
        leaves[index] = leaves[index].to(device)
    return replace(saved, state=pytree.tree_unflatten(leaves, structure))


def _on_device(state: dict[str, Any]) -> list[int]:
    leaves = enumerate(pytree.tree_leaves(state))
    return [i for i, leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_cpu]


def load(path: str | os.PathLike[str], owner: Owner) -> Captured:
    """Read and verify a checkpoint; its tensors are on the CPU.

    Raises:
        CheckpointError: As of `loaded`, or it can't be read.
    """
    return loaded(path, checkpoint_file.contents(path), owner)


def loaded(
    path: str | os.PathLike[str],
    data: bytes | bytearray,
    owner: Owner,
    parameters: Mapping[str, Any] | None = None,
) -> Captured:
    """The checkpoint that `data` is, which was read at `path`.

    Args:
        path: For errors.
        data: All that is in the file.
        owner: The trial; what is another's is not good.
        parameters: What the study has suggested to it so far; likewise.

    Raises:
        CheckpointError: It is torn, altered, of another format, or another trial's; or of a trial
            of that number that had other `parameters`; or torch can't load what is in it.
    """
    payload = checkpoint_file.verified(path, data, owner)
    try:
        file = MemoryFile.of(payload)
        content = unpacked(file)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"The checkpoint {path} has in it what torch can't load here: {ADVICE}."
        ) from error
    if parameters is not None:
        _check_parameters(path, content.parameters, parameters)
    return Captured(file, content.position, content.epoch)


def _check_parameters(
    path: str | os.PathLike[str], made_with: Mapping[str, Any], known: Mapping[str, Any]
) -> None:
    for name, value in made_with.items():
        if name not in known or not _same(value, known[name]):
            now = f"is {known[name]!r}" if name in known else "is not known"
            raise CheckpointError(
                f"The checkpoint {path} is of a trial whose parameter {name!r} was {value!r}, but "
                f"that of this trial {now}: {ADVICE}."
            )


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):  # databases may round
        both_nan = math.isnan(value) and math.isnan(other)
        return both_nan or math.isclose(value, other, rel_tol=1e-12)
    return bool(value == other)


def restore_rng(states: list[dict[str, Any]]) -> None:
    """Restore this rank's own generators, or rank 0's if the number of ranks changed."""
    rank = dist.get_rank() if group_size() == len(states) and dist.is_initialized() else 0
    set_rng_state(states[rank])


def _portable(value: Any, where: str, *, own: bool) -> Any:
    """`value` as ``torch.load(weights_only=True)`` accepts it, with the same tensors.

    Args:
        value: A tensor, a plain value, or containers of them.
        where: Its name in errors.
        own: Whether it is the user's own (``trial.state``), who can convert NumPy values; those in
            other objects (a learning rate, say) become Python numbers here.
    """
    if isinstance(value, torch.Tensor) and _can_be_loaded(type(value.detach())):
        return _compact(value.detach())
    again = partial(_portable, own=own)
    if type(value) in _PLAIN_TYPES:
        return bytearray(value) if isinstance(value, bytearray) else value
    if isinstance(value, np.generic) and not own:
        return value.item()
    if type(value) in (list, tuple, set):
        items = enumerate(value)
        return type(value)(again(item, f"{where}[{key}]") for key, item in items)
    # A default's factory can't be loaded safely: in the user's own state it would be missed.
    if type(value) in (dict, OrderedDict, Counter) or (type(value) is defaultdict and not own):
        return _portable_dict(value, where, again)
    raise FleetConfigError(_refusal(value, where))


def _can_be_loaded(kind: type[torch.Tensor]) -> bool:
    return kind is torch.Tensor or kind in torch.serialization.get_safe_globals()


def _portable_dict(
    value: dict[Any, Any], where: str, again: Callable[[Any, str], Any]
) -> dict[Any, Any]:
    items = {
        again(key, f"a key of {where}"): again(item, f"{where}[{key!r}]")
        for key, item in value.items()
    }
    if isinstance(value, Counter):  # the milestones of torch's MultiStepLR
        return Counter(items)
    if not isinstance(value, OrderedDict):
        return items
    ordered = OrderedDict(items)
    if hasattr(value, "_metadata"):  # versions of the modules, for load_state_dict
        vars(ordered)["_metadata"] = value._metadata
    return ordered


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Torch saves whole storages: a view of a large tensor would take all of it along."""
    if tensor.layout != torch.strided:
        return tensor
    size = tensor.numel() * tensor.element_size()
    return tensor.detach().clone() if tensor.untyped_storage().nbytes() > size else tensor


def _refusal(value: Any, where: str) -> str:
    name = type(value).__name__
    if isinstance(value, np.generic):
        return f"The value of {where} is a NumPy {name}; store `value.item()` instead."
    if isinstance(value, np.ndarray):
        return f"The value of {where} is a NumPy array; store `torch.from_numpy(value)` instead."
    if isinstance(value, defaultdict):
        return (
            f"The value of {where} is a defaultdict, but a checkpoint can't keep its default: "
            "store a dict, and use `setdefault(key, default)` where it may lack a key."
        )
    for plain in (dict, list, tuple, set):
        if isinstance(value, plain):
            return (
                f"The value of {where} is a {name}, but a checkpoint takes only a plain "
                f"{plain.__name__}: store `{plain.__name__}(value)`, and make the {name} from it "
                "where you need one."
            )
    return (
        f"The value of {where} is a {name}, but a checkpoint takes only numbers, strings, bytes, "
        f"tensors, and lists, tuples, sets and dicts of them: store such values, and make the "
        f"{name} from them when the trial resumes."
    )
