from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optuna_fleet.checkpoints import file as checkpoint_file
from optuna_fleet.checkpoints.file import CheckpointError, Owner
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer import checkpoint
from optuna_fleet.trainer.checkpoint import Checkpoint
from optuna_fleet.trainer.nested import tensors_in
from optuna_fleet.trainer.randomness import rng_state
from tests.fleets import write_checkpoint

OWNER = Owner(study="sweep", trial=5)


def make(**changes: Any) -> Checkpoint:
    parts: dict[str, Any] = {
        "loop": 1,
        "epoch": 3,
        "objects": [OrderedDict(weight=torch.arange(4.0))],
        "state": {"best": 0.5},
        "rng": [rng_state()],
        "history": {0: 0.1, 1: 0.2},
    }
    return Checkpoint(**(parts | changes))


def save(path: Path, content: Checkpoint) -> None:
    write_checkpoint(path, content, OWNER)


Pair = namedtuple("Pair", "left right")


class Log(dict[str, float]):
    """A dict of the user's own type."""


class Picture(torch.Tensor):
    """A tensor of the user's own type."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.float64(1), " is a float64"),
        (np.zeros(2), " is a ndarray"),
        ({"deep": [lambda: 0]}, r"\['deep'\]\[0\] is a function"),
        (frozenset([1]), " is a frozenset"),
        (defaultdict(list), " is a defaultdict"),
        ([{"deep": Pair(1, 2)}], r"\[0\]\['deep'\] is a Pair"),
        (Log(), " is a Log.*make the Log from"),
        (torch.ones(2).as_subclass(Picture), " is a Picture"),
    ],
)
def test_state_that_can_not_be_loaded_is_refused(value: Any, words: str) -> None:
    with pytest.raises(FleetConfigError, match=r"trial\.state\['mine'\]" + words):
        checkpoint.captured(make(state={"mine": value}))


def test_views_do_not_take_their_storage_along(tmp_path: Path) -> None:
    save(tmp_path / "c", make(state={"two": torch.zeros(10**6)[:2]}))
    assert (tmp_path / "c").stat().st_size < 10**5


def test_other_objects_numbers_are_converted(tmp_path: Path) -> None:
    item = {"lr": np.float64(0.5), "groups": defaultdict(list, a=[np.int64(2)])}
    save(tmp_path / "c", make(objects=[item]))
    assert checkpoint.load(tmp_path / "c", OWNER).content.objects == [
        {"lr": 0.5, "groups": {"a": [2]}}
    ]


def test_every_flipped_byte_is_noticed_and_what_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(path, make(rng=[]))
    good = path.read_bytes()
    places = [*range(100), *range(100, len(good), max(1, len(good) // 100)), len(good) - 1]
    flipped = [bytearray(good) for _ in places]
    for bad, place in zip(flipped, places, strict=True):
        bad[place] ^= 1 << (place % 8)
    for data in (*flipped, *(good[:length] for length in (0, 10, 43, 44, 500, -1))):
        with pytest.raises(CheckpointError, match=str(path)):
            checkpoint.loaded(path, data, OWNER)
    for other in (replace(OWNER, trial=6), replace(OWNER, study="another")):
        with pytest.raises(CheckpointError, match=f"not of trial {other.trial} of study"):
            checkpoint.loaded(path, good, other)
    assert checkpoint.loaded(path, good, OWNER).position == (1, 3)


def test_what_torch_could_not_load_again_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"could not load again.*store plain numbers"):
        checkpoint.captured(make(state={"mine": 10**700}))


def test_other_failures_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="can't be read"):
        checkpoint.load(tmp_path / "missing", OWNER)
    (tmp_path / "no folder").touch()
    with pytest.raises(CheckpointError, match="can't be written"):
        save(tmp_path / "no folder" / "c", make())
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_file, "FORMAT_VERSION", 99)
        save(tmp_path / "new", make())
    with pytest.raises(CheckpointError, match="version 99"):
        checkpoint.load(tmp_path / "new", OWNER)


def test_tensors_of_the_state_come_back_where_they_were() -> None:
    here, there = torch.ones(2), torch.ones(2, device="meta")
    state = {"n": 1, "all": OrderedDict(a=here, b=(there, [here])), "last": there}
    where = checkpoint._on_device(state)
    on_cpu = {"n": 1, "all": OrderedDict(a=here, b=(here, [here])), "last": here}
    loaded = checkpoint.placed(make(state=on_cpu, on_device=where), torch.device("meta")).state
    assert [t.device.type for t in tensors_in(loaded)] == ["cpu", "meta", "cpu", "meta"]
    assert type(loaded["all"]) is OrderedDict
    assert checkpoint._on_device(on_cpu) == []
